// Where the neighbours of a point come from: rows of a search, or the hash grid of the other set of points.
//
// Sums and gradients take one of these as template argument. It has
//   Real, Sum                                   of positions and sums
//   weighting                                   how distances become weights (weights.h)
//   kVector                                     values of a row that are read at a time
//   kMayAdd                                     whether gradients are added up by atomics where any order will do
//   own(at)                                     the point that a group of lanes owns
//   each_neighbor(lanes, at, point, add)        add(neighbors, size) for all of them, some at a time
//   other(at)                                   the position of a neighbour that was added by this number
//   chunks                                      passes that it takes to sum up all channels
#pragma once

#include "queue.h"
#include "traversal.h"
#include "weights.h"

namespace pointproj::POINTPROJ_DEVICE {

// Weights are a_ij = weight(d_ij, anchor_i) / total_i; the forward keeps anchor_i and 1 / total_i apart, because their
// logarithm would round away what is small next to anchor_i / sigma.
template <class T>
struct Weights {
  using Sum = std::remove_const_t<T>;
  T* saved;  // (Q, 2): anchor_i and 1 / total_i, in the order of the queries as they are searched

  POINTPROJ_FN void save(int i, Sum anchor, Sum inverse) const {
    saved[2 * static_cast<int64_t>(i)] = anchor;
    saved[2 * static_cast<int64_t>(i) + 1] = inverse;
  }
  POINTPROJ_FN Sum anchor(int i) const { return saved[2 * static_cast<int64_t>(i)]; }
  // Of a neighbour that is so far from query i.
  template <class AtSigma>
  POINTPROJ_FN Sum of(int i, Sum far, const AtSigma& weighting) const {
    return weighting.weight(far, anchor(i)) * saved[2 * static_cast<int64_t>(i) + 1];
  }
};

// Of an own point the pairs that it is in: those of its row, or, for a reference point, pairs from start[at].
template <class Real_, class Weighting_>
struct ListedNeighbors {
  using Real = Real_;
  using Weighting = Weighting_;
  using Sum = typename Weighting::Sum;
  static constexpr int kVector = 1;
  // W1's operator with the features' gradient takes 102 us; where rows were inverted and gathered it took 37 us more.
  static constexpr bool kMayAdd = kOnGpu;

  const Real* own_points;
  const Real* other_points;
  const int* rows;   // (Q, k): -1 where there are fewer
  const int* start;  // (references + 1,), null where the own points are the queries
  const int* pairs;  // (Q k,)
  int k;
  Weighting weighting;
  int chunks;

  POINTPROJ_FN Point<Real> own(int at) const { return {load_position(own_points, at), at}; }
  POINTPROJ_FN Vec3<Real> other(int row) const { return load_position(other_points, row); }
  template <class Lanes, class Add>
  POINTPROJ_FN void each_neighbor(Lanes& lanes, int at, const Point<Real>& point, Add add) const {
    Queue<Sum, Lanes> queue(lanes);
    const int64_t begin = start ? start[at] : int64_t(at) * k, end = start ? start[at + 1] : begin + k;
    for (int64_t first = begin; lanes.any(first < end); first += Lanes::width) {
      const int64_t i = first + lanes.lane();
      const int row = i < end ? (start ? pairs[i] / k : rows[i]) : -1;
      queue.push(lanes, row >= 0, row, row < 0 ? Sum(0) : squared_distance<Sum>(point.position, other(row)));
      if (lanes.any(queue.is_full())) queue.flush(lanes, add);
    }
    queue.flush(lanes, add);
  }
};

// One set of points, and the other, which is searched; both in the order of their cells.
template <class Real_, class Weighting_>
struct RadiusNeighbors {
  using Real = Real_;
  using Weighting = Weighting_;
  using Sum = typename Weighting::Sum;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Sum));
  static constexpr bool kMayAdd = false;

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

}  // namespace pointproj::POINTPROJ_DEVICE
