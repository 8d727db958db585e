// Weights of the pairs of neighbour lists, and sums over the pairs, one given weight each;
// pointproj/ops/backends/torch/weighted_sums.py has the formulas. All of the sums' derivatives are sums of these two kinds.
#pragma once

#include "gradients.h"
#include "listed_rows.h"

namespace pointproj::POINTPROJ_DEVICE {

// Which query has each pair of CSR lists.
struct QueriesOfPairs {
  using Number = float;
  static constexpr int kLanes = 32;

  ListedRows lists;
  int* queries;  // (pairs,); what is in slots behind the last list is not read

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int query) const {
    const int64_t end = lists.first_pair(query + 1);
    for (int64_t pair = lists.first_pair(query) + lanes.lane(); pair < end; pair += Lanes::width) queries[pair] = query;
  }
};

// Weights of a kernel, 0 where there is no neighbour; those of a mean have the sum 1 in each list, or 0. What is behind
// the last list is not written.
template <class Sum>
struct KernelWeights {
  using Number = Sum;
  static constexpr int kLanes = kSumLanes;

  ListedRows lists;
  AnyWeighting<Sum> weighting;
  const Sum *distances, *own;  // (pairs,); weights of the reference points (N,), or null
  Sum* weights;                // (pairs,)

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int query) const {
    const auto kernel = weighting.at_sigma();
    const int64_t begin = lists.first_pair(query) + lanes.lane();
    const int64_t end = lanes.has_item ? lists.first_pair(query + 1) : begin;  // a list is written by one group only
    Sum nearest = kInfinity<Sum>, total = 0;
    for (int64_t pair = begin; kernel.divides() && pair < end; pair += Lanes::width) {
      if (own_weight(lists(pair)) != Sum(0)) nearest = lesser(nearest, distances[pair]);
    }
    nearest = lanes.minimum(nearest);
    const Sum base = kernel.base(nearest < kInfinity<Sum> ? nearest : Sum(0));
    for (int64_t pair = begin; pair < end; pair += Lanes::width) {
      const int row = lists(pair);  // where that is none, the distance may be anything
      const Sum weight = row >= 0 ? own_weight(row) * kernel.weight(distances[pair], base) : Sum(0);
      weights[pair] = weight;
      total += weight;
    }
    total = lanes.sum(total);
    if (!kernel.divides()) return;
    const Sum factor = total != Sum(0) ? Sum(1) / total : Sum(0);
    for (int64_t pair = begin; pair < end; pair += Lanes::width) weights[pair] *= factor;
  }
  POINTPROJ_FN Sum own_weight(int row) const { return row < 0 ? Sum(0) : own ? own[row] : Sum(1); }
};

// Rows of one side of the pairs, and their weights; null where there are none.
template <class Sum>
struct WeightedRows {
  Matrix<const Sum> values;
  const Sum* weights;  // (pairs,)
};

// Calls add(neighbors, size) for the pairs from `begin` to `end`, some at a time; pair_at(i) is the i-th, with a negative
// number if it has no neighbour.
template <class Sum, class Lanes, class PairAt, class Add>
POINTPROJ_FN void each_pair(Lanes& lanes, int64_t begin, int64_t end, PairAt pair_at, Add add) {
  Queue<Sum, Lanes> queue(lanes);
  for (int64_t first = begin; lanes.any(first < end); first += Lanes::width) {
    const int64_t i = first + lanes.lane();
    Neighbor<Sum> pair{Sum(0), -1};
    if (i < end) pair = pair_at(i);
    queue.push(lanes, pair.at >= 0, pair.at, pair.value);
    if (lanes.any(queue.is_full())) queue.flush(lanes, add);
  }
  queue.flush(lanes, add);
}

// Sums of the other side's rows: over the pairs of each query, or of each reference point.
template <class Sum, bool of_queries>
struct PairSums {
  using Number = Sum;
  static constexpr int kLanes = kSumLanes;

  ListedRows lists;
  const int *start, *pairs;      // of InvertRows, for reference points
  const int* queries;            // QueriesOfPairs, or null for padded lists
  WeightedRows<Sum> terms[2];    // added up; both have rows of the same length
  Matrix<Sum> sums;
  int chunks;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [at, chunk] = split_item(item, chunks);
    const int64_t begin = of_queries ? lists.first_pair(at) : start[at];
    const int64_t end = of_queries ? lists.first_pair(at + 1) : start[at + 1];
    typename Lanes::template RowSum<Sum, 1> rows(terms[0].values, chunk, sums, at);
    for (const WeightedRows<Sum>& term : terms) {
      if (!term.weights) continue;
      rows.read(term.values);
      const auto pair_at = [&](int64_t i) -> Neighbor<Sum> {
        const int64_t pair = of_queries ? i : pairs[i];
        const int other = other_of(pair);
        return {other >= 0 ? term.weights[pair] : Sum(0), other};
      };
      each_pair<Sum>(lanes, begin, end, pair_at, [&](const Neighbor<Sum>* some, int size) { rows.add(some, size); });
    }
    rows.finish(Sum(1));
  }
  POINTPROJ_FN int other_of(int64_t pair) const {
    if (of_queries) return lists(pair);
    return queries ? queries[pair] : lists.query_of(pair);
  }
};

// The sums of reference points by atomics: rows of the queries times the weights of their pairs.
template <class Sum>
struct AddPairs {
  using Number = Sum;
  static constexpr int kLanes = kSumLanes;

  ListedRows lists;
  WeightedRows<Sum> term;
  Matrix<Sum> sums;  // zeros before

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int query) const {
    AtomicRows<Sum, Lanes> rows{lanes, term.values[query], sums};
    const auto pair_at = [&](int64_t pair) -> Neighbor<Sum> {
      const int row = lists(pair);
      return {row >= 0 ? term.weights[pair] : Sum(0), row};
    };
    each_pair<Sum>(lanes, lists.first_pair(query), lists.first_pair(query + 1), pair_at,
                   [&](const Neighbor<Sum>* some, int size) { rows.add(some, size); });
  }
};

// Products of each pair's two rows.
template <class Sum>
struct PairProducts {
  using Number = Sum;
  static constexpr int kLanes = kSumLanes;

  ListedRows lists;
  Matrix<const Sum> own, others;  // of queries, of reference points
  Sum* products;                  // (pairs,), zeros before

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int query) const {
    const int64_t begin = lists.first_pair(query), end = lists.first_pair(query + 1);
    const typename Lanes::template RowProducts<Sum, 1> with(own[query], others, own.columns);
    int64_t done = begin;
    // Where there is no neighbour, any row.
    const auto pair_at = [&](int64_t pair) -> Neighbor<Sum> { return {Sum(0), greater(lists(pair), 0)}; };
    each_pair<Sum>(lanes, begin, end, pair_at, [&](const Neighbor<Sum>* some, int size) {
      for (int first = 0; lanes.any(first < size); first += Lanes::width) {
        const Sum product = with.with_neighbor(some, first, size);
        const int64_t pair = done + first + lanes.lane();
        if (first + lanes.lane() < size && lists(pair) >= 0) products[pair] = product;
      }
      done += size;
    });
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
