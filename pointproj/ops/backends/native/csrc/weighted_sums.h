// Sums over the pairs of neighbour lists, one given weight a pair; pointproj/ops/backends/torch/weighted_sums.py has the
// formulas. All of their derivatives are sums of these two kinds.
#pragma once

#include "listed_rows.h"
#include "queue.h"
#include "sums.h"

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

// Rows of one side of the pairs, and their weights; null where there are none.
template <class Sum>
struct WeightedRows {
  Matrix<const Sum> values;
  const Sum* weights;  // (pairs,)
};

// Sums of the other side's rows: over the pairs of each query, or of each reference point.
template <class Sum, bool of_queries>
struct PairSums {
  using Number = Sum;
  static constexpr int kLanes = kSumLanes;

  ListedRows lists;
  const int *start, *pairs;      // of InvertRows, for reference points
  const int* queries;            // QueriesOfPairs, or null for padded lists
  WeightedRows<Sum> terms[2];    // added up
  Matrix<Sum> sums;
  int chunks;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int64_t item) const {
    const auto [at, chunk] = split_item(item, chunks);
    const int64_t begin = of_queries ? lists.first_pair(at) : start[at];
    const int64_t end = of_queries ? lists.first_pair(at + 1) : start[at + 1];
    typename Lanes::template RowSum<Sum, 1> rows(terms[0].values, chunk, sums, at);
    const auto add = [&](const Neighbor<Sum>* some, int size) { rows.add(some, size); };
    Queue<Sum, Lanes> queue(lanes);
    for (const WeightedRows<Sum>& term : terms) {
      if (!term.weights) continue;
      rows.read(term.values);
      for (int64_t first = begin; lanes.any(first < end); first += Lanes::width) {
        const int64_t i = first + lanes.lane();
        const int64_t pair = i >= end || of_queries ? i : pairs[i];
        const int other = i < end ? other_of(pair) : -1;
        queue.push(lanes, other >= 0, other, other >= 0 ? term.weights[pair] : Sum(0));
        if (lanes.any(queue.is_full())) queue.flush(lanes, add);
      }
      queue.flush(lanes, add);
    }
    rows.finish(Sum(1));
  }
  POINTPROJ_FN int other_of(int64_t pair) const {
    if (of_queries) return lists(pair);
    return queries ? queries[pair] : lists.query_of(pair);
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
    Queue<Sum, Lanes> queue(lanes);
    int64_t done = begin;
    const auto add = [&](const Neighbor<Sum>* some, int size) {
      for (int first = 0; lanes.any(first < size); first += Lanes::width) {
        const Sum product = with.with_neighbor(some, first, size);
        const int64_t pair = done + first + lanes.lane();
        if (first + lanes.lane() < size && lists(pair) >= 0) products[pair] = product;
      }
      done += size;
    };
    for (int64_t first = begin; lanes.any(first < end); first += Lanes::width) {
      const int64_t pair = first + lanes.lane();
      const bool exists = pair < end;
      queue.push(lanes, exists, exists ? greater(lists(pair), 0) : 0, Sum(0));  // where there is none, any row
      if (lanes.any(queue.is_full())) queue.flush(lanes, add);
    }
    queue.flush(lanes, add);
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
