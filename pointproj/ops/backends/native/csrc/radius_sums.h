// Neighbours within a radius: each is found in the hash grid of the other set, and never kept.
#pragma once

#include "sums.h"
#include "traversal.h"

namespace pointproj {

// Rows of values in the order of sorted points, each padded with zeros: read in long words, next to each other.
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

// Weights are a_ij = weight(d_ij, anchor_i) / total_i; the forward keeps anchor_i and 1 / total_i apart, because their
// logarithm would round away what is small next to anchor_i / sigma.
template <class T>
struct RadiusWeights {
  using Sum = std::remove_const_t<T>;
  T* saved;  // (Q, 2): anchor_i and 1 / total_i, in the order of the queries as they are searched

  POINTPROJ_FN void save(int i, Sum anchor, Sum inverse) const {
    saved[2 * static_cast<int64_t>(i)] = anchor;
    saved[2 * static_cast<int64_t>(i) + 1] = inverse;
  }
  // Of a neighbour that is so far from query i.
  template <class AtSigma>
  POINTPROJ_FN Sum of(int i, int, Sum far, const AtSigma& weighting) const {
    const Sum* known = saved + 2 * static_cast<int64_t>(i);
    return weighting.weight(far, known[0]) * known[1];
  }
};

// One set of points, and the other, which is searched; both in the order of their cells.
template <class Real_, class Weighting_>
struct RadiusNeighbors {
  using Real = Real_;
  using Weighting = Weighting_;
  using Sum = typename Weighting::Sum;
  using Weights = RadiusWeights<const Sum>;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Sum));

  SortedPoints<Real> own_points;
  Batch own_batch;
  HashGrid<Real> others;
  Real radius;
  Real largest_square;  // that counts as within the radius
  Weighting weighting;
  int chunks;
  bool by_row = false;  // whether a neighbour's number is its row, not its place among the sorted points

  template <class Lanes, class Add>
  struct Visitor {
    const RadiusNeighbors& problem;
    const Vec3<Real>& q;
    Queue<Sum, Lanes>& queue;
    Add& add;

    POINTPROJ_FN Real limit() const { return problem.largest_square; }
    POINTPROJ_FN void meet(Lanes& lanes, int at, const Point<Real>& point, Real squared, bool exists) {
      const int number = problem.by_row ? point.row : at;
      queue.push(lanes, exists && squared <= limit(), number, squared_distance<Sum>(q, point.position));
    }
    POINTPROJ_FN void pause(Lanes& lanes) {
      if (lanes.any(queue.is_full())) queue.flush(lanes, add);
    }
  };

  POINTPROJ_FN Point<Real> own(int at) const { return own_points.load(at); }
  POINTPROJ_FN int row(int at) const { return at; }
  POINTPROJ_FN Vec3<Real> other(int at) const { return others.points.load(at).position; }
  template <class Lanes, class Add>
  POINTPROJ_FN void each_neighbor(Lanes& lanes, int, const Point<Real>& point, Add add) const {
    const bool searches = is_finite(point.position);
    if (!lanes.any(searches)) return;
    const Vec3<Real> q = searches ? point.position : Vec3<Real>{{0, 0, 0}};
    Queue<Sum, Lanes> queue(lanes);
    Visitor<Lanes, Add> visitor{*this, q, queue, add};
    visit_ball(others, own_batch.cloud_of(point.row), q, searches, radius, lanes, visitor);
    queue.flush(lanes, add);
  }
};

// The running total of the weights, and the weighted sum of rows.
template <class Real, class Weighting>
struct RadiusSums {
  using Neighbors = RadiusNeighbors<Real, Weighting>;
  using Sum = typename Weighting::Sum;
  using Number = Sum;
  static constexpr int kLanes = kSumLanes;

  Neighbors problem;
  Matrix<const Sum> features;  // (N, channels or more)
  Matrix<Sum> aggregated;      // (Q, channels)
  RadiusWeights<Sum> weights;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [at, chunk] = split_item(item, problem.chunks);
    const auto point = problem.own(at);
    const auto weighting = problem.weighting.at_sigma();
    Sum anchor = weighting.anchor(kInfinity<Sum>);  // the same in all lanes
    Sum total = 0;                                  // of this lane's weights
    typename Lanes::template RowSum<Sum, Neighbors::kVector> sums(features, chunk, aggregated, point.row);
    problem.each_neighbor(lanes, at, point, [&](Neighbor<Sum>* neighbors, int size) {
      Sum least = kInfinity<Sum>;
      for (int i = lanes.lane(); i < size; i += Lanes::width) least = lesser(least, neighbors[i].value);
      const Sum now = lesser(weighting.anchor(sqrt(lanes.minimum(least))), anchor);
      if (lanes.any(now < anchor)) {
        const Sum rescale = now < anchor ? weighting.weight(anchor, now) : Sum(1);  // 0 at first
        total *= rescale;
        sums.scale(rescale);
        anchor = now;
      }
      for (int i = lanes.lane(); i < size; i += Lanes::width) {
        const Sum weight = weighting.weight(sqrt(neighbors[i].value), anchor);
        total += weight;
        neighbors[i].value = weight;
      }
      lanes.sync();
      sums.add(neighbors, size);
    });
    total = lanes.sum(total);
    const Sum inverse = weighting.inverse(total);
    sums.finish(is_finite(point.position) ? inverse : kNan<Sum>);
    if (chunk == 0 && lanes.lane() == 0) weights.save(at, anchor, inverse);
  }
};

}  // namespace pointproj
