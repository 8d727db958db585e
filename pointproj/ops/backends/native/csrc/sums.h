// Aggregation over the neighbours of each query, and its gradients; formulas in pointproj/ops/gradients.py.
//
// Each group of lanes owns one point and writes its own rows only: gradients of features and reference points are
// gathered over the queries that they are neighbours of.
//
// What is written here takes the points and their neighbours as template argument (neighbor_sums.h, radius_sums.h):
//   Real, Sum                                   of positions and sums
//   Weighting, weighting                        how distances become weights (weighting.h)
//   kVector                                     values of a row that are read at a time
//   own(at)                                     the point that a group of lanes owns
//   each_neighbor(lanes, at, point, add)        add(neighbors, size) for all of them, some at a time
//   row(number)                                 of a neighbour that was added by this number
//   other(row)                                  its position
//   Weights                                     of(query, number, distance, weighting), as the forward kept them
//   chunks                                      passes that it takes to sum up all channels
#pragma once

#include "queue.h"
#include "weighting.h"

namespace pointproj {

constexpr int kSumLanes = 8;  // of a GPU warp that work on one point: 4 took 70 and 200 us on W2, 16 89 and 197

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
    const Sum own_mean = of_queries && weighting.divides ? products.with(aggregated[point.row]) : Sum(0);
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
        const Sum grad_logit = weight * (product - mean);
        of_sigma += grad_logit * weighting.sigma_term(far);
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

}  // namespace pointproj
