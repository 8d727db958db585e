// Farthest-point sampling (Eldar et al., The farthest point strategy for progressive image sampling, 1997): the next
// point is always the one farthest from all that were chosen before.
//
// Points are sorted along a curve, in buckets of neighbours. A chosen point changes the distances of points near it
// only: a bucket is skipped if its box is farther from that point than all its points are from those chosen before.
// Boxes and points are measured with the same operations in the same order, so nothing is lost to rounding.
#pragma once

#include "lanes.h"
#include "scan.h"

#if defined(__CUDACC__)
#include "warp_lanes.cuh"
#else
#include <vector>
#endif

namespace pointproj::POINTPROJ_DEVICE {

constexpr int kLeastBucket = 32;  // points

template <class Real>
struct Farthest {
  Real distance = -kInfinity<Real>;  // squared
  int row = kNoRow;

  POINTPROJ_FN bool before(const Farthest& other) const {
    return distance > other.distance || (distance == other.distance && row < other.row);
  }
};

template <class Real>
struct Bucket {
  Vec3<Real> low, high;
  Farthest<Real> farthest;  // of its points from those chosen so far

  POINTPROJ_FN Real squared_distance_to(const Vec3<Real>& p) const {
    Vec3<Real> away;
    for (int axis = 0; axis < 3; ++axis) {
      away[axis] = greater(greater(low[axis] - p[axis], p[axis] - high[axis]), Real(0));
    }
    return squared_distance<Real>(away, Vec3<Real>{{0, 0, 0}});
  }
};

constexpr int kCurveBits = 10;    // of each coordinate
constexpr int kCurveSample = 64;  // points, or up to twice as many, say where the curve is

// Where points lie along a Morton curve, one cloud after another.
template <class Real>
struct PlaceOnCurve {
  using Number = Real;
  static constexpr int kLanes = 1, kBlocks = 8;

  const Real *points, *low, *high;  // (N, 3), and the box of all (3,)
  const Real* sample;               // (sampled, 3): of some points, each coordinate in ascending order
  int sampled;
  Batch batch;
  int64_t* places;  // (N,)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes&, int64_t item) const {
    const int row = static_cast<int>(item);
    // The curve is in the box of all, but no farther from the middle of the sample than twice the width of that.
    const Real *first = sample + 3 * (sampled / 8), *last = sample + 3 * (sampled - 1 - sampled / 8);
    const Real width = greater(greater(last[0] - first[0], last[1] - first[1]), last[2] - first[2]);
    const Real most = width > Real(0) ? 2 * width : kInfinity<Real>;
    Vec3<Real> begin;
    Real extent = 0;
    for (int axis = 0; axis < 3; ++axis) {
      begin[axis] = greater(first[axis] - most, low[axis]);
      extent = greater(extent, lesser(last[axis] + most, high[axis]) - begin[axis]);
    }
    const Vec3<Real> position = load_position(points, row);
    int64_t place = static_cast<int64_t>(batch.cloud_of(row)) << 3 * kCurveBits;
    for (int axis = 0; axis < 3; ++axis) {
      const Real part = (position[axis] - begin[axis]) / extent;
      const int cell = part > Real(0) ? static_cast<int>(lesser(part, Real(1)) * ((1 << kCurveBits) - 1)) : 0;
      for (int bit = 0; bit < kCurveBits; ++bit) place |= static_cast<int64_t>(cell >> bit & 1) << (3 * bit + axis);
    }
    places[row] = place;
  }
};

// Chooses points of one cloud. A `Team` works on it: a block of a GPU, or a thread of a CPU.
template <class Real>
struct FarthestPoints {
  const Real* points;  // (N, 3)
  SortedPoints<Real> sorted;
  Real* nearest;  // (N,): squared distance of each sorted point from those chosen so far
  Batch batch;
  const int64_t* starts;  // (clouds,): rows
  int64_t* rows;          // (clouds, steps)
  int steps;

  template <class Team>
  POINTPROJ_FN void operator()(Team& team, int cloud) const {
    auto& lanes = team.lanes;
    const int begin = batch.first_row(cloud), end = batch.first_row(cloud + 1), size = team.bucket_size(end - begin);
    int64_t* const result = rows + static_cast<int64_t>(cloud) * steps;
    for (int i = team.thread(); begin == end && i < steps; i += team.threads()) result[i] = -1;
    if (begin == end) return;
    auto buckets = team.buckets((end - begin - 1) / size + 1);
    team.each_bucket(buckets, [&](Bucket<Real>& bucket, int first) {
      const int number = begin + first * size;
      make_box(lanes, bucket, number, lesser(number + size, end));
    });
    int row = static_cast<int>(starts[cloud]);
    for (int step = 0; step < steps; ++step) {
      if (team.thread() == 0) result[step] = row;
      const Vec3<Real> chosen = load_position(points, row);
      Farthest<Real> farthest;
      team.each_bucket_if(
          buckets,
          [&](const Bucket<Real>& bucket) {
            return step == 0 || bucket.squared_distance_to(chosen) < bucket.farthest.distance;
          },
          [&](int first) {
            const int number = begin + first * size;
            return update(lanes, chosen, number, lesser(number + size, end));
          },
          [&](const Bucket<Real>& bucket) {
            if (bucket.farthest.before(farthest)) farthest = bucket.farthest;
          });
      row = team.farthest(farthest, step).row;
    }
  }

  template <class Lanes>
  POINTPROJ_FN void make_box(Lanes& lanes, Bucket<Real>& bucket, int begin, int end) const {
    Vec3<Real> low, high;  // high with the other sign
    for (int axis = 0; axis < 3; ++axis) low[axis] = high[axis] = kInfinity<Real>;
    for (int i = begin + lanes.lane(); i < end; i += Lanes::width) {
      const Vec3<Real> position = sorted.load(i).position;
      const bool finite = is_finite(position);
      nearest[i] = finite ? kInfinity<Real> : Real(-1);
      for (int axis = 0; axis < 3 && finite; ++axis) {
        low[axis] = lesser(low[axis], position[axis]);
        high[axis] = lesser(high[axis], -position[axis]);
      }
    }
    for (int axis = 0; axis < 3; ++axis) {
      bucket.low[axis] = lanes.minimum(low[axis]);
      bucket.high[axis] = -lanes.minimum(high[axis]);
    }
  }
  template <class Lanes>
  POINTPROJ_FN Farthest<Real> update(Lanes& lanes, const Vec3<Real>& chosen, int begin, int end) const {
    Farthest<Real> farthest;
    for (int i = begin + lanes.lane(); i < end; i += Lanes::width) {
      const Point<Real> point = sorted.load(i);
      const Real squared = squared_distance<Real>(point.position, chosen), before = nearest[i];
      Farthest<Real> own;
      own.distance = squared < before ? squared : before;
      own.row = point.row;
      nearest[i] = own.distance;
      if (own.before(farthest)) farthest = own;
    }
    return farthest;
  }
};

#if defined(__CUDACC__)
constexpr int kTeamWarps = 32;

// The farthest of a warp; distances below 0 are all the same.
template <class Real>
POINTPROJ_FN Farthest<Real> farthest_of_warp(Farthest<Real> own) {
  if constexpr (sizeof(Real) == 4) {
    const int bits = __float_as_int(own.distance), most = __reduce_max_sync(kAll, bits < 0 ? -1 : bits);
    const int row = __reduce_min_sync(kAll, (bits < 0 ? -1 : bits) == most ? own.row : kNoRow);
    own.distance = most < 0 ? Real(-1) : __int_as_float(most);
    own.row = row;
    return own;
  } else {
    for (int step = 16; step > 0; step >>= 1) {
      Farthest<Real> other;
      other.distance = __shfl_xor_sync(kAll, own.distance, step);
      other.row = __shfl_xor_sync(kAll, own.row, step);
      if (other.before(own)) own = other;
    }
    return own;
  }
}

// A block. Each thread has the boxes of some buckets in registers; a warp updates the points of a bucket together.
template <class Real>
struct BlockTeam {
  static constexpr int kOwn = sizeof(Real) == 4 ? 4 : 2;  // buckets of a thread

  WarpLanes<32> lanes;
  Farthest<Real> (*of_warps)[kTeamWarps];  // [2]: steps alternate, so that one barrier a step is enough
  struct Buckets {
    Bucket<Real> own[kOwn];
    int count;
  };

  POINTPROJ_FN int thread() const { return threadIdx.x; }
  POINTPROJ_FN int threads() const { return 32 * kTeamWarps; }
  POINTPROJ_FN int bucket_size(int points) const {
    constexpr int kMost = kOwn * 32 * kTeamWarps * kLeastBucket;
    return points <= kMost ? kLeastBucket : (points - 1) / kMost * kLeastBucket + kLeastBucket;
  }
  POINTPROJ_FN Buckets buckets(int count) const {
    Buckets made;
    made.count = count;
    return made;
  }
  // Adjacent buckets belong to different warps, since they are often updated in the same step.
  POINTPROJ_FN int number(int own, int lane) const {
    return (own * 32 + lane) * kTeamWarps + static_cast<int>(threadIdx.x) / 32;
  }
  template <class Made, class Body>
  POINTPROJ_FN void each_bucket(Made& buckets, Body body) {
    POINTPROJ_UNROLL
    for (int own = 0; own < kOwn; ++own) {
      for (int lane = 0; lane < 32 && number(own, lane) < buckets.count; ++lane) {
        Bucket<Real> bucket;
        body(bucket, number(own, lane));
        if (lanes.lane() == lane) buckets.own[own] = bucket;
      }
    }
  }
  template <class Made, class Test, class Update, class Take>
  POINTPROJ_FN void each_bucket_if(Made& buckets, Test test, Update update, Take take) {
    POINTPROJ_UNROLL
    for (int own = 0; own < kOwn; ++own) {
      const bool exists = number(own, lanes.lane()) < buckets.count;
      Bucket<Real>& bucket = buckets.own[own];
      for (unsigned hits = lanes.ballot(exists && test(bucket)); hits; hits &= hits - 1) {
        const int lane = lanes.lowest_bit(hits);
        const Farthest<Real> farthest = farthest_of_warp(update(number(own, lane)));
        if (lanes.lane() == lane) bucket.farthest = farthest;
      }
      if (exists) take(bucket);
    }
  }
  POINTPROJ_FN Farthest<Real> farthest(Farthest<Real> own, int step) {
    own = farthest_of_warp(own);
    Farthest<Real>* const all = of_warps[step & 1];
    if (lanes.lane() == 0) all[threadIdx.x / 32] = own;
    __syncthreads();
    return farthest_of_warp(all[lanes.lane()]);
  }
};

template <class Real>
__global__ void __launch_bounds__(32 * kTeamWarps, 1) farthest_points_kernel(const FarthestPoints<Real> task) {
  __shared__ Shared<32, float> shared[kTeamWarps];
  __shared__ Farthest<Real> of_warps[2][kTeamWarps];
  BlockTeam<Real> team{WarpLanes<32>(shared[threadIdx.x / 32]), of_warps};
  task(team, static_cast<int>(blockIdx.x));
}
#else
template <class Real>
struct ThreadTeam {
  OneLane lanes;

  int thread() const { return 0; }
  int threads() const { return 1; }
  int bucket_size(int) const { return kLeastBucket; }
  std::vector<Bucket<Real>> buckets(int count) const { return std::vector<Bucket<Real>>(static_cast<size_t>(count)); }
  template <class Made, class Body>
  void each_bucket(Made& buckets, Body body) {
    for (size_t i = 0; i < buckets.size(); ++i) body(buckets[i], static_cast<int>(i));
  }
  template <class Made, class Test, class Update, class Take>
  void each_bucket_if(Made& buckets, Test test, Update update, Take take) {
    for (size_t i = 0; i < buckets.size(); ++i) {
      if (test(buckets[i])) buckets[i].farthest = update(static_cast<int>(i));
      take(buckets[i]);
    }
  }
  Farthest<Real> farthest(const Farthest<Real>& own, int) const { return own; }
};
#endif

}  // namespace pointproj::POINTPROJ_DEVICE
