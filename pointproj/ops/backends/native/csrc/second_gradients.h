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

// Means over the neighbours of a query: of g_i f_j, of the rate of the logit, and of the gradient of the logit.
template <class Sum>
struct PairMeans {
  Sum product, rate, both;
};

// Those that its gradients and those of its neighbours need. The known ones are subtracted first; of what remains the
// mean is small, or 0. So less is lost to rounding where one neighbour has nearly all the weight and is the mean.
template <class Sum>
struct QueryMeans {
  PairMeans<Sum> known, rest;
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
  // they are multiplied by in the end: 1, the mean rate, the mean product, and both. The mean product is known but for
  // rounding: it is that of upstream gradient and result. If a neighbour has nearly all the weight, a query visits all
  // of them once more, with the means that it has found.
  static constexpr int kFactors = of_queries ? 4 : 1;
  static constexpr Sum kNearlyAll = 0.75;
  struct Totals {
    Sum rate = 0, product = 0, both = 0, of_sigma = 0, of_sigma_by_product = 0;
    Sum sums[kFactors][4] = {};  // along the three axes, and of sigma
    bool has_nearly_all = false;
  };

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [at, chunk] = split_item(item, problem.chunks);
    const auto point = problem.own(at);
    const auto weighting = problem.weighting.at_sigma();
    QueryMeans<Sum> mean{};
    if constexpr (!of_queries) {
      constexpr Sum factors[] = {Sum(1)};
      write(lanes, weighting, at, point.row, factors, visit(lanes, at, chunk, point, weighting, mean));
    } else {
      const bool is_mean = weighting.divides();
      if (is_mean && has_products) {
        const Products<Lanes> products(own_values[at], other_values, aggregated.columns);
        mean.known.product = products.with(aggregated[point.row]);
      }
      const auto mean_of = [&](Sum of_lane) { return is_mean ? lanes.sum(of_lane) : Sum(0); };
      Totals totals;
      POINTPROJ_UNROLL_BY(1)
      for (int visits = 1; visits <= 2; ++visits) {
        totals = visit(lanes, at, chunk, point, weighting, mean);
        mean.rest = {mean_of(totals.product), mean_of(totals.rate), mean_of(totals.both)};
        const bool is_large = is_mean && lanes.sum(Sum(totals.has_nearly_all)) > Sum(0);
        if (visits == 2 || !lanes.any(is_large)) break;
        if (is_large) mean.known.rate = mean.rest.rate;
        if (is_large) mean.known.both = mean.rest.both - mean.rest.rate * mean.rest.product;
      }
      auto& [product, rate, both] = mean.rest;
      const Sum factors[] = {Sum(1), -rate, -product, 2 * rate * product - both};
      both -= rate * product;
      lanes.sync();
      subtract(lanes, chunk, rate, aggregated[point.row], d_rows[point.row]);
      if (writes_means && lanes.lane() == 0) means[at] = mean;
      write(lanes, weighting, at, point.row, factors, totals);
    }
  }

 private:
  template <class Lanes>
  using Products = typename Lanes::template RowProducts<Sum, kVector>;

  // Adds up the terms of all neighbours, of queries less the known means. Writes d_rows, those of a query but for the
  // mean rate of what is left.
  template <class Lanes, class AtSigma>
  POINTPROJ_FN Totals visit(Lanes& lanes, int at, int chunk, const Point<Real>& point, const AtSigma& weighting,
                            const QueryMeans<Sum>& mean) const {
    const bool has_rows = d_rows.columns > 0, has_feature_direction = directions.features.data != nullptr;
    typename Lanes::template RowSum<Sum, kVector> rows(other_values, chunk, d_rows, point.row);
    const Products<Lanes> products(own_values[at], other_values, aggregated.columns);
    const Products<Lanes> direction_products(
        of_queries || !has_feature_direction ? own_values[at] : directions.features[at],
        of_queries && has_feature_direction ? directions.features : other_values, aggregated.columns);
    Totals totals;
    problem.each_neighbor(lanes, at, point, [&](Neighbor<Sum>* neighbors, int size) {
      for (int first = 0; lanes.any(first < size); first += Lanes::width) {
        const Sum product = has_products ? products.with_neighbor(neighbors, first, size) : Sum(0);
        const Sum direction_product = has_products && has_feature_direction
                                          ? direction_products.with_neighbor(neighbors, first, size)
                                          : Sum(0);
        if (!(first + lanes.lane() < size)) continue;
        Neighbor<Sum>& neighbor = neighbors[first + lanes.lane()];
        add_pair(weighting, at, point, of_queries ? mean : means[neighbor.at], product, direction_product, neighbor,
                 totals);
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
    return totals;
  }

  // Adds the terms of a pair, and turns the squared distance into the factor of the neighbour's row.
  template <class AtSigma>
  POINTPROJ_FN void add_pair(const AtSigma& weighting, int at, const Point<Real>& point, const QueryMeans<Sum>& mean,
                             Sum product, Sum direction_product, Neighbor<Sum>& neighbor, Totals& totals) const {
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
    const PairMeans<Sum> known = mean.known, rest = of_queries ? PairMeans<Sum>{} : mean.rest;
    const Sum rate = by_sigma * sigma_rate - decay * distance_rate - known.rate - rest.rate;
    neighbor.value = weight * rate;
    const bool counts = weighting.has_weight(of_queries ? other_values[other] : own_values[at], aggregated.columns);
    const Sum counted = counts ? weight : Sum(0), gradient = counted * (product - known.product - rest.product);
    totals.rate += counted * rate;
    totals.has_nearly_all |= of_queries && counted > kNearlyAll;
    if (!has_products) return;
    const Sum both = weight * (direction_product - (counts ? known.both : Sum(0))) + gradient * rate;
    totals.product += gradient;
    totals.both += both;
    const Sum factors[] = {both - counted * rest.both, gradient, counted * rate, counted};
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
