// The threads of a GPU warp that work on one point together: all 32, or fewer beside others with a point of theirs.
//
// All 32 threads must call these functions together, also where several points are at work: loops go on until
// all are done.
#pragma once

#include "nearest.h"

namespace pointproj {

constexpr unsigned kAll = 0xffffffffu;

// Shared memory of the threads of one point.
template <int kWidth, class Number>
struct Scratch {
  Neighbor<Number> list[kMostWaiting + 1];  // one more, so that lists side by side begin in different banks
  int run[kWidth == 32 ? 32 : 1];           // where the points of a run of candidates lie
};

// Keeps the compiler from computing a number again and again to save its register.
template <class T>
POINTPROJ_FN void pin(T& x) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
}

template <int kWidth>
struct WarpLanes {
  static constexpr int width = kWidth;
  static constexpr int kAtOnce = 2, kMostAtOnce = kAtOnce * kWidth;  // candidates between two calls of `then`
  void* waiting;
  int* run;
  unsigned group;  // bits of the threads of this point in the warp
  unsigned lower;  // and of all those before this one
  bool has_item;   // else it repeats what others do

  template <class Number>
  POINTPROJ_FN explicit WarpLanes(Scratch<kWidth, Number>& scratch, bool has_item = true)
      : waiting(scratch.list), run(scratch.run), has_item(has_item) {
    const unsigned thread = threadIdx.x & 31;
    group = kAll >> (32 - kWidth) << (thread & ~(kWidth - 1));
    lower = (1u << thread) - 1u;
    pin(waiting);
    pin(group);
    pin(lower);
  }
  template <class Number>
  POINTPROJ_FN Neighbor<Number>* list() const {
    __builtin_assume(__isShared(waiting));
    return static_cast<Neighbor<Number>*>(waiting);
  }
  POINTPROJ_FN int lane() const { return threadIdx.x & (kWidth - 1); }
  POINTPROJ_FN int fetch_add(int* to, int value) const { return atomicAdd(to, value); }
  template <class Sum>
  POINTPROJ_FN void add(Sum* to, Sum value) const {
    atomicAdd(to, value);
  }
  POINTPROJ_FN bool anywhere(bool flag) const { return __any_sync(kAll, flag); }
  POINTPROJ_FN unsigned ballot(bool flag) const { return __ballot_sync(kAll, flag) & group; }
  POINTPROJ_FN int lowest_bit(unsigned bits) const { return __ffs(bits) - 1; }
  POINTPROJ_FN int bit_count(unsigned bits) const { return __popc(bits); }
  POINTPROJ_FN int bits_before(unsigned bits) const { return __popc(bits & lower); }
  POINTPROJ_FN void sync() const { __syncwarp(); }
  POINTPROJ_FN void begin_patience() const {}
  POINTPROJ_FN bool has_patience(int) const { return true; }
  template <class T>
  POINTPROJ_FN T take(T x, int source) const {
    return __shfl_sync(kAll, x, source, kWidth);
  }
  template <class T>
  POINTPROJ_FN T minimum(T x) const {
    POINTPROJ_UNROLL
    for (int step = kWidth / 2; step > 0; step >>= 1) x = lesser(x, __shfl_xor_sync(kAll, x, step));
    return x;
  }
  template <class T>
  POINTPROJ_FN T sum(T x) const {
    POINTPROJ_UNROLL
    for (int step = kWidth / 2; step > 0; step >>= 1) x += __shfl_xor_sync(kAll, x, step);
    return x;
  }

  // Each lane brings a run of points. A whole warp shares them out, one candidate a lane; fewer lanes go through
  // their own, two at a time. body(at, point, squared distance, exists) sees one a lane, then() follows some.
  template <class Real, class Limit, class Body, class Then>
  POINTPROJ_FN void meet(const Points<Real>& points, const Vec3<Real>& q, int begin, int count, Limit, Body body,
                         Then then) {
    if constexpr (kWidth == 32) {
      share_out(points, q, begin, count, body, then);
    } else {
      go_through(points, q, begin, count, body, then);
    }
  }
  template <class Real, class Body, class Then>
  POINTPROJ_FN void go_through(const Points<Real>& points, const Vec3<Real>& q, int begin, int count, Body& body,
                               Then& then) {
    for (int i = 0; anywhere(i < count); i += kAtOnce) {
      Point<Real> some[kAtOnce];
      POINTPROJ_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        if (i + j < count) some[j] = points.load(begin + i + j);
      }
      POINTPROJ_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        body(begin + i + j, some[j], squared_distance(q, some[j].position), i + j < count);
      }
      then();
    }
  }
  template <class Real, class Body, class Then>
  POINTPROJ_FN void share_out(const Points<Real>& points, const Vec3<Real>& q, int begin, int count, Body& body,
                              Then& then) {
    if (!anywhere(count > 0)) return;
    int end = count;  // of this lane's run among all candidates
    POINTPROJ_UNROLL
    for (int step = 1; step < kWidth; step <<= 1) {
      const int other = __shfl_up_sync(kAll, end, step, kWidth);
      if (lane() >= step) end += other;
    }
    const int candidates = take(end, kWidth - 1), first = end - count;
    const unsigned runs = ballot(count > 0);
    if (count > 0) run[bits_before(runs)] = begin - first;
    __syncwarp();
    int runs_before = -1;
    for (int start = 0; anywhere(start < candidates); start += kWidth) {
      // One bit for each candidate of these that is the first of its run: so many runs come before it.
      const bool starts = count > 0 && first >= start && first < start + kWidth;
      const unsigned heads = __reduce_or_sync(kAll, starts ? 1u << (first - start) : 0u);
      const int at_run = runs_before + __popc(heads & (lower | (1u << lane())));
      runs_before += __popc(heads);
      const int candidate = start + lane();
      const bool exists = candidate < candidates;
      int at = 0;
      Point<Real> point;
      Real squared = kInfinity<Real>;
      if (exists) {
        at = run[at_run] + candidate;
        point = points.load(at);
        squared = squared_distance(q, point.position);
      }
      body(at, point, squared, exists);
      then();
    }
    __syncwarp();
  }

  // The k best of all lanes: the i-th in lane i.
  template <class Real>
  struct List {
    Real squared;
    int row;
    Real worst;
    int k;

    POINTPROJ_FN explicit List(int k) : squared(kInfinity<Real>), row(kNoRow), worst(kInfinity<Real>), k(k) {}
    POINTPROJ_FN Real limit() const { return worst; }
    POINTPROJ_FN void write(int, int* to) const {
      const int lane = threadIdx.x & 31;
      if (lane < k) to[lane] = row == kNoRow ? -1 : row;
    }
  };

  // Of numbers that are not negative: their bits are in the order of the numbers.
  POINTPROJ_FN float smallest_square(float x) const {
    return __uint_as_float(__reduce_min_sync(kAll, __float_as_uint(x)));
  }
  POINTPROJ_FN double smallest_square(double x) const { return minimum(x); }

  // One candidate a lane: the best of them goes to its place, until the best left is too far.
  template <class Real>
  POINTPROJ_FN void insert(List<Real>& list, Real squared, int row, bool exists) const {
    static_assert(kWidth == 32);
    bool hit = exists && squared <= list.worst;
    while (ballot(hit)) {
      const Real least = smallest_square(hit ? squared : kInfinity<Real>);
      const bool equal = hit && squared == least;
      const unsigned equals = ballot(equal);
      int source = lowest_bit(equals);
      int least_row = take(row, source);
      if (equals & (equals - 1)) {
        least_row = __reduce_min_sync(kAll, equal ? row : kNoRow);
        source = lowest_bit(ballot(equal && row == least_row));
      }
      const bool stays = is_before(list.squared, list.row, least, least_row);
      const int place = __popc(ballot(stays && lane() < list.k));
      if (place == list.k) return;
      const Real squared_before = __shfl_up_sync(kAll, list.squared, 1);
      const int row_before = __shfl_up_sync(kAll, list.row, 1);
      if (lane() >= place) {
        list.squared = lane() == place ? least : squared_before;
        list.row = lane() == place ? least_row : row_before;
      }
      list.worst = take(list.squared, list.k - 1);
      hit = hit && lane() != source && squared <= list.worst;
    }
  }

  // The lanes lie side by side over the channels of a row, several times if it is long. What lies beyond the last
  // channel reads the first ones in vain.
  template <class Sum, int kVector>
  struct RowSum {
    static constexpr int kHeld = kChannelsAtOnce / (kWidth * kVector);
    const char* columns[kHeld];  // of this lane, in the first row
    unsigned stride;             // in bytes
    Sum* row;
    int channels, column;
    Sum sums[kHeld][kVector];

    POINTPROJ_FN int column_of(int held) const { return column + held * kWidth * kVector; }
    POINTPROJ_FN void begin(const Sum* values, int stride_, int channels_, int chunk, Sum* row_) {
      stride = static_cast<unsigned>(stride_) * sizeof(Sum);
      row = row_;
      channels = channels_;
      column = chunk * kChannelsAtOnce + (threadIdx.x & (kWidth - 1)) * kVector;
      POINTPROJ_UNROLL
      for (int held = 0; held < kHeld; ++held) {
        columns[held] = reinterpret_cast<const char*>(values + (column_of(held) < channels ? column_of(held) : 0));
        POINTPROJ_UNROLL
        for (int i = 0; i < kVector; ++i) sums[held][i] = Sum(0);
      }
    }
    POINTPROJ_FN static void load(const char* from, Sum* to) {
      if constexpr (kVector == 1) {
        *to = *reinterpret_cast<const Sum*>(from);
      } else {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      }
    }
    // Rows times their weights.
    POINTPROJ_FN void add(const Neighbor<Sum>* list, int size) {
#pragma unroll 4
      for (int i = 0; i < size; ++i) {
        const Neighbor<Sum> neighbor = list[i];
        const uint64_t offset = static_cast<uint64_t>(static_cast<unsigned>(neighbor.at)) * stride;
        POINTPROJ_UNROLL
        for (int held = 0; held < kHeld; ++held) {
          alignas(16) Sum value[kVector];
          load(columns[held] + offset, value);
          POINTPROJ_UNROLL
          for (int j = 0; j < kVector; ++j) sums[held][j] = multiply_add(neighbor.number, value[j], sums[held][j]);
        }
      }
    }
    POINTPROJ_FN void scale(Sum factor) {
      POINTPROJ_UNROLL
      for (int i = 0; i < kHeld * kVector; ++i) sums[i / kVector][i % kVector] *= factor;
    }
    POINTPROJ_FN void finish(WarpLanes&, Sum factor) {
      POINTPROJ_UNROLL
      for (int i = 0; i < kHeld * kVector; ++i) {
        const int at = column_of(i / kVector) + i % kVector;
        if (at < channels) row[at] = sums[i / kVector][i % kVector] * factor;
      }
    }
  };
};

}  // namespace pointproj
