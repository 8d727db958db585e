// Aggregation over all points within a radius, and its gradients; formulas in pointproj/ops/gradients.py.
//
// Each group of lanes owns one point, meets the points of the other set within the radius, and writes its own
// rows only. Gradients of reference points and features are gathered by the transposed search, over the queries
// near each reference point. Weights are a_ij = exp((nearest_i - d_ij) / sigma) / total_i; the forward keeps
// nearest_i and 1 / total_i apart, because their logarithm would round away what is small next to nearest_i /
// sigma.
#pragma once

#include "softmax.h"
#include "wrapped.h"

namespace pointproj {

constexpr int kRadiusLanes = 8;  // of a GPU warp that work on one point

template <class Sum>
constexpr int kVector = 16 / static_cast<int>(sizeof(Sum));

// One set of points and the other, which is searched.
template <class Real, class Sum>
struct Within {
  Points<Real> own;  // in the order of their cells
  Batch own_batch;
  Wrapped<Real> others;
  Real radius;
  Real reach;  // largest squared distance that counts as within the radius
  const Sum* sigma;
  int channels;
  int padded;  // channels of the sorted rows of values
  int chunks;  // searches that it takes to hold all channels

  template <class Lanes, class Settle>
  struct Visitor {
    const Within& within;
    const Vec3<Real>& q;
    Queue<Sum, Lanes>& queue;
    Settle& settle;

    POINTPROJ_FN void visit(Lanes& lanes, const Points<Real>& points, int begin, int count) {
      lanes.meet(
          points, q, begin, count, [&]() { return within.reach; },
          [&](int at, const Point<Real>& point, Real squared, bool exists) {
            queue.push(lanes, exists && squared <= within.reach, at, square_in<Sum>(q, point.position));
          },
          [&]() {
            if (lanes.anywhere(queue.is_full())) queue.drain(lanes, settle);
          });
    }
  };

  // settle(list, size) for all points within the radius of a finite one, some at a time; lanes share each list.
  template <class Lanes, class Settle>
  POINTPROJ_FN void each_neighbor(Lanes& lanes, const Point<Real>& point, Settle settle) const {
    const bool searches = is_finite(point.position);
    if (!lanes.anywhere(searches)) return;
    const Vec3<Real> q = searches ? point.position : Vec3<Real>{{0, 0, 0}};
    Queue<Sum, Lanes> queue(lanes);
    Visitor<Lanes, Settle> visitor{*this, q, queue, settle};
    search_ball(others, own_batch.cloud_of(point.row), q, searches, radius, lanes, visitor);
    queue.drain(lanes, settle);
  }
};

// Forward. Own points are the queries.
template <class Real, class Sum>
struct AggregateWithin {
  static constexpr int kLanes = kRadiusLanes;
  using Number = Sum;

  Within<Real, Sum> within;
  const Sum* features;  // (N, padded) in the order of the searched points
  Sum* aggregated;      // (Q, channels)
  Sum* softmax;         // (Q, 2) in the order of own points: nearest_i and 1 / total_i

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [at, chunk] = split_item(item, within.chunks);
    const Point<Real> point = within.own.load(at);
    Softmax<Sum, kVector<Sum>, Lanes> state(*within.sigma);
    state.sums.begin(features, within.padded, within.channels, chunk,
                     aggregated + static_cast<int64_t>(point.row) * within.channels);
    within.each_neighbor(lanes, point, [&](Neighbor<Sum>* list, int size) { state.add(lanes, list, size); });
    const Sum inverse = state.inverse(lanes);
    state.sums.finish(lanes, is_finite(point.position) ? inverse : kNan<Sum>);
    if (chunk == 0 && lanes.lane() == 0) {
      softmax[2 * static_cast<int64_t>(at)] = state.nearest;
      softmax[2 * static_cast<int64_t>(at) + 1] = inverse;
    }
  }
};

// Gradient of the features: own points are the references.
template <class Real, class Sum>
struct GatherWithin {
  static constexpr int kLanes = kRadiusLanes;
  using Number = Sum;

  Within<Real, Sum> within;
  const Sum* grad;     // (Q, padded) in the order of the searched points
  const Sum* softmax;  // (Q, 2)
  Sum* d_features;     // (N, channels)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [at, chunk] = split_item(item, within.chunks);
    const Point<Real> point = within.own.load(at);
    const Sum per_sigma = Sum(1) / *within.sigma;
    typename Lanes::template RowSum<Sum, kVector<Sum>> sums;
    sums.begin(grad, within.padded, within.channels, chunk,
               d_features + static_cast<int64_t>(point.row) * within.channels);
    within.each_neighbor(lanes, point, [&](Neighbor<Sum>* list, int size) {
      for (int i = lanes.lane(); i < size; i += Lanes::width) {
        const Sum* known = softmax + 2 * static_cast<int64_t>(list[i].at);
        list[i].number = exp((known[0] - Sum(sqrt(list[i].number))) * per_sigma) * known[1];
      }
      lanes.sync();
      sums.add(list, size);
    });
    sums.finish(lanes, Sum(1));
  }
};

// Gradients of the queries, and of sigma: own points are the queries.
template <class Real, class Sum>
struct PullWithin {
  static constexpr int kLanes = kRadiusLanes;
  using Number = Sum;

  Within<Real, Sum> within;
  const Sum* features;    // (N, padded) in the order of the searched points
  const Sum* grad;        // (Q, padded) in the order of own points
  const Sum* aggregated;  // (Q, channels)
  const Sum* softmax;     // (Q, 2)
  Sum* means;             // (Q,) in the order of own points: upstream gradient times result
  Real* d_query_points;   // (Q, 3)
  Sum* sigma_rows;        // (Q,)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int at) const {
    const Point<Real> point = within.own.load(at);
    const Sum sigma = *within.sigma, per_sigma = Sum(1) / sigma;
    const Sum* own_grad = grad + static_cast<int64_t>(at) * within.padded;
    const Sum nearest = softmax[2 * static_cast<int64_t>(at)], inverse = softmax[2 * static_cast<int64_t>(at) + 1];
    const Sum mean =
        dot(own_grad, aggregated + static_cast<int64_t>(point.row) * within.channels, within.channels);
    Sum spread = 0, along[3] = {0, 0, 0};
    within.each_neighbor(lanes, point, [&](const Neighbor<Sum>* list, int size) {
      for (int i = lanes.lane(); i < size; i += Lanes::width) {
        const Sum far = sqrt(list[i].number);
        const int other = list[i].at;
        const Sum product = dot(own_grad, features + static_cast<int64_t>(other) * within.padded, within.channels);
        const Sum grad_logit = Sum(exp((nearest - far) * per_sigma)) * inverse * (product - mean);
        spread += grad_logit * far;
        if (!(far > Sum(0))) continue;
        const Vec3<Real> there = within.others.points.load(other).position;
        for (int axis = 0; axis < 3; ++axis) {
          along[axis] += grad_logit * per_sigma / far * Sum(point.position[axis] - there[axis]);
        }
      }
    });
    spread = lanes.sum(spread);
    for (int axis = 0; axis < 3; ++axis) along[axis] = lanes.sum(along[axis]);
    if (lanes.lane() != 0) return;
    means[at] = mean;
    sigma_rows[at] = spread * per_sigma * per_sigma;
    for (int axis = 0; axis < 3; ++axis) {
      d_query_points[3 * static_cast<int64_t>(point.row) + axis] = static_cast<Real>(-along[axis]);
    }
  }
};

// Gradient of the reference points, which are the own points.
template <class Real, class Sum>
struct PushWithin {
  static constexpr int kLanes = kRadiusLanes;
  using Number = Sum;

  Within<Real, Sum> within;
  const Sum* features;       // (N, padded) in the order of own points
  const Sum* grad;           // (Q, padded) in the order of the searched points
  const Sum* softmax;        // (Q, 2)
  const Sum* means;          // (Q,)
  Real* d_reference_points;  // (N, 3)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int at) const {
    const Point<Real> point = within.own.load(at);
    const Sum per_sigma = Sum(1) / *within.sigma;
    const Sum* own_features = features + static_cast<int64_t>(at) * within.padded;
    Sum along[3] = {0, 0, 0};
    within.each_neighbor(lanes, point, [&](const Neighbor<Sum>* list, int size) {
      for (int i = lanes.lane(); i < size; i += Lanes::width) {
        const Sum far = sqrt(list[i].number);
        if (!(far > Sum(0))) continue;
        const int query = list[i].at;
        const Sum product = dot(own_features, grad + static_cast<int64_t>(query) * within.padded, within.channels);
        const Sum* known = softmax + 2 * static_cast<int64_t>(query);
        const Sum grad_logit = Sum(exp((known[0] - far) * per_sigma)) * known[1] * (product - means[query]);
        const Vec3<Real> there = within.others.points.load(query).position;
        for (int axis = 0; axis < 3; ++axis) {
          along[axis] += grad_logit * per_sigma / far * Sum(there[axis] - point.position[axis]);
        }
      }
    });
    for (int axis = 0; axis < 3; ++axis) {
      const Sum sum = lanes.sum(along[axis]);
      if (lanes.lane() == 0) {
        d_reference_points[3 * static_cast<int64_t>(point.row) + axis] = static_cast<Real>(sum);
      }
    }
  }
};

}  // namespace pointproj
