// Aggregation over the neighbours of each query; formulas in pointproj/ops/specification/reference.py.
#pragma once

#include "neighbors.h"

namespace pointproj::POINTPROJ_DEVICE {

constexpr int kSumLanes = 8;  // of a GPU warp that work on one point: 4 took 70 and 200 us on W2, 16 89 and 197

// Rows of values in the order of the sorted points, each padded with zeros, so that neighbours are read together and in
// vectors.
template <class Real, class Sum>
struct SortRows {
  using Number = Sum;
  static constexpr int kLanes = 32;

  SortedPoints<Real> points;
  Matrix<const Sum> values;  // (rows, channels)
  Matrix<Sum> sorted;        // (rows, padded)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int at) const {
    const Sum* from = values[points.load(at).row];
    Sum* to = sorted[at];
    for (int c = lanes.lane(); c < sorted.columns; c += Lanes::width) to[c] = c < values.columns ? from[c] : Sum(0);
  }
};

// The running total of the weights, and the weighted sum of rows.
template <class Neighbors>
struct Aggregate {
  using Sum = typename Neighbors::Sum;
  using Number = Sum;
  static constexpr int kLanes = kSumLanes;

  Neighbors problem;
  Matrix<const Sum> features;  // (N, channels or more)
  Matrix<Sum> aggregated;      // (Q, channels)
  Weights<Sum> weights;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [at, chunk] = split_item(item, problem.chunks);
    const auto point = problem.own(at);
    const auto weighting = problem.weighting.at_sigma();
    Sum base = weighting.base(kInfinity<Sum>);  // the same in all lanes
    Sum total = 0;                              // of this lane's weights
    typename Lanes::template RowSum<Sum, Neighbors::kVector> sums(features, chunk, aggregated, point.row);
    const auto has_weight = [&](const Neighbor<Sum>& neighbor) {
      return weighting.has_weight(features[neighbor.at], aggregated.columns);
    };
    problem.each_neighbor(lanes, at, point, [&](Neighbor<Sum>* neighbors, int size) {
      Sum nearest = kInfinity<Sum>;  // squared
      for (int i = lanes.lane(); i < size; i += Lanes::width) {
        if (has_weight(neighbors[i])) nearest = lesser(nearest, neighbors[i].value);
      }
      const Sum nearer = lesser(weighting.base(sqrt(lanes.minimum(nearest))), base);
      if (lanes.any(nearer < base)) {
        const Sum rescale = nearer < base ? weighting.weight(base, nearer) : Sum(1);  // 0 at first
        total *= rescale;
        sums.scale(rescale);
        base = nearer;
      }
      for (int i = lanes.lane(); i < size; i += Lanes::width) {
        const Sum weight = weighting.weight(sqrt(neighbors[i].value), base);
        if (has_weight(neighbors[i])) total += weight;
        neighbors[i].value = weight;
      }
      lanes.sync();
      sums.add(neighbors, size);
    });
    total = lanes.sum(total);
    const Sum inverse_total = weighting.inverse_total(total);
    sums.finish(is_finite(point.position) ? inverse_total : kNan<Sum>);
    if (chunk == 0 && lanes.lane() == 0) weights.save(at, base, inverse_total);
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
