// Neighbours that are given: rows of a search for the sums, the same rows inverted for the gradients that belong to
// reference points. Where only the features want a gradient and any order will do, a GPU adds it up by atomics.
#pragma once

#include "scan.h"
#include "sums.h"

namespace pointproj {

// A pair is numbered by its query times k plus its place in the query's row.
template <class Sum>
struct PairWeights {
  const Sum* weights;  // (Q, k)

  template <class AtSigma>
  POINTPROJ_FN Sum of(int, int pair, Sum, const AtSigma&) const { return weights[pair]; }
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

// The weights of rows, and the weighted sum of features. Rows come nearest first, so weights are relative to the first
// distance: no running total as in RadiusSums, which would be 1500 instructions instead of 900, for W1 `aggregate`.
template <class Real, class Weighting>
struct NeighborSums {
  using Sum = typename Weighting::Sum;
  using Number = Sum;
  static constexpr int kLanes = kSumLanes;

  ListedNeighbors<Real, Weighting> problem;
  Matrix<const Sum> features;  // (N, channels)
  Matrix<Sum> aggregated;      // (Q, channels)
  Sum* weights;                // (Q, k)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [query, chunk] = split_item(item, problem.chunks);
    const int k = problem.k;
    const bool writes = chunk == 0 && lanes.has_item;
    const int64_t first = int64_t(query) * k;
    const int* rows = problem.rows + first;
    const Vec3<Real> p = problem.own(query).position;
    const auto weighting = problem.weighting.at_sigma();
    const auto distance = [&](int row) { return Sum(sqrt(squared_distance<Sum>(p, problem.other(row)))); };
    const Sum anchor = weighting.anchor(rows[0] < 0 ? Sum(0) : distance(rows[0]));
    typename Lanes::template RowSum<Sum, 1> sums(features, chunk, aggregated, query);
    Neighbor<Sum>* neighbors = lanes.template reserve<Sum>();
    Sum total = 0;
    for (int begin = 0; begin < k; begin += kQueueLength) {
      const int end = lesser(begin + kQueueLength, k);
      int size = 0;
      lanes.sync();
      for (int next = begin; next < end; next += Lanes::width) {
        const int i = next + lanes.lane();
        const bool exists = i < end && rows[i] >= 0;
        const unsigned existing = lanes.ballot(exists);
        Sum weight = 0;
        if (exists) {
          weight = weighting.weight(distance(rows[i]), anchor);
          neighbors[size + lanes.bits_before(existing)] = {weight, rows[i]};
        }
        size += lanes.bit_count(existing);
        if (writes && i < end) weights[first + i] = weight;
        total += weight;
      }
      lanes.sync();
      sums.add(neighbors, size);
    }
    total = lanes.sum(total);
    const Sum inverse = weighting.inverse(total);
    if (writes) {
      for (int i = lanes.lane(); i < k; i += Lanes::width) weights[first + i] *= inverse;
    }
    sums.finish(is_finite(p) ? inverse : kNan<Sum>);
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
template <class Sum>
struct FeatureGradientByAtomics {
  using Number = Sum;
  static constexpr int kLanes = 32;  // atomics go by whole rows, wherever they begin
  static_assert(kLanes == kChannelsAtOnce);

  Matrix<const int> rows;
  Matrix<const Sum> weights;  // (Q, k)
  Matrix<const Sum> grad;     // (Q, channels)
  Matrix<Sum> d_features;     // (N, channels), zeros before
  int chunks;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [query, chunk] = split_item(item, chunks);
    const int column = chunk * kChannelsAtOnce + lanes.lane(), k = rows.columns;
    const bool writes = column < grad.columns;
    const Sum upstream = writes ? grad[query][column] : Sum(0);
    for (int begin = 0; begin < k; begin += kLanes) {
      const int own = begin + lanes.lane();  // each lane reads one neighbour, for all of them
      const int own_row = own < k ? rows[query][own] : -1;
      const Sum own_weight = own < k ? weights[query][own] : Sum(0);
      for (int i = 0; i < lesser(kLanes, k - begin); ++i) {
        const int row = lanes.take(own_row, i);
        if (row < 0) return;
        const Sum weight = lanes.take(own_weight, i);
        if (writes) lanes.add(d_features[row] + column, weight * upstream);
      }
    }
  }
};

}  // namespace pointproj
