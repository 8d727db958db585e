// Where the neighbours of a point come from: rows of a search, or the hash grid of the other set of points.
//
// Sums and gradients take one of these as template argument. It has
//   Real, Sum                                   of positions and sums
//   weighting                                   how distances become weights (weights.h)
//   kVector                                     values of a row that are read at a time
//   own(at)                                     the point that a group of lanes owns
//   each_neighbor(lanes, at, point, add)        add(neighbors, size) for all of them, some at a time
//   row(number)                                 of a neighbour that was added by this number
//   other(row)                                  its position
//   Weights                                     of(query, number, distance, weighting), as the forward kept them, and
//                                               base(query, neighbors), a distance that all of a query's are near to
//   chunks                                      passes that it takes to sum up all channels
#pragma once

#include "queue.h"
#include "traversal.h"
#include "weights.h"

namespace pointproj::POINTPROJ_DEVICE {

// A pair is numbered by its query times k plus its place in the query's row.
template <class Sum>
struct PairWeights {
  const Sum* weights;  // (Q, k)

  template <class AtSigma>
  POINTPROJ_FN Sum of(int, int pair, Sum, const AtSigma&) const { return weights[pair]; }
  // A distance of query i's neighbours: that of the first.
  template <class Neighbors>
  POINTPROJ_FN Sum base(int i, const Neighbors& problem) const {
    const int row = problem.rows[static_cast<int64_t>(i) * problem.k];
    return row < 0 ? Sum(0) : Sum(sqrt(squared_distance<Sum>(problem.own(i).position, problem.other(row))));
  }
};

// Of an own point the pairs that it is in: those of its row, or, for a reference point, pairs from start[at].
template <class Real_, class Weighting_>
struct ListedNeighbors {
  using Real = Real_;
  using Weighting = Weighting_;
  using Sum = typename Weighting::Sum;
  using Weights = PairWeights<Sum>;
  static constexpr int kVector = 1;

  const Real* own_points;
  const Real* other_points;
  const int* rows;   // (Q, k): -1 where there are fewer
  const int* start;  // (references + 1,), null where the own points are the queries
  const int* pairs;  // (Q k,)
  int k;
  Weighting weighting;
  int chunks;

  POINTPROJ_FN Point<Real> own(int at) const { return {load_position(own_points, at), at}; }
  POINTPROJ_FN int row(int pair) const { return start ? pair / k : rows[pair]; }
  POINTPROJ_FN Vec3<Real> other(int row) const { return load_position(other_points, row); }
  template <class Lanes, class Add>
  POINTPROJ_FN void each_neighbor(Lanes& lanes, int at, const Point<Real>& point, Add add) const {
    Queue<Sum, Lanes> queue(lanes);
    const int begin = start ? start[at] : at * k, end = start ? start[at + 1] : begin + k;
    for (int first = begin; lanes.any(first < end); first += Lanes::width) {
      const int i = first + lanes.lane(), pair = start && i < end ? pairs[i] : i;
      const bool exists = i < end && (start || rows[pair] >= 0);
      const Sum squared = exists ? squared_distance<Sum>(point.position, other(row(pair))) : Sum(0);
      queue.push(lanes, exists, pair, squared);
      if (lanes.any(queue.is_full())) queue.flush(lanes, add);
    }
    queue.flush(lanes, add);
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
  template <class Neighbors>
  POINTPROJ_FN Sum base(int i, const Neighbors&) const {
    return saved[2 * static_cast<int64_t>(i)];
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

}  // namespace pointproj::POINTPROJ_DEVICE
