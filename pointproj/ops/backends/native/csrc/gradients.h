// Gradients of an aggregation; formulas in pointproj/ops/specification/gradients.py.
//
// Each group of lanes owns one point and writes the rows of that point only: gradients of features and reference points
// are gathered over the queries whose neighbours they are. For kNN outside of deterministic mode, a GPU adds them by
// atomics instead, while it goes through the neighbours of the queries.
#pragma once

#include "scan.h"
#include "sums.h"

namespace pointproj::POINTPROJ_DEVICE {

// Adds multiples of a point's row to the rows of its neighbours.
template <class Sum, class Lanes>
struct AtomicRows {
  Lanes& lanes;
  const Sum* row;
  Matrix<Sum> to;

  // All lanes of a warp work on one point after another: a GPU joins atomics on adjacent addresses.
  POINTPROJ_FN void add(const Neighbor<Sum>* list, int size) {
    lanes.each_point([&](auto of_point, int lane, int width) {
      const Sum* const from = of_point(row);
      const Neighbor<Sum>* const neighbors = of_point(list);
      const int count = of_point(lanes.has_item ? size : 0);
      for (int c = lane; c < to.columns; c += width) {
        const Sum own = from[c];
        for (int i = 0; i < count; ++i) lanes.add(to[neighbors[i].at] + c, neighbors[i].value * own);
      }
    });
  }
  POINTPROJ_FN void finish(Sum) const {}
};

// What gradients of reference points need of a query: the product of upstream gradient and result, 0 for sums; and minus
// the sum of the gradients of its logits, without that of a neighbour that has nearly all the weight.
template <class Sum>
struct alignas(2 * sizeof(Sum)) QueryTerms {
  Sum product, rest;
};

// Gradients of the own points: of their positions, of the features, or both. With the positions of queries comes sigma;
// for queries the features are those of their neighbours, by atomics, and so are d_others, the neighbours' positions.
//
// If a neighbour has nearly all the weight, its product less the mean of all is little more than rounding errors, which
// steep kernels magnify. The gradients of the logits of a query have the sum 0, so that of such a neighbour is minus the
// sum of the others.
template <class Neighbors, bool of_queries, bool of_points, bool of_features>
struct Gradient {
  using Real = typename Neighbors::Real;
  using Sum = typename Neighbors::Sum;
  using Number = Sum;
  static constexpr int kLanes = kSumLanes, kVector = Neighbors::kVector;
  // Of the weight. More for references, whose weights are not rounded as those of the queries.
  static constexpr Sum kNearlyAll = of_queries ? 0.75 : 0.875;

  Neighbors problem;
  Matrix<const Sum> own_values, other_values;  // upstream gradients of the queries, features of the references
  Matrix<const Sum> aggregated;                // (Q, channels)
  Weights<const Sum> weights;
  QueryTerms<Sum>* means;     // (Q,), written by the gradient of queries
  Real* d_points;          // (own points, 3)
  Sum* sigma_rows;         // (Q,)
  Matrix<Sum> d_features;  // (N, channels)
  Real* d_others;          // (N, 3), zeros before; or null

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [at, chunk] = split_item(item, problem.chunks);
    const auto point = problem.own(at);
    const auto weighting = problem.weighting.at_sigma();
    [[maybe_unused]] auto rows = feature_rows(lanes, at, chunk, point.row);
    const typename Lanes::template RowProducts<Sum, kVector> products(own_values[at], other_values, aggregated.columns);
    const bool is_mean = of_queries && of_points && weighting.divides();
    const Sum own_mean = is_mean ? products.with(aggregated[point.row]) : Sum(0);
    Sum unscaled = 0, along[3] = {0, 0, 0}, rest = 0;
    int largest = -1;  // the neighbour with nearly all the weight, in one lane
    // Adds the gradient of a neighbour's logit.
    const auto add = [&](int other, Sum distance, Sum grad_logit) {
      if (of_queries) unscaled += grad_logit * weighting.unscaled_by_sigma(distance, weights.base(at));
      const Sum decay = weighting.decay(distance), grad_distance = grad_logit * decay;
      if (!(distance > Sum(0)) || decay == Sum(0)) return;
      const Vec3<Real> there = problem.other(other);
      for (int axis = 0; axis < 3; ++axis) {
        const Sum step = grad_distance * (Sum(point.position[axis] - there[axis]) / distance);
        along[axis] += step;
        if constexpr (of_queries && Neighbors::kMayUseAtomics) {
          if (d_others && lanes.has_item) lanes.add(d_others + 3 * int64_t(other) + axis, static_cast<Real>(step));
        }
      }
    };
    problem.each_neighbor(lanes, at, point, [&](Neighbor<Sum>* neighbors, int size) {
      for (int first = 0; lanes.any(first < size); first += Lanes::width) {
        const Sum product = of_points ? products.with_neighbor(neighbors, first, size) : Sum(0);
        if (!(first + lanes.lane() < size)) continue;
        Neighbor<Sum>& neighbor = neighbors[first + lanes.lane()];
        const int other = neighbor.at;
        const Sum distance = sqrt(neighbor.value), weight = weights.of(of_queries ? at : other, distance, weighting);
        neighbor.value = weight;
        const Sum* const features = of_queries ? other_values[other] : own_values[at];
        if (!of_points || !weighting.has_weight(features, aggregated.columns)) continue;
        const bool has_nearly_all = weighting.divides() && weight > kNearlyAll;
        if (of_queries && has_nearly_all) {
          largest = other;
          continue;
        }
        const QueryTerms<Sum> mean = of_queries ? QueryTerms<Sum>{own_mean, Sum(0)} : means[other];
        const Sum grad_logit = has_nearly_all ? mean.rest : weight * (product - mean.product);
        if (of_queries) rest -= grad_logit;
        add(other, distance, grad_logit);
      }
      lanes.sync();
      if constexpr (of_features) rows.add(neighbors, size);
    });
    if constexpr (of_features) rows.finish(Sum(1));
    if constexpr (!of_points) return;
    if (of_queries) {
      rest = lanes.sum(rest);
      if (largest >= 0) {
        add(largest, sqrt(squared_distance<Sum>(point.position, problem.other(largest))), rest);
      }
      unscaled = lanes.sum(unscaled);
    }
    for (int axis = 0; axis < 3; ++axis) along[axis] = lanes.sum(along[axis]);
    if (lanes.lane() != 0) return;
    for (int axis = 0; axis < 3; ++axis) d_points[3 * int64_t(point.row) + axis] = static_cast<Real>(-along[axis]);
    if (!of_queries) return;
    means[at] = {own_mean, rest};
    sigma_rows[at] = weighting.by_sigma(unscaled);
  }

  template <class Lanes>
  POINTPROJ_FN auto feature_rows(Lanes& lanes, int at, int chunk, int row) const {
    if constexpr (!of_features) {
      return nullptr;
    } else if constexpr (of_queries) {
      return AtomicRows<Sum, Lanes>{lanes, own_values[at], d_features};
    } else {
      return typename Lanes::template RowSum<Sum, kVector>(other_values, chunk, d_features, row);
    }
  }
};

// Sorts pairs by their reference points.
template <class Rows>
struct InvertRows {
  Rows row_of;  // of each pair, negative where there is no neighbour
  int* start;   // (references + 2,): first pair of each reference point; then of the pairs without one
  int* pairs;   // (pairs,)
  CountingSort sort;

  template <class Machine>
  POINTPROJ_FN void operator()(Machine& machine) const {
    machine.each(sort.slots, [&](int i) {
      sort.occupancy[i] = 0;
      if (i == 0) start[0] = 0;
    });
    machine.barrier();
    const int missing = sort.slots - 1;
    sort.count(machine, [&](int pair) -> Slot {
      const int row = row_of(pair);
      return {row < 0 ? missing : row, true};
    });
    sort.scatter(
        machine, [&](int64_t row, int end) { start[row + 1] = end; },
        [&](int pair, int row, int rank) { pairs[start[row] + rank] = pair; });
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
