// Gradients of an aggregation; formulas in pointproj/ops/gradients.py.
//
// Each group of lanes owns one point and writes its own rows only: gradients of features and reference points are
// gathered over the queries that they are neighbours of. Where any order will do, a GPU adds those of kNN up by
// atomics instead.
#pragma once

#include "scan.h"
#include "sums.h"

namespace pointproj::POINTPROJ_DEVICE {

// Gradient of the features: own points are the references.
template <class Neighbors>
struct FeatureGradient {
  using Sum = typename Neighbors::Sum;
  using Number = Sum;
  static constexpr int kLanes = kSumLanes;

  Neighbors problem;
  Matrix<const Sum> grad;  // (Q, channels or more)
  Matrix<Sum> d_features;  // (N, channels)
  typename Neighbors::Weights weights;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [at, chunk] = split_item(item, problem.chunks);
    const auto point = problem.own(at);
    const auto weighting = problem.weighting.at_sigma();
    typename Lanes::template RowSum<Sum, Neighbors::kVector> sums(grad, chunk, d_features, point.row);
    problem.each_neighbor(lanes, at, point, [&](Neighbor<Sum>* neighbors, int size) {
      for (int i = lanes.lane(); i < size; i += Lanes::width) {
        const int number = neighbors[i].at, query = problem.row(number);
        neighbors[i].value = weights.of(query, number, sqrt(neighbors[i].value), weighting);
        neighbors[i].at = query;
      }
      lanes.sync();
      sums.add(neighbors, size);
    });
    sums.finish(Sum(1));
  }
};

struct NoSum {
  template <class... Any>
  POINTPROJ_FN explicit NoSum(const Any&...) {}
};

// Gradient of one set of points, the own ones; with that of the queries comes the one of sigma. With that of the
// references may come the one of their features, of no more than kChannelsAtOnce channels: both read the same rows.
template <class Neighbors, bool of_queries, bool with_features = false>
struct PointGradient {
  using Real = typename Neighbors::Real;
  using Sum = typename Neighbors::Sum;
  using Number = Sum;
  static constexpr int kLanes = kSumLanes;

  Neighbors problem;
  Matrix<const Sum> own_values, other_values;  // upstream gradients of the queries, features of the references
  Matrix<const Sum> aggregated;                // (Q, channels)
  typename Neighbors::Weights weights;
  Sum* means;              // (Q,) upstream gradient times result, 0 for sums; written with the queries' gradient
  Real* d_points;          // (own points, 3)
  Sum* sigma_rows;         // (Q,)
  Matrix<Sum> d_features;  // (N, channels)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int at) const {
    const auto point = problem.own(at);
    const auto weighting = problem.weighting.at_sigma();
    Sum of_sigma = 0, along[3] = {0, 0, 0};
    typename Lanes::template RowProducts<Sum, Neighbors::kVector> products(
        own_values[at], other_values, aggregated.columns);
    using RowSum = typename Lanes::template RowSum<Sum, Neighbors::kVector>;
    std::conditional_t<with_features, RowSum, NoSum> sums(other_values, 0, d_features, point.row);
    const Sum own_mean = of_queries && weighting.divides() ? products.with(aggregated[point.row]) : Sum(0);
    const Sum base = of_queries && weighting.divides() ? weights.base(at, problem) : Sum(0);
    problem.each_neighbor(lanes, at, point, [&](Neighbor<Sum>* neighbors, int size) {
      for (int first = 0; lanes.any(first < size); first += Lanes::width) {
        const int i = first + lanes.lane();
        Sum far = 0, weight = 0, mean = own_mean;
        int other = 0;
        if (i < size) {
          const int number = neighbors[i].at;
          other = problem.row(number);
          far = sqrt(neighbors[i].value);
          weight = weights.of(of_queries ? at : other, number, far, weighting);
          if (!of_queries) mean = means[other];
          neighbors[i] = {weight, other};
        }
        lanes.sync();
        Sum product;
        if constexpr (with_features) {
          product = products.add_neighbor(neighbors, first, size, sums);
        } else {
          product = products.with_neighbor(neighbors, first, size);
        }
        if (!(i < size)) continue;
        const Sum* const features = of_queries ? other_values[other] : own_values[at];
        if (!weighting.counts(features, aggregated.columns)) continue;
        const Sum grad_logit = weight * (product - mean);
        if (of_queries) of_sigma += grad_logit * weighting.sigma_term(far, base);
        if (!(far > Sum(0))) continue;
        const Vec3<Real> there = problem.other(other);
        for (int axis = 0; axis < 3; ++axis) {
          along[axis] += grad_logit * weighting.fall(far) / far * Sum(point.position[axis] - there[axis]);
        }
      }
    });
    if constexpr (with_features) sums.finish(Sum(1));
    if (of_queries) of_sigma = lanes.sum(of_sigma);
    for (int axis = 0; axis < 3; ++axis) along[axis] = lanes.sum(along[axis]);
    if (lanes.lane() != 0) return;
    for (int axis = 0; axis < 3; ++axis) d_points[3 * int64_t(point.row) + axis] = static_cast<Real>(-along[axis]);
    if (!of_queries) return;
    means[at] = own_mean;
    sigma_rows[at] = weighting.of_sigma(of_sigma);
  }
};

// Sorts pairs by the reference point that they contain.
template <class Rows>
struct InvertRows {
  Rows row_of;  // of each pair, negative where there is no neighbour
  int* start;   // (references + 2,): first pair of each; then of places without a neighbour
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

// Gradients of a kNN in any order, those of features and references by atomics: W1's operator 98 us and its gradients,
// where rows inverted and gathered took 37 and 60 us more. Of the features alone, or also of all points and sigma.
template <class Real, class Weighting, bool of_points>
struct GradientsByAtomics {
  using Sum = typename Weighting::Sum;
  using Number = Sum;
  static constexpr int kLanes = 32;   // atomics go by whole rows, wherever they begin
  static constexpr int kAtOnce = 8;  // neighbours

  ListedNeighbors<Real, Weighting> problem;
  Matrix<const Sum> grad, features, aggregated;
  const Sum* weights;      // (Q, k)
  Matrix<Sum> d_features;  // (N, channels), zeros before; or null, as the other two
  Real* d_references;      // (N, 3), zeros before
  Real* d_queries;         // (Q, 3)
  Sum* sigma_rows;         // (Q,)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int query) const {
    const Vec3<Real> p = problem.own(query).position;
    const auto weighting = problem.weighting.at_sigma();
    const int k = problem.k, channels = grad.columns;
    const int64_t first = int64_t(query) * k;
    Sum mean = 0, of_sigma = 0, along[3] = {0, 0, 0}, base = 0;  // base: the first distance, in a mean
    if (of_points && weighting.divides()) {
      for (int c = lanes.lane(); c < channels; c += kLanes) {
        mean = multiply_add(grad[query][c], aggregated[query][c], mean);
      }
      mean = lanes.sum(mean);
    }
    for (int begin = 0; begin < k; begin += kAtOnce) {
      const int i = begin + lanes.lane() % kAtOnce;  // of the lane, and of others that repeat it
      const int row = i < k ? problem.rows[first + i] : -1;
      const Sum weight = i < k ? weights[first + i] : Sum(0);
      const Sum product = multiply_rows(lanes, query, row, weight);
      if constexpr (!of_points) continue;
      Sum steps[3] = {0, 0, 0};
      const Vec3<Real> there = row < 0 ? p : problem.other(row);
      const Sum far = sqrt(squared_distance<Sum>(p, there));
      if (begin == 0 && weighting.divides()) base = lanes.take(far, 0);
      if (lanes.lane() < kAtOnce && row >= 0 && weighting.counts(features[row], channels)) {
        const Sum grad_logit = weight * (product - mean);
        of_sigma += grad_logit * weighting.sigma_term(far, base);
        for (int axis = 0; axis < 3 && far > Sum(0); ++axis) {
          steps[axis] = grad_logit * weighting.fall(far) / far * Sum(p[axis] - there[axis]);
          along[axis] += steps[axis];
        }
      }
      if (d_references) add_steps(lanes, row, steps);
    }
    if constexpr (!of_points) return;
    of_sigma = lanes.sum(of_sigma);
    for (int axis = 0; axis < 3; ++axis) along[axis] = lanes.sum(along[axis]);
    if (lanes.lane() != 0) return;
    for (int axis = 0; axis < 3; ++axis) d_queries[3 * int64_t(query) + axis] = static_cast<Real>(-along[axis]);
    sigma_rows[query] = weighting.of_sigma(of_sigma);
  }

  // What the first lanes have, three lanes a neighbour: atomics side by side count as one.
  template <class Lanes>
  POINTPROJ_FN void add_steps(Lanes& lanes, int own_row, const Sum (&own_steps)[3]) const {
    const int neighbor = lanes.lane() / 3, axis = lanes.lane() % 3, row = lanes.take(own_row, neighbor);
    Sum step = 0;
    for (int i = 0; i < 3; ++i) {
      const Sum taken = lanes.take(own_steps[i], neighbor);
      if (i == axis) step = taken;
    }
    if (neighbor < kAtOnce && row >= 0) lanes.add(d_references + 3 * int64_t(row) + axis, static_cast<Real>(step));
  }

  // The upstream gradient times the row of the lane's neighbour, rounded as the mean: nothing remains of a neighbour
  // that outweighs all others. The gradient of the features is added on the way.
  template <class Lanes>
  POINTPROJ_FN Sum multiply_rows(Lanes& lanes, int query, int own_row, Sum own_weight) const {
    Sum products[kAtOnce] = {};
    for (int begin = 0; begin < grad.columns; begin += kLanes) {
      const int column = begin + lanes.lane();
      const bool reads = column < grad.columns;
      const Sum upstream = reads ? grad[query][column] : Sum(0);
      POINTPROJ_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        const int row = lanes.take(own_row, j);
        const Sum weight = lanes.take(own_weight, j);
        if (!reads || row < 0) continue;
        if (of_points) products[j] = multiply_add(upstream, features[row][column], products[j]);
        if (d_features.data) lanes.add(d_features[row] + column, weight * upstream);
      }
    }
    if constexpr (!of_points) return Sum(0);
    POINTPROJ_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      products[j] += lanes.exchange(products[j], 16);
      products[j] += lanes.exchange(products[j], 8);
    }
    return lanes.template sums_of<kAtOnce>(products);
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
