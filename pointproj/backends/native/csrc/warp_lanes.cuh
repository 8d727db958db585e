// The 32 threads of a GPU warp that work on one point together. All must call these functions together.
#pragma once

#include "nearest.h"

namespace pointproj {

constexpr int kWarpsPerBlock = 8;
constexpr unsigned kAll = 0xffffffffu;

// Shared memory of one warp.
struct Scratch {
  int run[32];         // where the points of a run of candidates lie
  int queued[64];      // neighbours found, not yet summed up
  double queued_far[64];
  int row[32];         // of the neighbours that are being summed up, with their weights
  double weight[32];
};

struct WarpLanes {
  static constexpr int width = 32;
  Scratch& scratch;

  POINTPROJ_FN explicit WarpLanes(Scratch& scratch) : scratch(scratch) {}
  POINTPROJ_FN int lane() const { return threadIdx.x & 31; }
  POINTPROJ_FN unsigned before() const { return (1u << lane()) - 1u; }
  POINTPROJ_FN int fetch_add(int* to, int value) const { return atomicAdd(to, value); }
  POINTPROJ_FN unsigned ballot(bool flag) const { return __ballot_sync(kAll, flag); }
  POINTPROJ_FN int lowest_bit(unsigned bits) const { return __ffs(bits) - 1; }
  template <class T>
  POINTPROJ_FN T take(T x, int source) const {
    return __shfl_sync(kAll, x, source);
  }
  template <class T>
  POINTPROJ_FN T minimum(T x) const {
    for (int step = 16; step > 0; step >>= 1) x = lesser(x, __shfl_xor_sync(kAll, x, step));
    return x;
  }
  template <class T>
  POINTPROJ_FN T sum(T x) const {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(kAll, x, step);
    return x;
  }
  // Of numbers that are not negative: their bits are in the order of the numbers.
  POINTPROJ_FN float smallest_square(float x) const {
    return __uint_as_float(__reduce_min_sync(kAll, __float_as_uint(x)));
  }
  POINTPROJ_FN double smallest_square(double x) const { return minimum(x); }

  // Each lane brings a run of points; the lanes go through all of them together, one candidate a lane.
  template <class Real, class Limit, class Body>
  POINTPROJ_FN void meet(
      const Points<Real>& points, const Vec3<Real>& q, int begin, int count, Limit, Body body) {
    const unsigned runs = ballot(count > 0);
    if (runs == 0u) return;
    int end = count;  // of this lane's run among all candidates
    POINTPROJ_UNROLL
    for (int step = 1; step < 32; step <<= 1) {
      const int other = __shfl_up_sync(kAll, end, step);
      if (lane() >= step) end += other;
    }
    const int candidates = take(end, 31), first = end - count;
    if (count > 0) scratch.run[__popc(runs & before())] = begin - first;
    __syncwarp();
    int runs_before = -1;
    for (int start = 0; start < candidates; start += 32) {
      // One bit for each candidate of these that is the first of its run: so many runs come before it.
      const bool starts = count > 0 && first >= start && first < start + 32;
      const unsigned heads = __reduce_or_sync(kAll, starts ? 1u << (first - start) : 0u);
      const int run = runs_before + __popc(heads & (before() | (1u << lane())));
      runs_before += __popc(heads);
      const int candidate = start + lane(), at = scratch.run[run] + candidate;
      const bool exists = candidate < candidates;
      Point<Real> point;
      Real squared = kInfinity<Real>;
      if (exists) {
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

  // One candidate a lane: the best of them goes to its place, until the best left is too far.
  template <class Real>
  POINTPROJ_FN void insert(List<Real>& list, Real squared, int row, bool exists) const {
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
      Scratch& scratch = lanes.scratch;
      const unsigned hits = lanes.ballot(hit);
      if (hits == 0u) return;
      if (hit) {
        const int place = size + __popc(hits & lanes.before());
        scratch.queued[place] = at;
        scratch.queued_far[place] = far;
      }
      size += __popc(hits);
      __syncwarp();
      if (size < 32) return;
      const int lane = lanes.lane();
      body(scratch.queued[lane], static_cast<Sum>(scratch.queued_far[lane]), true);
      size -= 32;
      const int rest = scratch.queued[32 + lane];
      const double rest_far = scratch.queued_far[32 + lane];
      __syncwarp();
      if (lane < size) {
        scratch.queued[lane] = rest;
        scratch.queued_far[lane] = rest_far;
      }
      __syncwarp();
    }
    template <class Body>
    POINTPROJ_FN void drain(WarpLanes& lanes, Body& body) {
      if (size == 0) return;
      const bool exists = lanes.lane() < size;
      const int at = exists ? lanes.scratch.queued[lanes.lane()] : 0;
      body(at, exists ? static_cast<Sum>(lanes.scratch.queued_far[lanes.lane()]) : Sum(0), exists);
    }
  };

  // Some lanes side by side over the channels of a row, and as many rows at a time as then fit into a warp.
  template <class Sum, int kVector>
  struct RowSum {
    const Sum* values;
    Sum* row;
    int stride, channels;
    int column;          // first channel of this lane
    int lanes_log;       // lanes a row, as a power of two
    Sum sums[kVector];

    POINTPROJ_FN void begin(const Sum* values_, int stride_, int channels_, int chunk, Sum* row_) {
      const int lane = threadIdx.x & 31, words = (channels_ + kVector - 1) / kVector;
      values = values_;
      row = row_;
      stride = stride_;
      channels = channels_;
      lanes_log = words > 16 ? 5 : words > 8 ? 4 : words > 4 ? 3 : words > 2 ? 2 : words > 1 ? 1 : 0;
      column = (chunk * 32 + (lane & ((1 << lanes_log) - 1))) * kVector;
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
      Scratch& scratch = lanes.scratch;
      const int size = __popc(lanes.ballot(exists)), lane = lanes.lane(), rows = 32 >> lanes_log;
      scratch.row[lane] = at;
      scratch.weight[lane] = weight;
      __syncwarp();
#pragma unroll 4
      for (int i = lane >> lanes_log; i < size; i += rows) {
        if (column < channels) {
          alignas(16) Sum value[kVector];
          load(static_cast<int64_t>(scratch.row[i]) * stride + column, value);
          const Sum scale = static_cast<Sum>(scratch.weight[i]);
          POINTPROJ_UNROLL
          for (int j = 0; j < kVector; ++j) sums[j] = multiply_add(scale, value[j], sums[j]);
        }
      }
      __syncwarp();
    }
    POINTPROJ_FN void scale(Sum factor) {
      POINTPROJ_UNROLL
      for (int i = 0; i < kVector; ++i) sums[i] *= factor;
    }
    POINTPROJ_FN void finish(WarpLanes& lanes, Sum factor) {
      POINTPROJ_UNROLL
      for (int i = 0; i < kVector; ++i) {
        for (int step = 1 << lanes_log; step < 32; step <<= 1) sums[i] += __shfl_xor_sync(kAll, sums[i], step);
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
