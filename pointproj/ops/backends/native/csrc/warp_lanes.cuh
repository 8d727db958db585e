// Threads of a GPU warp that work on one point together: all 32, or one of several groups, each with its own point.
//
// All 32 threads must call these functions together, whatever their points: loops go on until all points are done. The
// interface is that of lanes.h.
#pragma once

#include "queue.h"

namespace pointproj::POINTPROJ_DEVICE {

constexpr unsigned kAll = 0xffffffffu;

// Shared memory of the threads of one point.
template <int kWidth, class Number>
struct Shared {
  Neighbor<Number> queue[kQueueLength + 1];  // one more, so that queues side by side begin in different banks
  int run[kWidth == 32 ? 32 : 1];            // first point of each run, less the candidates before the run
};

// Holds a number in a register: the compiler would compute it again each time.
template <class T>
POINTPROJ_FN void pin(T& x) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
}

template <class T>
POINTPROJ_FN T running_sum(T x) {
  const int lane = threadIdx.x & 31;
  POINTPROJ_UNROLL
  for (int step = 1; step < 32; step <<= 1) {
    const T other = __shfl_up_sync(kAll, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

template <int kWidth>
struct WarpLanes {
  static constexpr int width = kWidth;
  static constexpr int kAtOnce = 2, kMostAtOnce = kAtOnce * kWidth;  // points between two calls of flush
  void* queue;
  int* run;
  unsigned group;  // bits of the threads of this point in the warp
  unsigned lower;  // and of all those before this one
  bool has_item;   // else it repeats the last one

  template <class Number>
  POINTPROJ_FN explicit WarpLanes(Shared<kWidth, Number>& shared, bool has_item = true)
      : queue(shared.queue), run(shared.run), has_item(has_item) {
    const unsigned thread = threadIdx.x & 31;
    group = kAll >> (32 - kWidth) << (thread & ~(kWidth - 1));
    lower = (1u << thread) - 1u;
    pin(queue);
    pin(group);
    pin(lower);
  }
  template <class Number>
  POINTPROJ_FN Neighbor<Number>* reserve() const {
    __builtin_assume(__isShared(queue));
    return static_cast<Neighbor<Number>*>(queue);
  }
  POINTPROJ_FN int lane() const { return threadIdx.x & (kWidth - 1); }
  POINTPROJ_FN bool any(bool flag) const { return __any_sync(kAll, flag); }
  POINTPROJ_FN unsigned ballot(bool flag) const { return __ballot_sync(kAll, flag) & group; }
  POINTPROJ_FN int lowest_bit(unsigned bits) const { return __ffs(bits) - 1; }
  POINTPROJ_FN int bit_count(unsigned bits) const { return __popc(bits); }
  POINTPROJ_FN int bits_before(unsigned bits) const { return __popc(bits & lower); }
  POINTPROJ_FN void sync() const { __syncwarp(); }
  POINTPROJ_FN void limit_budget() const {}
  POINTPROJ_FN bool spend(int) const { return true; }
  POINTPROJ_FN int fetch_add(int* to, int value) const { return atomicAdd(to, value); }
  template <class Sum>
  POINTPROJ_FN void add(Sum* to, Sum value) const {
    atomicAdd(to, value);
  }
  // Calls body(of_point, lane, width) for the points of the warp one after another, by all its threads: of_point(x) is
  // the x of that point.
  template <class Body>
  POINTPROJ_FN void each_point(Body body) const {
    for (int first = 0; first < 32; first += kWidth) {
      const auto of_point = [&](auto x) {
        if constexpr (std::is_pointer_v<decltype(x)>) {
          return reinterpret_cast<decltype(x)>(__shfl_sync(kAll, reinterpret_cast<unsigned long long>(x), first));
        } else {
          return __shfl_sync(kAll, x, first);
        }
      };
      body(of_point, static_cast<int>(threadIdx.x & 31), 32);
    }
  }
  template <class T>
  POINTPROJ_FN T broadcast(T x, int source) const { return __shfl_sync(kAll, x, source, kWidth); }
  // The x of the lane whose number differs by the bits of the mask.
  template <class T>
  POINTPROJ_FN T exchange(T x, int mask) const { return __shfl_xor_sync(kAll, x, mask, kWidth); }
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

  // Lane i of kCount lanes gets the sum of their i-th numbers.
  template <int kCount, class Sum>
  POINTPROJ_FN static Sum sums_of(Sum (&numbers)[kCount]) {
    POINTPROJ_UNROLL
    for (int step = kCount / 2; step > 0; step >>= 1) {
      const bool upper = (threadIdx.x & step) != 0;
      POINTPROJ_UNROLL
      for (int j = 0; j < step; ++j) {
        const Sum given = upper ? numbers[j] : numbers[j + step];
        const Sum kept = upper ? numbers[j + step] : numbers[j];
        numbers[j] = kept + __shfl_xor_sync(kAll, given, step);
      }
    }
    return numbers[0];
  }

  // Each lane brings a run of points.
  template <class Real, class Visitor>
  POINTPROJ_FN int visit(
      const SortedPoints<Real>& points, const Vec3<Real>& q, int begin, int count, Visitor& visitor,
      int most = kNoRow) {
    if constexpr (kWidth == 32) {
      return visit_shared(points, q, begin, count, visitor, most);
    } else {
      visit_own(points, q, begin, count, visitor);
      return 0;
    }
  }
  // Every lane goes through its own run, two points at a time.
  template <class Real, class Visitor>
  POINTPROJ_FN void visit_own(
      const SortedPoints<Real>& points, const Vec3<Real>& q, int begin, int count, Visitor& visitor) {
    for (int i = 0; any(i < count); i += kAtOnce) {
      Point<Real> some[kAtOnce];
      POINTPROJ_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        if (i + j < count) some[j] = points.load(begin + i + j);
      }
      POINTPROJ_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        const Real squared = squared_distance<Real>(q, some[j].position);
        visitor.process(*this, begin + i + j, some[j], squared, i + j < count);
      }
      visitor.flush(*this);
    }
  }
  // The points of all runs are divided among the lanes of a warp.
  template <class Real, class Visitor>
  POINTPROJ_FN int visit_shared(
      const SortedPoints<Real>& points, const Vec3<Real>& q, int begin, int count, Visitor& visitor, int most) {
    if (!any(count > 0)) return 0;
    const int end = running_sum(count), first = end - count;  // of this lane's run among all candidates
    const int candidates = broadcast(end, kWidth - 1);
    if (candidates > most) return candidates;
    const unsigned runs = ballot(count > 0);
    if (count > 0) run[bits_before(runs)] = begin - first;
    __syncwarp();
    int runs_before = -1;
    for (int start = 0; any(start < candidates); start += kWidth) {
      // A bit for each of these candidates that begins a run: the bits up to a candidate number the runs.
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
        squared = squared_distance<Real>(q, point.position);
      }
      visitor.process(*this, at, point, squared, exists);
      visitor.flush(*this);
    }
    __syncwarp();
    return candidates;
  }

  // The lanes have adjacent channels of a row, in several parts if it is long. They read kVector values at a time, and
  // rows begin at multiples of that. Lanes beyond the last channel read the first ones, and do not use them.
  template <class Sum, int kVector>
  struct RowSum {
    static constexpr int kParts = kChannelsAtOnce / (kWidth * kVector);
    const char* columns[kParts];  // of this lane, in the first row
    unsigned stride;              // in bytes
    Sum* row;
    int channels, column;
    Sum sums[kParts][kVector];

    POINTPROJ_FN RowSum(Matrix<const Sum> values, int chunk, Matrix<Sum> result, int row)
        : stride(static_cast<unsigned>(values.columns) * sizeof(Sum)), row(result[row]), channels(result.columns) {
      column = chunk * kChannelsAtOnce + (threadIdx.x & (kWidth - 1)) * kVector;
      read(values);
      POINTPROJ_UNROLL
      for (int i = 0; i < kParts * kVector; ++i) sums[i / kVector][i % kVector] = Sum(0);
    }
    POINTPROJ_FN void read(Matrix<const Sum> values) {
      POINTPROJ_UNROLL
      for (int part = 0; part < kParts; ++part) {
        const int first = column_of(part) < channels ? column_of(part) : 0;
        columns[part] = reinterpret_cast<const char*>(values.data + first);
      }
    }
    POINTPROJ_FN int column_of(int part) const { return column + part * kWidth * kVector; }
    POINTPROJ_FN static void load(const char* from, Sum* to) {
      if constexpr (kVector == 1) {
        *to = *reinterpret_cast<const Sum*>(from);
      } else {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      }
    }
    // Adds rows times their weights.
    POINTPROJ_FN void add(const Neighbor<Sum>* list, int size) {
#pragma unroll 4
      for (int i = 0; i < size; ++i) {
        const Neighbor<Sum> neighbor = list[i];
        const uint64_t offset = static_cast<uint64_t>(static_cast<unsigned>(neighbor.at)) * stride;
        POINTPROJ_UNROLL
        for (int part = 0; part < kParts; ++part) {
          alignas(16) Sum value[kVector];
          load(columns[part] + offset, value);
          POINTPROJ_UNROLL
          for (int j = 0; j < kVector; ++j) sums[part][j] = multiply_add(neighbor.value, value[j], sums[part][j]);
        }
      }
    }
    POINTPROJ_FN void scale(Sum factor) {
      POINTPROJ_UNROLL
      for (int i = 0; i < kParts * kVector; ++i) sums[i / kVector][i % kVector] *= factor;
    }
    POINTPROJ_FN void finish(Sum factor) {
      POINTPROJ_UNROLL
      for (int i = 0; i < kParts * kVector; ++i) {
        const int at = column_of(i / kVector) + i % kVector;
        if (at < channels) row[at] = sums[i / kVector][i % kVector] * factor;
      }
    }
  };

  // Products of a point's row with those of its neighbours. The lanes read adjacent channels of the same row, in whole
  // lines of the cache, and each lane gets the product of another neighbour. If each lane read a row of its own, they
  // would read 32 times as many lines.
  template <class Sum, int kVector>
  struct RowProducts {
    static constexpr int kParts = kChannelsAtOnce / (kWidth * kVector);
    Matrix<const Sum> others;
    const Sum* row;
    int channels, column;

    POINTPROJ_FN RowProducts(const Sum* row, Matrix<const Sum> others, int channels)
        : others(others), row(row), channels(channels), column((threadIdx.x & (kWidth - 1)) * kVector) {}
    POINTPROJ_FN int column_of(int part) const { return column + part * kWidth * kVector; }
    POINTPROJ_FN void load(const Sum* from, int first, Sum (&to)[kParts][kVector]) const {
      POINTPROJ_UNROLL
      for (int i = 0; i < kParts * kVector; ++i) {
        const int at = first + column_of(i / kVector) + i % kVector;
        to[i / kVector][i % kVector] = at < channels ? from[at] : Sum(0);
      }
    }
    // With one row, the same in all lanes; rounded as those of the neighbours.
    POINTPROJ_FN Sum with(const Sum* other) const {
      Sum product = 0;
      for (int first = 0; first < channels; first += kChannelsAtOnce) {
        Sum mine[kParts][kVector], theirs[kParts][kVector];
        load(row, first, mine);
        load(other, first, theirs);
        POINTPROJ_UNROLL
        for (int i = 0; i < kParts * kVector; ++i) {
          product = multiply_add(mine[i / kVector][i % kVector], theirs[i / kVector][i % kVector], product);
        }
      }
      POINTPROJ_UNROLL
      for (int step = kWidth / 2; step > 0; step >>= 1) product += __shfl_xor_sync(kAll, product, step);
      return product;
    }
    // With the row of list[first + lane], if there is one.
    POINTPROJ_FN Sum with_neighbor(const Neighbor<Sum>* list, int first, int size) const {
      Sum products[kWidth] = {};
      for (int begin = 0; begin < channels; begin += kChannelsAtOnce) {
        alignas(16) Sum own[kParts][kVector];  // read again each time: registers are few, and it is in the cache
        load_words(row + begin, begin, own);
        // No branch comes before a load, so that all rows are loaded at once.
        POINTPROJ_UNROLL
        for (int j = 0; j < kWidth; ++j) {
          alignas(16) Sum values[kParts][kVector];
          load_words(others[first + j < size ? list[first + j].at : 0] + begin, begin, values);
          POINTPROJ_UNROLL
          for (int i = 0; i < kParts * kVector; ++i) {
            if (begin + column_of(i / kVector) >= channels) continue;
            products[j] = multiply_add(own[i / kVector][i % kVector], values[i / kVector][i % kVector], products[j]);
          }
        }
      }
      return sums_of(products);
    }

   private:
    // Channels from `begin` on; instead of those beyond the last one, the first.
    POINTPROJ_FN void load_words(const Sum* from, int begin, Sum (&to)[kParts][kVector]) const {
      POINTPROJ_UNROLL
      for (int part = 0; part < kParts; ++part) {
        const int first = begin + column_of(part) < channels ? column_of(part) : 0;
        RowSum<Sum, kVector>::load(reinterpret_cast<const char*>(from + first), to[part]);
      }
    }
  };
};

}  // namespace pointproj::POINTPROJ_DEVICE
