// Attention over neighbour lists and its gradients; pointproj/ops/attention.py has the formulas.
//
// A task is one head of a query, or of a reference point. Its lanes hold four channels each, of some neighbours at a
// time, and reduce the products together.
#pragma once

#include "common.h"
#include "lanes.h"
#include "listed_rows.h"

namespace pointproj::POINTPROJ_DEVICE {

constexpr int kMostHeadChannels = 256, kRowsAtOnce = 4;

// Numbers of one head, in the lanes that share its channels: four in each, then the next four in each.
template <class Sum, class Lanes>
struct HeadRow {
  static constexpr int kParts = !kOnGpu ? kMostHeadChannels / 4 : Lanes::width == 32 ? kMostHeadChannels / 128 : 1;
  struct alignas(16) Four {
    Sum x[4];
  };
  Four parts[kParts];

  // body(part, the first of its channels)
  template <class Body>
  static POINTPROJ_FN void each(const Lanes& lanes, int channels, Body body) {
    POINTPROJ_UNROLL
    for (int part = 0; part < kParts && 4 * part * Lanes::width < channels; ++part) {
      body(part, 4 * (part * Lanes::width + lanes.lane()));
    }
  }
  POINTPROJ_FN void clear(const Lanes& lanes, int channels) {
    each(lanes, channels, [&](int part, int) { parts[part] = Four{}; });
  }
  // `aligned`: rows begin at multiples of 16 bytes and heads have a multiple of four channels.
  POINTPROJ_FN void load(const Lanes& lanes, const Sum* from, int channels, bool aligned) {
    each(lanes, channels, [&](int part, int first) {
      if (aligned) {
        parts[part] = first < channels ? *reinterpret_cast<const Four*>(from + first) : Four{};
      } else {
        for (int j = 0; j < 4; ++j) parts[part].x[j] = first + j < channels ? from[first + j] : Sum(0);
      }
    });
  }
  POINTPROJ_FN void store(const Lanes& lanes, Sum* to, int channels, Sum factor) const {
    each(lanes, channels, [&](int part, int first) {
      for (int j = 0; j < 4; ++j) {
        if (first + j < channels) to[first + j] = factor * parts[part].x[j];
      }
    });
  }
  // This lane's share of the product.
  POINTPROJ_FN Sum times(const Lanes& lanes, const HeadRow& other, int channels) const {
    Sum product = 0;
    each(lanes, channels, [&](int part, int) {
      for (int j = 0; j < 4; ++j) product = multiply_add(parts[part].x[j], other.parts[part].x[j], product);
    });
    return product;
  }
  POINTPROJ_FN void scale(const Lanes& lanes, Sum factor, int channels) {
    each(lanes, channels, [&](int part, int) {
      for (int j = 0; j < 4; ++j) parts[part].x[j] *= factor;
    });
  }
  POINTPROJ_FN void add(const Lanes& lanes, Sum factor, const HeadRow& other, int channels) {
    each(lanes, channels, [&](int part, int) {
      for (int j = 0; j < 4; ++j) {
        parts[part].x[j] = multiply_add(factor, other.parts[part].x[j], parts[part].x[j]);
      }
    });
  }
  // Adds a multiple to a row in memory, by atomics.
  POINTPROJ_FN void add_to(const Lanes& lanes, Sum* to, Sum factor, int channels, bool aligned) const {
    each(lanes, channels, [&](int part, int first) {
      if (first >= channels) return;
      const Sum* x = parts[part].x;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      if constexpr (sizeof(Sum) == 4) {
        if (aligned) {
          atomicAdd(reinterpret_cast<float4*>(to + first),
                    make_float4(factor * x[0], factor * x[1], factor * x[2], factor * x[3]));
          return;
        }
      }
#endif
      for (int j = 0; j < 4; ++j) {
        if (first + j < channels) lanes.add(to + first + j, factor * x[j]);
      }
    });
  }
};

template <class Sum>
struct Attention {
  ListedRows rows;
  Matrix<const Sum> queries, keys, values;
  const Sum* bias;            // (pairs, heads), or null
  int heads, channels;        // channels of a head
  Sum scale;
  bool aligned;  // see HeadRow::load

  POINTPROJ_FN Sum bias_of(int64_t pair, int head) const { return bias ? bias[pair * heads + head] : Sum(0); }

  // body(first pair, rows of some pairs with -1 for none, their keys, their values), for all pairs of a query.
  template <class Lanes, class Body>
  POINTPROJ_FN void each_neighbor(Lanes& lanes, int query, int head, Body body) const {
    const int64_t begin = rows.first_pair(query), end = rows.first_pair(query + 1), column = int64_t(head) * channels;
    for (int64_t pair = begin; lanes.any(pair < end); pair += kRowsAtOnce) {
      int row[kRowsAtOnce];
      HeadRow<Sum, Lanes> key[kRowsAtOnce], value[kRowsAtOnce];
      POINTPROJ_UNROLL
      for (int i = 0; i < kRowsAtOnce; ++i) row[i] = pair + i < end ? rows(pair + i) : -1;
      POINTPROJ_UNROLL
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int some = greater(row[i], 0);  // where there is none, any row
        key[i].load(lanes, keys[some] + column, channels, aligned);
        value[i].load(lanes, values[some] + column, channels, aligned);
      }
      body(pair, row, key, value);
    }
  }
};

// Over the heads of all queries.
template <class Sum, int kLanes_>
struct Attend {
  using Number = Sum;
  static constexpr int kLanes = kLanes_, kBlocks = 4;

  Attention<Sum> given;
  Matrix<Sum> result;
  Sum* log_sums;  // (Q, heads): of the exponentials; inf without neighbours

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [query, head] = split_item(item, given.heads);
    const int64_t column = int64_t(head) * given.channels;
    HeadRow<Sum, Lanes> own, mean;
    own.load(lanes, given.queries[query] + column, given.channels, given.aligned);
    mean.clear(lanes, given.channels);
    Sum largest = -kInfinity<Sum>, total = 0;
    given.each_neighbor(lanes, query, head, [&](int64_t pair, const int* row, const auto* key, const auto* value) {
      Sum logit[kRowsAtOnce], most = largest;
      POINTPROJ_UNROLL
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const Sum product = given.scale * lanes.sum(own.times(lanes, key[i], given.channels));
        logit[i] = row[i] < 0 ? -kInfinity<Sum> : product + given.bias_of(pair + i, head);
        most = greater(most, logit[i]);
      }
      const Sum shift = most == -kInfinity<Sum> ? Sum(0) : most, before = exp(largest - shift);
      largest = most;
      total *= before;
      mean.scale(lanes, before, given.channels);
      POINTPROJ_UNROLL
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (row[i] < 0) continue;  // 0 times a value that is not finite is NaN
        const Sum weight = exp(logit[i] - shift);
        total += weight;
        mean.add(lanes, weight, value[i], given.channels);
      }
    });
    const bool has_neighbors = total != Sum(0);  // also if it is NaN
    mean.store(lanes, result[query] + column, given.channels, has_neighbors ? Sum(1) / total : Sum(0));
    if (lanes.lane() == 0) log_sums[item] = has_neighbors ? largest + log(total) : kInfinity<Sum>;
  }
};

// Gradients of queries and biases; outside of deterministic mode also those of keys and values, by atomics.
template <class Sum, int kLanes_>
struct AttendGradient {
  using Number = Sum;
  static constexpr int kLanes = kLanes_, kBlocks = 4;

  Attention<Sum> given;
  Matrix<const Sum> grad, result;
  const Sum* log_sums;      // (Q, heads)
  Sum* means;               // (Q, heads): upstream gradient times result
  Matrix<Sum> d_queries;
  Sum* d_bias;              // (pairs, heads), or null
  Matrix<Sum> d_keys, d_values;  // zeros before; or null

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [query, head] = split_item(item, given.heads);
    const int64_t column = int64_t(head) * given.channels;
    const int channels = given.channels;
    HeadRow<Sum, Lanes> own, upstream, d_own;
    own.load(lanes, result[query] + column, channels, given.aligned);
    upstream.load(lanes, grad[query] + column, channels, given.aligned);
    const Sum mean = lanes.sum(own.times(lanes, upstream, channels)), log_sum = log_sums[item];
    own.load(lanes, given.queries[query] + column, channels, given.aligned);
    d_own.clear(lanes, channels);
    given.each_neighbor(lanes, query, head, [&](int64_t pair, const int* row, const auto* key, const auto* value) {
      POINTPROJ_UNROLL
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const Sum logit = given.scale * lanes.sum(own.times(lanes, key[i], channels));
        const Sum product = lanes.sum(upstream.times(lanes, value[i], channels));
        if (row[i] < 0) continue;
        const Sum weight = exp(logit + given.bias_of(pair + i, head) - log_sum);
        const Sum d_logit = weight * (product - mean);
        d_own.add(lanes, d_logit, key[i], channels);
        if (!lanes.has_item) continue;
        if (d_bias && lanes.lane() == 0) d_bias[(pair + i) * given.heads + head] = d_logit;
#if defined(__CUDACC__)
        if (!d_keys.data) continue;
        own.add_to(lanes, d_keys[row[i]] + column, given.scale * d_logit, channels, given.aligned);
        upstream.add_to(lanes, d_values[row[i]] + column, weight, channels, given.aligned);
#endif
      }
    });
    if (d_queries.data) d_own.store(lanes, d_queries[query] + column, channels, given.scale);
    if (lanes.lane() == 0) means[item] = mean;
  }
};

// Gradients of keys and values in deterministic mode: the pairs of each reference point one after another.
template <class Sum, int kLanes_>
struct AttendReferenceGradient {
  using Number = Sum;
  static constexpr int kLanes = kLanes_, kBlocks = 4;

  Attention<Sum> given;
  Matrix<const Sum> grad;
  const Sum *log_sums, *means;  // (Q, heads)
  const int *start, *pairs;     // of InvertRows
  Matrix<Sum> d_keys, d_values;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [row, head] = split_item(item, given.heads);
    const int64_t column = int64_t(head) * given.channels;
    const int channels = given.channels, end = start[row + 1];
    HeadRow<Sum, Lanes> key, value, d_key, d_value, own, upstream;
    key.load(lanes, given.keys[row] + column, channels, given.aligned);
    value.load(lanes, given.values[row] + column, channels, given.aligned);
    d_key.clear(lanes, channels);
    d_value.clear(lanes, channels);
    for (int i = start[row]; lanes.any(i < end); ++i) {
      const int pair = i < end ? pairs[i] : 0, query = i < end ? given.rows.query_of(pair) : 0;
      own.load(lanes, given.queries[query] + column, channels, given.aligned);
      upstream.load(lanes, grad[query] + column, channels, given.aligned);
      const Sum logit = given.scale * lanes.sum(own.times(lanes, key, channels));
      const Sum product = lanes.sum(upstream.times(lanes, value, channels));
      if (!(i < end)) continue;
      const int64_t at = int64_t(query) * given.heads + head;
      const Sum weight = exp(logit + given.bias_of(pair, head) - log_sums[at]);
      d_key.add(lanes, weight * (product - means[at]), own, channels);
      d_value.add(lanes, weight, upstream, channels);
    }
    d_key.store(lanes, d_keys[row] + column, channels, given.scale);
    d_value.store(lanes, d_values[row] + column, channels, Sum(1));
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
