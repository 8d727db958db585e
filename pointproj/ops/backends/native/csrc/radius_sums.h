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

// One set of points, and the other, which is searched; both in the order of their cells.
template <class Real_, class Sum_>
struct RadiusNeighbors {
  using Real = Real_;
  using Sum = Sum_;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Sum));

  SortedPoints<Real> own_points;
  Batch own_batch;
  HashGrid<Real> others;
  Real radius;
  Real largest_square;  // that counts as within the radius
  const Sum* sigma;
  int chunks;

  template <class Lanes, class Add>
  struct Visitor {
    const RadiusNeighbors& problem;
    const Vec3<Real>& q;
    Queue<Sum, Lanes>& queue;
    Add& add;

    POINTPROJ_FN Real limit() const { return problem.largest_square; }
    POINTPROJ_FN void meet(Lanes& lanes, int at, const Point<Real>& point, Real squared, bool exists) {
      queue.push(lanes, exists && squared <= limit(), at, squared_distance<Sum>(q, point.position));
    }
    POINTPROJ_FN void pause(Lanes& lanes) {
      if (lanes.any(queue.is_full())) queue.flush(lanes, add);
    }
  };

  POINTPROJ_FN Point<Real> own(int at) const { return own_points.load(at); }
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

}  // namespace pointproj
