// Aggregation over neighbour lists, nearest first, and its gradients; formulas in pointproj/ops/gradients.py.
//
// What belongs to a reference point is gathered over the pairs it is in, which the lists, inverted by a counting
// sort, tell: no two threads add to one place. Where only the features want a gradient and any order will do, a GPU
// spreads it by atomics instead.
#pragma once

#include "build_cells.h"
#include "softmax.h"

namespace pointproj {

constexpr int kListedLanes = 8;  // of a GPU warp that work on one point

struct Lists {
  const int* rows;  // (Q, k), -1 where there are fewer
  int k;
};

template <class Real, class Sum>
struct AggregateListed {
  static constexpr int kLanes = kListedLanes;
  using Number = Sum;

  const Real* query_points;
  const Real* reference_points;
  const Sum* features;  // (N, channels)
  const Sum* sigma;
  Lists lists;
  int channels, chunks;
  Sum* aggregated;  // (Q, channels)
  Sum* weights;     // (Q, k)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [query, chunk] = split_item(item, chunks);
    const int k = lists.k;
    const bool writes = chunk == 0 && lanes.has_item;
    const int64_t first = static_cast<int64_t>(query) * k;
    const Vec3<Real> p = load_row(query_points, query);
    const Sum per_sigma = Sum(1) / *sigma;
    const int nearest_row = lists.rows[first];
    const Sum nearest = nearest_row < 0 ? Sum(0) : distance<Sum>(p, load_row(reference_points, nearest_row));
    typename Lanes::template RowSum<Sum, 1> sums;
    sums.begin(features, channels, channels, chunk, aggregated + static_cast<int64_t>(query) * channels);
    Neighbor<Sum>* list = lanes.template list<Sum>();
    Sum total = 0;
    for (int begin = 0; begin < k; begin += kMostWaiting) {
      const int end = lesser(begin + kMostWaiting, k);
      int size = 0;
      lanes.sync();
      for (int i = begin + lanes.lane(); i < end; i += Lanes::width) {
        const int row = lists.rows[first + i];
        Sum weight = 0;
        if (row >= 0) {
          weight = exp((nearest - distance<Sum>(p, load_row(reference_points, row))) * per_sigma);
          list[i - begin] = {weight, row};  // those that are missing come last
          size += 1;
        }
        if (writes) weights[first + i] = weight;
        total += weight;
      }
      size = lanes.sum(size);
      lanes.sync();
      sums.add(list, size);
    }
    total = lanes.sum(total);
    const Sum inverse = total > Sum(0) ? Sum(1) / total : Sum(0);
    if (writes) {
      for (int i = lanes.lane(); i < k; i += Lanes::width) weights[first + i] *= inverse;
    }
    sums.finish(lanes, is_finite(p) ? inverse : kNan<Sum>);
  }
};

// For every reference point the pairs (query times k plus place) that it is in.
struct InvertLists {
  const int* rows;  // (pairs,)
  int pairs, references;
  int* start;  // (references + 2,): first pair of each; then of places without a neighbour
  int* order;  // (pairs,)
  int* occupancy;  // (references + 1,)
  int* place;      // (pairs, 2)
  int* partial;

  template <class Machine>
  POINTPROJ_FN void operator()(Machine& machine) const {
    machine.each(references + 1, [&](int i) {
      occupancy[i] = 0;
      if (i == 0) start[0] = 0;
    });
    machine.barrier();
    machine.count(
        pairs, occupancy, place,
        [&](int pair) -> Slot { return {rows[pair] < 0 ? references : rows[pair], true}; }, [](int) {});
    machine.barrier();
    machine.scan(occupancy, references + 1, partial, [&](int64_t row, int sum) { start[row + 1] = sum; });
    machine.barrier();
    machine.each(pairs, [&](int pair) {
      const int* slot = place + 2 * static_cast<int64_t>(pair);
      order[start[slot[0]] + slot[1]] = pair;
    });
  }
};

struct InvertedLists {
  const int* start;
  const int* order;
  int k;
};

// Gradient of the features.
template <class Sum>
struct GatherListed {
  static constexpr int kLanes = kListedLanes;
  using Number = Sum;

  InvertedLists inverted;
  const Sum* weights;  // (Q, k)
  const Sum* grad;     // (Q, channels)
  int channels, chunks;
  Sum* d_features;  // (N, channels)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [reference, chunk] = split_item(item, chunks);
    typename Lanes::template RowSum<Sum, 1> sums;
    sums.begin(grad, channels, channels, chunk, d_features + static_cast<int64_t>(reference) * channels);
    Neighbor<Sum>* list = lanes.template list<Sum>();
    int begin = inverted.start[reference];
    const int end = inverted.start[reference + 1];
    while (lanes.anywhere(begin < end)) {
      const int size = lesser(kMostWaiting, greater(end - begin, 0));
      lanes.sync();
      for (int i = lanes.lane(); i < size; i += Lanes::width) {
        const int pair = inverted.order[begin + i];
        list[i] = {weights[pair], pair / inverted.k};
      }
      lanes.sync();
      sums.add(list, size);
      begin += size;
    }
    sums.finish(lanes, Sum(1));
  }
};

// The same by atomics, in any order: it needs no inverted lists.
template <class Sum>
struct SpreadListed {
  static constexpr int kLanes = 32;  // atomics go by whole rows, wherever they begin
  using Number = Sum;
  static constexpr int kHeld = kChannelsAtOnce / kLanes;

  Lists lists;
  const Sum* weights;  // (Q, k)
  const Sum* grad;     // (Q, channels)
  int channels, chunks;
  Sum* d_features;  // (N, channels), zeros before

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [query, chunk] = split_item(item, chunks);
    if (!lanes.has_item) return;
    const int column = chunk * kChannelsAtOnce + lanes.lane();
    const Sum* upstream = grad + static_cast<int64_t>(query) * channels;
    Sum held[kHeld];
    POINTPROJ_UNROLL
    for (int i = 0; i < kHeld; ++i) held[i] = column + i * kLanes < channels ? upstream[column + i * kLanes] : Sum(0);
    const int64_t first = static_cast<int64_t>(query) * lists.k;
    for (int begin = 0; begin < lists.k; begin += kLanes) {
      const int own = begin + lanes.lane();  // each lane reads one neighbour, for all of them
      const int own_row = own < lists.k ? lists.rows[first + own] : -1;
      const Sum own_weight = own < lists.k ? weights[first + own] : Sum(0);
      for (int j = 0; j < lesser(kLanes, lists.k - begin); ++j) {
        const int row = lanes.take(own_row, j);
        if (row < 0) return;
        const Sum weight = lanes.take(own_weight, j);
        Sum* to = d_features + static_cast<int64_t>(row) * channels + column;
        POINTPROJ_UNROLL
        for (int i = 0; i < kHeld; ++i) {
          if (column + i * kLanes < channels) lanes.add(to + i * kLanes, weight * held[i]);
        }
      }
    }
  }
};

// Gradients of the queries and of sigma, and what each pair does to its reference point.
template <class Real, class Sum>
struct PullListed {
  static constexpr int kLanes = kListedLanes;
  using Number = Sum;

  const Real* query_points;
  const Real* reference_points;
  const Sum* features;
  const Sum* sigma;
  Lists lists;
  const Sum* weights;
  const Sum* grad;
  int channels;
  Sum* scales;           // (Q, k): gradient along p_i - q_j, per unit of it
  Real* d_query_points;  // (Q, 3)
  Sum* sigma_rows;       // (Q,)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int query) const {
    const int k = lanes.has_item ? lists.k : 0;
    const int64_t first = static_cast<int64_t>(query) * k;
    const Vec3<Real> p = load_row(query_points, query);
    const Sum per_sigma = Sum(1) / *sigma;
    Sum mean = 0;
    for (int i = lanes.lane(); i < k; i += Lanes::width) {
      const int row = lists.rows[first + i];
      const Sum product = row < 0 ? Sum(0)
                                  : dot(grad + static_cast<int64_t>(query) * channels,
                                        features + static_cast<int64_t>(row) * channels, channels);
      scales[first + i] = product;
      if (row >= 0) mean += weights[first + i] * product;
    }
    mean = lanes.sum(mean);
    Sum spread = 0, along[3] = {0, 0, 0};
    for (int i = lanes.lane(); i < k; i += Lanes::width) {
      const int row = lists.rows[first + i];
      Sum scale = 0;
      if (row >= 0) {
        const Vec3<Real> q = load_row(reference_points, row);
        const Sum grad_logit = weights[first + i] * (scales[first + i] - mean), far = distance<Sum>(p, q);
        spread += grad_logit * far;
        if (far > Sum(0)) scale = grad_logit * per_sigma / far;
        for (int axis = 0; axis < 3; ++axis) along[axis] += scale * Sum(p[axis] - q[axis]);
      }
      scales[first + i] = scale;
    }
    spread = lanes.sum(spread);
    for (int axis = 0; axis < 3; ++axis) along[axis] = lanes.sum(along[axis]);
    if (lanes.lane() != 0 || !lanes.has_item) return;
    sigma_rows[query] = spread * per_sigma * per_sigma;
    for (int axis = 0; axis < 3; ++axis) {
      d_query_points[3 * static_cast<int64_t>(query) + axis] = static_cast<Real>(-along[axis]);
    }
  }
};

// Gradient of the reference points.
template <class Real, class Sum>
struct PushListed {
  static constexpr int kLanes = kListedLanes;
  using Number = Sum;

  const Real* query_points;
  const Real* reference_points;
  InvertedLists inverted;
  const Sum* scales;
  Real* d_reference_points;  // (N, 3)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int reference) const {
    const Vec3<Real> q = load_row(reference_points, reference);
    const int end = inverted.start[reference + 1];
    Sum along[3] = {0, 0, 0};
    for (int i = inverted.start[reference] + lanes.lane(); i < end; i += Lanes::width) {
      const int pair = inverted.order[i];
      const Vec3<Real> p = load_row(query_points, pair / inverted.k);
      for (int axis = 0; axis < 3; ++axis) along[axis] += scales[pair] * Sum(p[axis] - q[axis]);
    }
    for (int axis = 0; axis < 3; ++axis) {
      const Sum sum = lanes.sum(along[axis]);
      if (lanes.lane() == 0) {
        d_reference_points[3 * static_cast<int64_t>(reference) + axis] = static_cast<Real>(sum);
      }
    }
  }
};

}  // namespace pointproj
