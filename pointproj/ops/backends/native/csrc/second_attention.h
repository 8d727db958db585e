// Second derivatives of attention over neighbour lists; formulas in pointproj/ops/specification/gradients.py, where the
// logit is that of attention. As in attention.h, a task is one head of a query, or of a reference point.
#pragma once

#include "attention.h"

namespace pointproj::POINTPROJ_DEVICE {

// Directions of the inputs, along which the first gradients are differentiated; null where they are 0.
template <class Sum>
struct AttentionDirections {
  Matrix<const Sum> queries, keys, values;
  const Sum* bias;  // (pairs, heads)
};

// Means over the neighbours of a head of a query; the rate of a logit is its derivative along the directions.
template <class Sum>
struct HeadMeans {
  Sum product, rate, both;  // of the products of upstream gradient and value, of rates, of gradients of logits
};

template <class Sum, class Lanes>
struct QueryRows {
  HeadRow<Sum, Lanes> query, upstream, direction;
};
template <class Sum, class Lanes>
struct ReferenceRows {
  HeadRow<Sum, Lanes> key, value, key_direction, value_direction;
};

// What all tasks are given.
template <class Sum>
struct SecondAttention {
  Attention<Sum> given;
  AttentionDirections<Sum> directions;
  Matrix<const Sum> grad;
  const Sum* log_sums;    // (Q, heads)
  HeadMeans<Sum>* means;  // (Q, heads), written by SecondAttendMeans

  struct Pair {
    Sum weight, rate, product, direction_product;

    // The gradients of the logit's rate and of the logit.
    POINTPROJ_FN Sum of_rate(const HeadMeans<Sum>& mean) const { return weight * (product - mean.product); }
    POINTPROJ_FN Sum of_logit(const HeadMeans<Sum>& mean) const {
      return weight * (direction_product - mean.both) + of_rate(mean) * (rate - mean.rate);
    }
  };

  template <class Lanes>
  POINTPROJ_FN void load(const Lanes& lanes, Matrix<const Sum> from, int row, int head, HeadRow<Sum, Lanes>& to) const {
    if (from.data) {
      to.load(lanes, from[row] + int64_t(head) * given.channels, given.channels, given.aligned);
    } else {
      to.clear(lanes, given.channels);
    }
  }
  template <class Lanes>
  POINTPROJ_FN void load(const Lanes& lanes, int query, int head, QueryRows<Sum, Lanes>& rows) const {
    load(lanes, given.queries, query, head, rows.query);
    load(lanes, grad, query, head, rows.upstream);
    load(lanes, directions.queries, query, head, rows.direction);
  }
  template <class Lanes>
  POINTPROJ_FN void load(const Lanes& lanes, int row, int head, ReferenceRows<Sum, Lanes>& rows) const {
    load(lanes, given.keys, row, head, rows.key);
    load(lanes, given.values, row, head, rows.value);
    load(lanes, directions.keys, row, head, rows.key_direction);
    load(lanes, directions.values, row, head, rows.value_direction);
  }
  template <class Lanes>
  POINTPROJ_FN Pair of_pair(const Lanes& lanes, int64_t pair, int query, int head, const QueryRows<Sum, Lanes>& own,
                            const ReferenceRows<Sum, Lanes>& other) const {
    const int channels = given.channels;
    const Sum logit = given.scale * lanes.sum(own.query.times(lanes, other.key, channels));
    const Sum rate = given.scale * lanes.sum(own.direction.times(lanes, other.key, channels) +
                                             own.query.times(lanes, other.key_direction, channels));
    return {exp(logit + given.bias_of(pair, head) - log_sums[int64_t(query) * given.heads + head]),
            rate + (directions.bias ? directions.bias[pair * given.heads + head] : Sum(0)),
            lanes.sum(own.upstream.times(lanes, other.value, channels)),
            lanes.sum(own.upstream.times(lanes, other.value_direction, channels))};
  }
  // body(pair, its terms, rows of the reference point), for all neighbours of a query.
  template <class Lanes, class Body>
  POINTPROJ_FN void each_neighbor(
      Lanes& lanes, int query, int head, const QueryRows<Sum, Lanes>& own, Body body) const {
    const int64_t end = given.rows.first_pair(query + 1);
    for (int64_t pair = given.rows.first_pair(query); lanes.any(pair < end); ++pair) {
      const int row = pair < end ? given.rows(pair) : -1;
      ReferenceRows<Sum, Lanes> other;
      load(lanes, greater(row, 0), head, other);  // where there is none, any row
      const Pair terms = of_pair(lanes, lesser(pair, given.rows.capacity - 1), query, head, own, other);
      if (row >= 0) body(pair, terms, other);
    }
  }
};

// Means over the neighbours of a query, and the gradients of upstream gradients.
template <class Sum, int kLanes_>
struct SecondAttendMeans {
  using Number = Sum;
  static constexpr int kLanes = kLanes_, kBlocks = 4;

  SecondAttention<Sum> problem;
  Matrix<const Sum> result;
  Matrix<Sum> d_grad;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [query, head] = split_item(item, problem.given.heads);
    const int channels = problem.given.channels;
    QueryRows<Sum, Lanes> own;
    problem.load(lanes, query, head, own);
    HeadRow<Sum, Lanes> mean_row, d_row;
    problem.load(lanes, result, query, head, mean_row);
    d_row.clear(lanes, channels);
    HeadMeans<Sum> mean = {lanes.sum(mean_row.times(lanes, own.upstream, channels)), 0, 0};
    problem.each_neighbor(lanes, query, head, own, [&](int64_t, const auto& pair, const auto& other) {
      mean.rate += pair.weight * pair.rate;
      mean.both += pair.weight * pair.direction_product + pair.of_rate(mean) * pair.rate;
      d_row.add(lanes, pair.weight * pair.rate, other.value, channels);
      d_row.add(lanes, pair.weight, other.value_direction, channels);
    });
    if (lanes.lane() == 0) problem.means[item] = mean;
    if (!d_grad.data) return;
    d_row.add(lanes, -mean.rate, mean_row, channels);
    d_row.store(lanes, d_grad[query] + int64_t(head) * channels, channels, Sum(1));
  }
};

// Gradients of queries and biases.
template <class Sum, int kLanes_>
struct SecondAttendGradient {
  using Number = Sum;
  static constexpr int kLanes = kLanes_, kBlocks = 4;

  SecondAttention<Sum> problem;
  Matrix<Sum> d_queries;  // or null
  Sum* d_bias;            // (pairs, heads), zeros before; or null

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [query, head] = split_item(item, problem.given.heads);
    const int channels = problem.given.channels, heads = problem.given.heads;
    QueryRows<Sum, Lanes> own;
    problem.load(lanes, query, head, own);
    HeadRow<Sum, Lanes> d_row;
    d_row.clear(lanes, channels);
    const HeadMeans<Sum> mean = problem.means[item];
    const int head_of_bias = head;
    problem.each_neighbor(lanes, query, head, own, [&](int64_t at, const auto& pair, const auto& other) {
      const Sum of_logit = pair.of_logit(mean);
      d_row.add(lanes, of_logit, other.key, channels);
      d_row.add(lanes, pair.of_rate(mean), other.key_direction, channels);
      if (d_bias && lanes.lane() == 0) d_bias[at * heads + head_of_bias] = of_logit;
    });
    if (!d_queries.data) return;
    d_row.store(lanes, d_queries[query] + int64_t(head) * channels, channels, problem.given.scale);
  }
};

// Gradients of keys and values: the pairs of each reference point one after another.
template <class Sum, int kLanes_>
struct SecondAttendReferenceGradient {
  using Number = Sum;
  static constexpr int kLanes = kLanes_, kBlocks = 4;

  SecondAttention<Sum> problem;
  const int *start, *pairs;  // of InvertRows
  Matrix<Sum> d_keys, d_values;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [row, head] = split_item(item, problem.given.heads);
    const int channels = problem.given.channels, end = start[row + 1];
    ReferenceRows<Sum, Lanes> own;
    problem.load(lanes, row, head, own);
    HeadRow<Sum, Lanes> d_key, d_value;
    d_key.clear(lanes, channels);
    d_value.clear(lanes, channels);
    for (int i = start[row]; lanes.any(i < end); ++i) {
      const int pair = i < end ? pairs[i] : 0, query = i < end ? problem.given.rows.query_of(pair) : 0;
      QueryRows<Sum, Lanes> other;
      problem.load(lanes, query, head, other);
      const auto terms = problem.of_pair(lanes, pair, query, head, other, own);
      if (!(i < end)) continue;
      const HeadMeans<Sum> mean = problem.means[int64_t(query) * problem.given.heads + head];
      d_key.add(lanes, terms.of_logit(mean), other.query, channels);
      d_key.add(lanes, terms.of_rate(mean), other.direction, channels);
      d_value.add(lanes, terms.weight * (terms.rate - mean.rate), other.upstream, channels);
    }
    const int64_t column = int64_t(head) * channels;
    if (d_keys.data) d_key.store(lanes, d_keys[row] + column, channels, problem.given.scale);
    if (d_values.data) d_value.store(lanes, d_values[row] + column, channels, Sum(1));
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
