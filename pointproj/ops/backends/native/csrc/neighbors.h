// Where the neighbours of a point come from: rows of a search, or the hash grid of the other set of points.
//
// Sums and gradients take one of these as template argument. It has
//   Real, Sum                                   of positions and sums
//   weighting                                   how distances become weights (weights.h)
//   kVector                                     values of a row that are read at a time
//   kMayUseAtomics                              whether gradients come from atomics, outside of deterministic mode
//   own(at)                                     the point that a group of lanes owns
//   each_neighbor(lanes, at, point, add)        add(neighbors, size) for all neighbours, some at a time
//   other(at)                                   the position of the neighbour with this number
//   chunks                                      passes in which all channels are added up
#pragma once

#include "hash_grid.h"
#include "queue.h"
#include "weights.h"

namespace pointproj::POINTPROJ_DEVICE {

// Weights are a_ij = weight(d_ij, base_i) / total_i. The forward saves base_i and 1 / total_i as two numbers: one
// logarithm of both would round off what is small next to base_i / sigma.
template <class T>
struct Weights {
  using Sum = std::remove_const_t<T>;
  T* saved;  // (Q, 2): base_i and 1 / total_i, in the order in which queries are searched

  POINTPROJ_FN void save(int i, Sum base, Sum inverse_total) const {
    saved[2 * static_cast<int64_t>(i)] = base;
    saved[2 * static_cast<int64_t>(i) + 1] = inverse_total;
  }
  POINTPROJ_FN Sum base(int i) const { return saved[2 * static_cast<int64_t>(i)]; }
  // a_ij of query i and a neighbour at this distance.
  template <class AtSigma>
  POINTPROJ_FN Sum of(int i, Sum distance, const AtSigma& weighting) const {
    return weighting.weight(distance, base(i)) * saved[2 * static_cast<int64_t>(i) + 1];
  }
};

// Neighbours by pairs: those of a query are its row; those of a reference point are the pairs from start[at] on.
template <class Real_, class Weighting_>
struct ListedNeighbors {
  using Real = Real_;
  using Weighting = Weighting_;
  using Sum = typename Weighting::Sum;
  static constexpr int kVector = 1;
  // W1's operator with the gradient of the features: 102 us, 139 if rows are inverted and gathered.
  static constexpr bool kMayUseAtomics = kOnGpu;

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

// Neighbours within a radius: of the own points, among the others. Both are in the order of their cells.
template <class Real_, class Weighting_>
struct RadiusNeighbors {
  using Real = Real_;
  using Weighting = Weighting_;
  using Sum = typename Weighting::Sum;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Sum));
  static constexpr bool kMayUseAtomics = false;

  SortedPoints<Real> own_points;
  Batch own_batch;
  HashGrid<Real> others;
  Real radius;
  Real largest_square;  // within the radius
  Weighting weighting;
  int chunks;
  bool by_row = false;  // whether the number of a neighbour is its row, not its place among the sorted points

  template <class Lanes, class Add>
  struct Visitor {
    const RadiusNeighbors& problem;
    const Vec3<Real>& q;
    Queue<Sum, Lanes>& queue;
    Add& add;

    POINTPROJ_FN Real limit() const { return problem.largest_square; }
    POINTPROJ_FN void process(Lanes& lanes, int at, const Point<Real>& point, Real squared, bool exists) {
      const int number = problem.by_row ? point.row : at;
      queue.push(lanes, exists && squared <= limit(), number, squared_distance<Sum>(q, point.position));
    }
    POINTPROJ_FN void flush(Lanes& lanes) {
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
