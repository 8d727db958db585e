// Aggregation over neighbour lists, nearest first, and its gradients; formulas in pointproj/pairwise.py.
//
// What belongs to a reference point is gathered over the pairs it is in, which the lists, inverted by a counting
// sort, tell. No two threads ever add to one place.
#pragma once

#include "build_cells.h"
#include "softmax.h"

namespace pointproj {

struct Lists {
  const int* rows;  // (Q, k), -1 where there are fewer
  int k;
};

template <class Real, class Sum>
struct AggregateListed {
  static constexpr int kLanes = 32;

  const Real* query_points;
  const Real* reference_points;
  const Sum* features;  // (N, channels)
  const Sum* sigma;
  Lists lists;
  int channels, chunks;
  Sum* aggregated;  // (Q, channels)
  Sum* weights;     // (Q, k)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [query, chunk] = split_item(item, chunks);
    const int k = lists.k;
    const int64_t first = static_cast<int64_t>(query) * k;
    const Vec3<Real> p = load_row(query_points, query);
    const Sum per_sigma = Sum(1) / *sigma;
    const int nearest_row = lists.rows[first];
    const Sum nearest = nearest_row < 0 ? Sum(0) : distance<Sum>(p, load_row(reference_points, nearest_row));
    typename Lanes::template RowSum<Sum, 1> sums;
    sums.begin(features, channels, channels, chunk, aggregated + static_cast<int64_t>(query) * channels);
    Sum total = 0;
    for (int begin = 0; begin < k; begin += Lanes::width) {
      const int i = begin + lanes.lane();
      const int row = i < k ? lists.rows[first + i] : -1;
      Sum weight = 0;
      if (row >= 0) weight = exp((nearest - distance<Sum>(p, load_row(reference_points, row))) * per_sigma);
      if (chunk == 0 && i < k) weights[first + i] = weight;
      total += weight;
      sums.add(lanes, row, weight, row >= 0);
    }
    total = lanes.sum(total);
    const Sum inverse = total > Sum(0) ? Sum(1) / total : Sum(0);
    if (chunk == 0) {
      for (int i = lanes.lane(); i < k; i += Lanes::width) weights[first + i] *= inverse;
    }
    sums.finish(lanes, is_finite(p) ? inverse : kNan<Sum>);
  }
};

// For every reference point the pairs (query times k plus place) that it is in.
struct InvertLists {
  const int* rows;  // (pairs,)
  int pairs, references;
  int* start;  // (references + 2,): first pair of each; then of places without a neighbour
  int* order;  // (pairs,)
  int* occupancy;  // (references + 1,)
  int* place;      // (pairs, 2)
  int* partial;

  template <class Machine>
  POINTPROJ_FN void operator()(Machine& machine) const {
    machine.each(references + 1, [&](int i) {
      occupancy[i] = 0;
      if (i == 0) start[0] = 0;
    });
    machine.barrier();
    machine.count(
        pairs, occupancy, place,
        [&](int pair) -> Slot { return {rows[pair] < 0 ? references : rows[pair], true}; }, [](int) {});
    machine.barrier();
    machine.scan(occupancy, references + 1, partial, [&](int64_t row, int sum) { start[row + 1] = sum; });
    machine.barrier();
    machine.each(pairs, [&](int pair) {
      const int* slot = place + 2 * static_cast<int64_t>(pair);
      order[start[slot[0]] + slot[1]] = pair;
    });
  }
};

struct InvertedLists {
  const int* start;
  const int* order;
  int k;
};

// Gradient of the features.
template <class Sum>
struct GatherListed {
  static constexpr int kLanes = 32;

  InvertedLists inverted;
  const Sum* weights;  // (Q, k)
  const Sum* grad;     // (Q, channels)
  int channels, chunks;
  Sum* d_features;  // (N, channels)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [reference, chunk] = split_item(item, chunks);
    typename Lanes::template RowSum<Sum, 1> sums;
    sums.begin(grad, channels, channels, chunk, d_features + static_cast<int64_t>(reference) * channels);
    const int end = inverted.start[reference + 1];
    for (int begin = inverted.start[reference]; begin < end; begin += Lanes::width) {
      const int i = begin + lanes.lane();
      const int pair = i < end ? inverted.order[i] : 0;
      sums.add(lanes, pair / inverted.k, i < end ? weights[pair] : Sum(0), i < end);
    }
    sums.finish(lanes, Sum(1));
  }
};

// Gradients of the queries and of sigma, and what each pair does to its reference point.
template <class Real, class Sum>
struct PullListed {
  static constexpr int kLanes = 32;

  const Real* query_points;
  const Real* reference_points;
  const Sum* features;
  const Sum* sigma;
  Lists lists;
  const Sum* weights;
  const Sum* grad;
  int channels;
  Sum* scales;           // (Q, k): gradient along p_i - q_j, per unit of it
  Real* d_query_points;  // (Q, 3)
  Sum* sigma_rows;       // (Q,)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int query) const {
    const int k = lists.k;
    const int64_t first = static_cast<int64_t>(query) * k;
    const Vec3<Real> p = load_row(query_points, query);
    const Sum per_sigma = Sum(1) / *sigma;
    Sum mean = 0;
    for (int i = lanes.lane(); i < k; i += Lanes::width) {
      const int row = lists.rows[first + i];
      const Sum product = row < 0 ? Sum(0)
                                  : dot(grad + static_cast<int64_t>(query) * channels,
                                        features + static_cast<int64_t>(row) * channels, channels);
      scales[first + i] = product;
      if (row >= 0) mean += weights[first + i] * product;
    }
    mean = lanes.sum(mean);
    Sum spread = 0, along[3] = {0, 0, 0};
    for (int i = lanes.lane(); i < k; i += Lanes::width) {
      const int row = lists.rows[first + i];
      Sum scale = 0;
      if (row >= 0) {
        const Vec3<Real> q = load_row(reference_points, row);
        const Sum grad_logit = weights[first + i] * (scales[first + i] - mean), far = distance<Sum>(p, q);
        spread += grad_logit * far;
        if (far > Sum(0)) scale = grad_logit * per_sigma / far;
        for (int axis = 0; axis < 3; ++axis) along[axis] += scale * Sum(p[axis] - q[axis]);
      }
      scales[first + i] = scale;
    }
    spread = lanes.sum(spread);
    for (int axis = 0; axis < 3; ++axis) along[axis] = lanes.sum(along[axis]);
    if (lanes.lane() != 0) return;
    sigma_rows[query] = spread * per_sigma * per_sigma;
    for (int axis = 0; axis < 3; ++axis) {
      d_query_points[3 * static_cast<int64_t>(query) + axis] = static_cast<Real>(-along[axis]);
    }
  }
};

// Gradient of the reference points.
template <class Real, class Sum>
struct PushListed {
  static constexpr int kLanes = 32;

  const Real* query_points;
  const Real* reference_points;
  InvertedLists inverted;
  const Sum* scales;
  Real* d_reference_points;  // (N, 3)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int reference) const {
    const Vec3<Real> q = load_row(reference_points, reference);
    const int end = inverted.start[reference + 1];
    Sum along[3] = {0, 0, 0};
    for (int i = inverted.start[reference] + lanes.lane(); i < end; i += Lanes::width) {
      const int pair = inverted.order[i];
      const Vec3<Real> p = load_row(query_points, pair / inverted.k);
      for (int axis = 0; axis < 3; ++axis) along[axis] += scales[pair] * Sum(p[axis] - q[axis]);
    }
    for (int axis = 0; axis < 3; ++axis) {
      const Sum sum = lanes.sum(along[axis]);
      if (lanes.lane() == 0) {
        d_reference_points[3 * static_cast<int64_t>(reference) + axis] = static_cast<Real>(sum);
      }
    }
  }
};

}  // namespace pointproj
