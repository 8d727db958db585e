// Second derivatives of an aggregation; formulas in pointproj/ops/specification/gradients.py.
//
// Each group of lanes owns one point and writes the rows of that point only, as in gradients.h. The first gradients are
// differentiated along directions, one for each input; a rate is a derivative along these.
#pragma once

#include "sums.h"

namespace pointproj::POINTPROJ_DEVICE {

// Directions of the inputs, null where they are 0.
template <class Sum>
struct Directions {
  Matrix<const Sum> own_points, other_points;  // by the row of the point; in the order of the others
  Matrix<const Sum> features;                  // (N, channels or more), in the order of the references
  const Sum* sigma;
};

// Sums over the neighbours of a query that its gradients and those of its neighbours need.
template <class Sum>
struct QueryMeans {
  Sum product, rate, both;  // the means of g_i f_j, of the rate of the logit, and of the gradient of the logit
};

// Gradients of the own points: of their positions, and of the features, or for queries of the upstream gradients and
// of sigma. Those of queries come first: they write `means`.
template <class Neighbors, bool of_queries>
struct SecondGradient {
  using Real = typename Neighbors::Real;
  using Sum = typename Neighbors::Sum;
  using Number = Sum;
  static constexpr int kLanes = kSumLanes, kVector = Neighbors::kVector;

  Neighbors problem;
  Matrix<const Sum> own_values, other_values;  // upstream gradients of the queries, features of the references
  Directions<Sum> directions;
  Matrix<const Sum> aggregated;                // (Q, channels)
  Weights<const Sum> weights;
  QueryMeans<Sum>* means;                      // (Q,) in the order in which queries are searched; 0 for sums
  Matrix<Sum> d_rows;                          // (own points, channels), or without channels
  Real* d_points;                              // (own points, 3), or null
  Sum* sigma_rows;                             // (Q,), or null
  bool has_products, writes_means;             // whether more than d_rows is needed; whether these are its means

  // Of the own point. A query does not know its means before it has visited all neighbours. So terms are sorted by what
  // they are multiplied by in the end: 1, the mean rate, the mean product, and both. Products are less `known_mean`, the
  // product of upstream gradient and result: what cancels where one neighbour has all the weight is 0. What remains of
  // their mean is its rounding error, which must not be multiplied by the slopes of a kernel that ends.
  static constexpr int kFactors = of_queries ? 4 : 1;
  struct Totals {
    Sum known_mean = 0, rate = 0, product = 0, both = 0, of_sigma = 0, of_sigma_by_product = 0;
    Sum sums[kFactors][4] = {};  // along the three axes, and of sigma
  };

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [at, chunk] = split_item(item, problem.chunks);
    const auto point = problem.own(at);
    const auto weighting = problem.weighting.at_sigma();
    const bool has_rows = d_rows.columns > 0, has_feature_direction = directions.features.data != nullptr;
    typename Lanes::template RowSum<Sum, kVector> rows(other_values, chunk, d_rows, point.row);
    using Products = typename Lanes::template RowProducts<Sum, kVector>;
    const Products products(own_values[at], other_values, aggregated.columns);
    const Products direction_products(
        of_queries || !has_feature_direction ? own_values[at] : directions.features[at],
        of_queries && has_feature_direction ? directions.features : other_values, aggregated.columns);
    const bool is_mean = of_queries && weighting.divides();
    Totals totals;
    if (is_mean && has_products) totals.known_mean = products.with(aggregated[point.row]);
    problem.each_neighbor(lanes, at, point, [&](Neighbor<Sum>* neighbors, int size) {
      for (int first = 0; lanes.any(first < size); first += Lanes::width) {
        const Sum product = has_products ? products.with_neighbor(neighbors, first, size) : Sum(0);
        const Sum direction_product = has_products && has_feature_direction
                                          ? direction_products.with_neighbor(neighbors, first, size)
                                          : Sum(0);
        if (!(first + lanes.lane() < size)) continue;
        add_pair(weighting, at, point, product, direction_product, neighbors[first + lanes.lane()], totals);
      }
      lanes.sync();
      if (!has_rows) return;
      rows.add(neighbors, size);
      if constexpr (!of_queries) return;
      if (!has_feature_direction) return;
      lanes.sync();
      for (int i = lanes.lane(); i < size; i += Lanes::width) {
        const Sum squared = squared_distance<Sum>(point.position, problem.other(neighbors[i].at));
        neighbors[i].value = weights.of(at, sqrt(squared), weighting);
      }
      lanes.sync();
      rows.read(directions.features);
      rows.add(neighbors, size);
      rows.read(other_values);
    });
    rows.finish(Sum(1));
    if constexpr (of_queries) {
      const auto mean = [&](Sum of_lane) { return is_mean ? lanes.sum(of_lane) : Sum(0); };
      const Sum mean_rate = mean(totals.rate), product = mean(totals.product), both = mean(totals.both);
      lanes.sync();
      subtract(lanes, chunk, mean_rate, aggregated[point.row], d_rows[point.row]);
      if (writes_means && lanes.lane() == 0) {
        means[at] = {totals.known_mean + product, mean_rate, both - mean_rate * product};
      }
      const Sum factors[] = {Sum(1), -mean_rate, -product, 2 * mean_rate * product - both};
      write(lanes, weighting, at, point.row, factors, totals);
    } else {
      constexpr Sum factors[] = {Sum(1)};
      write(lanes, weighting, at, point.row, factors, totals);
    }
  }

 private:
  // Adds the terms of a pair, and turns the squared distance into the factor of the neighbour's row.
  template <class AtSigma>
  POINTPROJ_FN void add_pair(const AtSigma& weighting, int at, const Point<Real>& point, Sum product,
                             Sum direction_product, Neighbor<Sum>& neighbor, Totals& totals) const {
    const int other = neighbor.at, query = of_queries ? at : other;
    const Sum distance = sqrt(neighbor.value), weight = weights.of(query, distance, weighting);
    neighbor.value = 0;
    if (!(weight > Sum(0))) return;  // also of a query whose weights are all 0: the rate may not be finite
    const Vec3<Real> there = problem.other(other);
    const Sum inverse = distance > Sum(0) ? Sum(1) / distance : Sum(0);
    Sum unit[3], step[3], distance_rate = 0;
    for (int axis = 0; axis < 3; ++axis) {
      unit[axis] = inverse * Sum(point.position[axis] - there[axis]);
      step[axis] = directions.own_points.data ? directions.own_points[point.row][axis] : Sum(0);
      if (directions.other_points.data) step[axis] -= directions.other_points[other][axis];
      distance_rate = multiply_add(unit[axis], step[axis], distance_rate);
    }
    const Sum sigma_rate = directions.sigma ? *directions.sigma : Sum(0);
    const Sum decay = weighting.decay(distance), unscaled = weighting.unscaled_by_sigma(distance, weights.base(query));
    const Sum by_sigma = sigma_rate != Sum(0) ? weighting.by_sigma(unscaled) : Sum(0);
    const QueryMeans<Sum> mean = of_queries ? QueryMeans<Sum>{totals.known_mean, 0, 0} : means[other];
    const Sum rate = by_sigma * sigma_rate - decay * distance_rate - mean.rate;
    neighbor.value = weight * rate;
    const bool counts = weighting.has_weight(of_queries ? other_values[other] : own_values[at], aggregated.columns);
    const Sum counted = counts ? weight : Sum(0), gradient = counted * (product - mean.product);
    totals.rate += counted * rate;
    if (!has_products) return;
    const Sum both = weight * direction_product + gradient * rate;
    totals.product += gradient;
    totals.both += both;
    const Sum factors[] = {both - counted * mean.both, gradient, counted * rate, counted};
    for (int axis = 0; axis < 3; ++axis) {
      const Sum slope = decay * unit[axis];  // first: with one neighbour, all terms cancel to the last bit
      for (int i = 0; i < kFactors; ++i) totals.sums[i][axis] -= factors[i] * slope;
    }
    const Sum power = weighting.sigma_power(), inverse_sigma = weighting.parameters.inverse_sigma;
    const Sum decay_by_sigma = sigma_rate != Sum(0) ? (power - 1) * inverse_sigma * decay * sigma_rate : Sum(0);
    const Sum along = decay_by_sigma - weighting.decay_slope(distance) * distance_rate;
    for (int axis = 0; axis < 3; ++axis) {
      const Sum across = step[axis] - unit[axis] * distance_rate;
      const Sum slope_rate = along * unit[axis] - decay * inverse * across;
      totals.sums[0][axis] += gradient * slope_rate;
      if (of_queries) totals.sums[kFactors / 2][axis] += counted * slope_rate;
    }
    if constexpr (of_queries) {
      if (!sigma_rows) return;
      for (int i = 0; i < kFactors; ++i) totals.sums[i][3] += factors[i] * unscaled;
      const Sum rate_by_sigma = inverse_sigma * ((power - 1) * decay * distance_rate - power * by_sigma * sigma_rate);
      totals.of_sigma += gradient * rate_by_sigma;
      totals.of_sigma_by_product += counted * rate_by_sigma;
    }
  }

  template <class Lanes>
  POINTPROJ_FN void subtract(Lanes& lanes, int chunk, Sum factor, const Sum* from, Sum* row) const {
    if (!lanes.has_item || factor == Sum(0)) return;  // rows of queries that are not finite are NaN in `aggregated`
    const int first = chunk * kChannelsAtOnce, columns = d_rows.columns;
    const int end = kOnGpu ? lesser(first + kChannelsAtOnce, columns) : columns;
    for (int c = first + lanes.lane(); c < end; c += Lanes::width) row[c] -= factor * from[c];
  }

  template <class Lanes, class AtSigma>
  POINTPROJ_FN void write(Lanes& lanes, const AtSigma& weighting, int at, int row, const Sum (&factors)[kFactors],
                          const Totals& totals) const {
    if (!has_products) return;
    const auto total = [&](int column) {
      Sum sum = 0;
      for (int i = 0; i < kFactors; ++i) sum += factors[i] * totals.sums[i][column];
      return lanes.sum(sum);
    };
    for (int axis = 0; axis < 3; ++axis) {
      const Sum sum = total(axis);
      if (d_points && lanes.lane() == 0) d_points[3 * int64_t(row) + axis] = static_cast<Real>(sum);
    }
    if constexpr (of_queries) {
      if (!sigma_rows) return;
      const Sum unscaled = total(3), rest = lanes.sum(totals.of_sigma + factors[2] * totals.of_sigma_by_product);
      if (lanes.lane() == 0) sigma_rows[at] = weighting.by_sigma(unscaled) + rest;
    }
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
