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

// All gradients at once, those of the references by atomics too: for W1 `gradients`, where rows inverted and gathered
// took 60 us more.
template <class Real, class Weighting>
struct GradientsByAtomics {
  using Sum = typename Weighting::Sum;
  using Number = Sum;
  static constexpr int kLanes = 32, kAtOnce = 8;  // neighbours

  ListedNeighbors<Real, Weighting> problem;
  Matrix<const Sum> grad, features, aggregated;
  const Sum* weights;      // (Q, k)
  Matrix<Sum> d_features;  // (N, channels), zeros before; or null, as the other two
  Real* d_references;      // (N, 3), zeros before
  Real* d_queries;         // (Q, 3)
  Sum* sigma_rows;         // (Q,)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int query) const {
    const Vec3<Real> p = problem.own(query).position;
    const auto weighting = problem.weighting.at_sigma();
    const int k = problem.k, channels = grad.columns;
    const int64_t first = int64_t(query) * k;
    Sum mean = 0, of_sigma = 0, along[3] = {0, 0, 0};
    if (weighting.divides) {
      for (int c = lanes.lane(); c < channels; c += kLanes) {
        mean = multiply_add(grad[query][c], aggregated[query][c], mean);
      }
      mean = lanes.sum(mean);
    }
    for (int begin = 0; begin < k; begin += kAtOnce) {
      const int i = begin + lanes.lane() % kAtOnce;  // of the lane, and of others that repeat it
      const int row = i < k ? problem.rows[first + i] : -1;
      const Sum weight = i < k ? weights[first + i] : Sum(0);
      const Sum product = multiply_rows(lanes, query, row, weight);
      Sum steps[3] = {0, 0, 0};
      if (lanes.lane() < kAtOnce && row >= 0) {
        const Vec3<Real> there = problem.other(row);
        const Sum far = sqrt(squared_distance<Sum>(p, there)), grad_logit = weight * (product - mean);
        of_sigma += grad_logit * weighting.sigma_term(far);
        for (int axis = 0; axis < 3 && far > Sum(0); ++axis) {
          steps[axis] = grad_logit * weighting.fall(far) / far * Sum(p[axis] - there[axis]);
          along[axis] += steps[axis];
        }
      }
      if (d_references) add_steps(lanes, row, steps);
    }
    of_sigma = lanes.sum(of_sigma);
    for (int axis = 0; axis < 3; ++axis) along[axis] = lanes.sum(along[axis]);
    if (lanes.lane() != 0) return;
    for (int axis = 0; axis < 3; ++axis) d_queries[3 * int64_t(query) + axis] = static_cast<Real>(-along[axis]);
    sigma_rows[query] = weighting.of_sigma(of_sigma);
  }

  // What the first lanes have, three lanes a neighbour: atomics side by side count as one.
  template <class Lanes>
  POINTPROJ_FN void add_steps(Lanes& lanes, int own_row, const Sum (&own_steps)[3]) const {
    const int neighbor = lanes.lane() / 3, axis = lanes.lane() % 3, row = lanes.take(own_row, neighbor);
    Sum step = 0;
    for (int i = 0; i < 3; ++i) {
      const Sum taken = lanes.take(own_steps[i], neighbor);
      if (i == axis) step = taken;
    }
    if (neighbor < kAtOnce && row >= 0) lanes.add(d_references + 3 * int64_t(row) + axis, static_cast<Real>(step));
  }

  // The upstream gradient times the row of the lane's neighbour, rounded as the mean: nothing remains of a neighbour
  // that outweighs all others. The gradient of the features is added on the way.
  template <class Lanes>
  POINTPROJ_FN Sum multiply_rows(Lanes& lanes, int query, int own_row, Sum own_weight) const {
    Sum products[kAtOnce] = {};
    for (int begin = 0; begin < grad.columns; begin += kLanes) {
      const int column = begin + lanes.lane();
      const bool reads = column < grad.columns;
      const Sum upstream = reads ? grad[query][column] : Sum(0);
      POINTPROJ_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        const int row = lanes.take(own_row, j);
        const Sum weight = lanes.take(own_weight, j);
        if (!reads || row < 0) continue;
        products[j] = multiply_add(upstream, features[row][column], products[j]);
        if (d_features.data) lanes.add(d_features[row] + column, weight * upstream);
      }
    }
    POINTPROJ_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      products[j] += lanes.exchange(products[j], 16);
      products[j] += lanes.exchange(products[j], 8);
    }
    return lanes.template sums_of<kAtOnce>(products);
  }
};

}  // namespace pointproj
