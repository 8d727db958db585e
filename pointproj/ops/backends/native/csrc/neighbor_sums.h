// Neighbours that are given: rows of a search for the sums, the same rows inverted for the gradients that belong to
// reference points. Where only the features want a gradient and any order will do, a GPU adds it up by atomics.
#pragma once

#include "scan.h"
#include "sums.h"

namespace pointproj {

// Of an own point the pairs from start[at], or of as many each; a pair's other point is a row, or the query of a pair.
template <class Real_, class Sum_>
struct ListedNeighbors {
  using Real = Real_;
  using Sum = Sum_;
  static constexpr int kVector = 1;

  const Real* own_points;
  const Real* other_points;
  const int* start;  // (own points + 1,), null for the rows themselves
  const int* pairs;  // (Q k,): rows, -1 where there are fewer; else numbers of pairs, query times k plus place
  int k;
  const Sum* sigma;
  int chunks;

  POINTPROJ_FN Point<Real> own(int at) const { return {load_position(own_points, at), at}; }
  POINTPROJ_FN Vec3<Real> other(int at) const { return load_position(other_points, at); }
  template <class Lanes, class Add>
  POINTPROJ_FN void each_neighbor(Lanes& lanes, int at, const Point<Real>& point, Add add) const {
    Queue<Sum, Lanes> queue(lanes);
    const int64_t begin = start ? start[at] : int64_t(at) * k;
    const int count = start ? start[at + 1] - static_cast<int>(begin) : k;
    for (int first = 0; lanes.any(first < count); first += Lanes::width) {
      const int i = first + lanes.lane();
      int neighbor = i < count ? pairs[begin + i] : -1;
      if (start) neighbor = neighbor < 0 ? -1 : neighbor / k;
      const Sum squared = neighbor < 0 ? kInfinity<Sum> : squared_distance<Sum>(point.position, other(neighbor));
      queue.push(lanes, squared < kInfinity<Sum>, neighbor, squared);
      if (lanes.any(queue.is_full())) queue.flush(lanes, add);
    }
    queue.flush(lanes, add);
  }
};

// Sorts pairs by the reference point that they contain.
struct InvertRows {
  const int* rows;  // (Q k,)
  int* start;       // (references + 2,): first pair of each; then of places without a neighbour
  int* pairs;       // (Q k,)
  CountingSort sort;

  template <class Machine>
  POINTPROJ_FN void operator()(Machine& machine) const {
    machine.each(sort.slots, [&](int i) {
      sort.occupancy[i] = 0;
      if (i == 0) start[0] = 0;
    });
    machine.barrier();
    const int missing = sort.slots - 1;
    sort.count(machine, [&](int pair) -> Slot { return {rows[pair] < 0 ? missing : rows[pair], true}; });
    sort.scatter(
        machine, [&](int64_t row, int end) { start[row + 1] = end; },
        [&](int pair, int row, int rank) { pairs[start[row] + rank] = pair; });
  }
};

// Gradient of the features by atomics, in any order: W1 operator 98 us. Rows inverted and gathered took 37 us of 148.
template <class Real, class Sum>
struct FeatureGradientByAtomics {
  using Number = Sum;
  static constexpr int kLanes = 32;  // atomics go by whole rows, wherever they begin
  static_assert(kLanes == kChannelsAtOnce);

  ListedNeighbors<Real, Sum> problem;
  Matrix<const Sum> grad;  // (Q, channels)
  Matrix<Sum> d_features;  // (N, channels), zeros before
  Weights<const Sum> weights;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [at, chunk] = split_item(item, problem.chunks);
    const int column = chunk * kChannelsAtOnce + lanes.lane();
    const bool writes = column < grad.columns && lanes.has_item;
    const Sum upstream = writes ? grad[at][column] : Sum(0);
    const Sum per_sigma = Sum(1) / *problem.sigma;
    problem.each_neighbor(lanes, at, problem.own(at), [&](Neighbor<Sum>* neighbors, int size) {
      for (int i = lanes.lane(); i < size; i += Lanes::width) {
        neighbors[i].value = weights.of(at, sqrt(neighbors[i].value), per_sigma);
      }
      lanes.sync();
      for (int i = 0; i < size; ++i) {
        if (writes) lanes.add(d_features[neighbors[i].at] + column, neighbors[i].value * upstream);
      }
    });
  }
};

}  // namespace pointproj
