// The threads of a GPU warp that work on one point together: all 32, or 16 beside 16 others with a point of theirs.
//
// All 32 threads must call these functions together, also where two points are at work: loops go on until both
// are done.
#pragma once

#include "nearest.h"

namespace pointproj {

constexpr int kWarpsPerBlock = 8;
constexpr unsigned kAll = 0xffffffffu;

// Shared memory of the threads of one point. The sums' dtype decides what the doubles hold.
template <int kWidth>
struct Scratch {
  double queued_far[2 * kWidth];
  double weight[kWidth];
  int queued[2 * kWidth];  // neighbours found, not yet summed up, with their distances
  int row[kWidth];         // of the neighbours that are being summed up, with their weights
  int run[kWidth];         // where the points of a run of candidates lie
};

template <int kWidth>
struct WarpLanes {
  static constexpr int width = kWidth;
  static constexpr unsigned kMask = kWidth == 32 ? kAll : (1u << (kWidth & 31)) - 1u;
  Scratch<kWidth>& scratch;

  POINTPROJ_FN explicit WarpLanes(Scratch<kWidth>& scratch) : scratch(scratch) {}
  POINTPROJ_FN int lane() const { return threadIdx.x & (kWidth - 1); }
  POINTPROJ_FN int base() const { return threadIdx.x & 31 & ~(kWidth - 1); }
  POINTPROJ_FN unsigned before() const { return (1u << lane()) - 1u; }
  POINTPROJ_FN int fetch_add(int* to, int value) const { return atomicAdd(to, value); }
  POINTPROJ_FN bool anywhere(bool flag) const { return __any_sync(kAll, flag); }
  POINTPROJ_FN unsigned ballot(bool flag) const { return (__ballot_sync(kAll, flag) >> base()) & kMask; }
  POINTPROJ_FN int lowest_bit(unsigned bits) const { return __ffs(bits) - 1; }
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

  // Each lane brings a run of points; the lanes go through all of them together, one candidate a lane.
  template <class Real, class Limit, class Body>
  POINTPROJ_FN void meet(const Points<Real>& points, const Vec3<Real>& q, int begin, int count, Limit, Body body) {
    if (!anywhere(count > 0)) return;
    int end = count;  // of this lane's run among all candidates
    POINTPROJ_UNROLL
    for (int step = 1; step < kWidth; step <<= 1) {
      const int other = __shfl_up_sync(kAll, end, step, kWidth);
      if (lane() >= step) end += other;
    }
    const int candidates = take(end, kWidth - 1), first = end - count;
    const unsigned runs = ballot(count > 0);
    if (count > 0) scratch.run[__popc(runs & before())] = begin - first;
    __syncwarp();
    int runs_before = -1;
    for (int start = 0; anywhere(start < candidates); start += kWidth) {
      // One bit for each candidate of these that is the first of its run: so many runs come before it.
      const bool starts = count > 0 && first >= start && first < start + kWidth;
      const unsigned bit = starts ? 1u << (first - start + base()) : 0u;
      const unsigned heads = (__reduce_or_sync(kAll, bit) >> base()) & kMask;
      const int run = runs_before + __popc(heads & (before() | (1u << lane())));
      runs_before += __popc(heads);
      const int candidate = start + lane();
      const bool exists = candidate < candidates;
      int at = 0;
      Point<Real> point;
      Real squared = kInfinity<Real>;
      if (exists) {
        at = scratch.run[run] + candidate;
        point = points.load(at);
        squared = squared_distance(q, point.position);
      }
      body(at, point, squared, exists);
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

  // Neighbours wait until there is one for every lane.
  template <class Sum>
  struct Queue {
    int size;

    POINTPROJ_FN explicit Queue(WarpLanes&) : size(0) {}
    template <class Body>
    POINTPROJ_FN void push(WarpLanes& lanes, bool hit, int at, Sum far, Body& body) {
      if (!lanes.anywhere(hit)) return;
      int* queued = lanes.scratch.queued;
      Sum* queued_far = reinterpret_cast<Sum*>(lanes.scratch.queued_far);
      const unsigned hits = lanes.ballot(hit);
      const int lane = lanes.lane();
      if (hit) {
        const int place = size + __popc(hits & lanes.before());
        queued[place] = at;
        queued_far[place] = far;
      }
      size += __popc(hits);
      __syncwarp();
      if (!lanes.anywhere(size >= kWidth)) return;
      const bool full = size >= kWidth;
      body(full ? queued[lane] : 0, full ? queued_far[lane] : Sum(0), full);
      size -= full ? kWidth : 0;
      const int from = kWidth + lane;
      const bool moves = full && lane < size;
      const int rest = moves ? queued[from] : 0;
      const Sum rest_far = moves ? queued_far[from] : Sum(0);
      __syncwarp();
      if (moves) {
        queued[lane] = rest;
        queued_far[lane] = rest_far;
      }
      __syncwarp();
    }
    template <class Body>
    POINTPROJ_FN void drain(WarpLanes& lanes, Body& body) {
      if (!lanes.anywhere(size > 0)) return;
      const int lane = lanes.lane();
      const bool exists = lane < size;
      const Sum* queued_far = reinterpret_cast<const Sum*>(lanes.scratch.queued_far);
      body(exists ? lanes.scratch.queued[lane] : 0, exists ? queued_far[lane] : Sum(0), exists);
    }
  };

  // Some lanes side by side over the channels of a row, and as many rows at a time as there are lanes for.
  template <class Sum, int kVector>
  struct RowSum {
    const Sum* values;
    Sum* row;
    int stride, channels;
    int column;     // first channel of this lane
    int lanes_log;  // lanes a row, as a power of two
    Sum sums[kVector];

    POINTPROJ_FN void begin(const Sum* values_, int stride_, int channels_, int chunk, Sum* row_) {
      const int words = (channels_ + kVector - 1) / kVector;
      values = values_;
      row = row_;
      stride = stride_;
      channels = channels_;
      lanes_log = words > 1 ? 32 - __clz(words - 1) : 0;
      lanes_log = lesser(lanes_log, kWidth == 32 ? 5 : 4);
      column = (chunk * kWidth + (threadIdx.x & ((1 << lanes_log) - 1))) * kVector;
      POINTPROJ_UNROLL
      for (int i = 0; i < kVector; ++i) sums[i] = Sum(0);
    }
    POINTPROJ_FN void load(int64_t at, Sum* to) const {
      if constexpr (kVector == 1) {
        *to = values[at];
      } else {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(values + at);
      }
    }
    // One row and weight a lane; those that exist are in the first lanes.
    POINTPROJ_FN void add(WarpLanes& lanes, int at, Sum weight, bool exists) {
      int* rows = lanes.scratch.row;
      Sum* weights = reinterpret_cast<Sum*>(lanes.scratch.weight);
      const int size = __popc(lanes.ballot(exists)), lane = lanes.lane();
      rows[lane] = at;
      weights[lane] = weight;
      __syncwarp();
      if (column < channels) {
#pragma unroll 4
        for (int i = lane >> lanes_log; i < size; i += kWidth >> lanes_log) {
          alignas(16) Sum value[kVector];
          load(static_cast<int64_t>(rows[i]) * stride + column, value);
          POINTPROJ_UNROLL
          for (int j = 0; j < kVector; ++j) sums[j] = multiply_add(weights[i], value[j], sums[j]);
        }
      }
      __syncwarp();
    }
    POINTPROJ_FN void scale(Sum factor) {
      POINTPROJ_UNROLL
      for (int i = 0; i < kVector; ++i) sums[i] *= factor;
    }
    POINTPROJ_FN void finish(WarpLanes& lanes, Sum factor) {
      for (int step = 1 << lanes_log; step < kWidth; step <<= 1) {
        POINTPROJ_UNROLL
        for (int i = 0; i < kVector; ++i) sums[i] += __shfl_xor_sync(kAll, sums[i], step);
      }
      if (lanes.lane() >> lanes_log != 0) return;
      POINTPROJ_UNROLL
      for (int i = 0; i < kVector; ++i) {
        if (column + i < channels) row[column + i] = sums[i] * factor;
      }
    }
  };
};

}  // namespace pointproj
