// The k nearest reference points: a thread or a warp for each query.
#pragma once

#include "top_k.h"
#include "traversal.h"

namespace pointproj::POINTPROJ_DEVICE {

template <class Real, class List>
struct NearestVisitor {
  List& list;
  int k;

  POINTPROJ_FN Real limit() const { return list.limit(); }
  POINTPROJ_FN int wanted() const { return lesser(k, kLongestList); }
  template <class Lanes>
  POINTPROJ_FN void process(Lanes& lanes, int, const Point<Real>& point, Real squared, bool exists) {
    list.insert(lanes, squared, point.row, exists && squared < kInfinity<Real>);
  }
  template <class Lanes>
  POINTPROJ_FN void flush(Lanes&) const {}
};

// Queries that a kernel leaves to a later one.
struct Postponed {
  int* queries;  // (Q,)
  int* count;    // ()

  template <class Lanes>
  POINTPROJ_FN void add(Lanes& lanes, int query) const {
    if (lanes.lane() == 0 && lanes.has_item) queries[lanes.fetch_add(count, 1)] = query;
  }
};

// What a kNN search reads and writes; levels says what it may visit.
template <class Real_, Levels levels>
struct Knn {
  using Real = Real_;
  const Real* query_points;  // (Q, 3)
  Batch queries;
  CellList<Real> cells;
  bool itself;  // the queries are the searched points, and taken in their order: threads share what they read
  Nearest<Real> nearest;
  Heaps<Real> heaps;
  Postponed postponed;

  POINTPROJ_FN int query_at(int item) const { return itself ? cells.points.load(item).row : item; }
  template <class Lanes, class List>
  POINTPROJ_FN void search_into(Lanes& lanes, int item, List&& list) const {
    const int query = query_at(item);
    if (!find(lanes, list, query)) postponed.add(lanes, query);
  }
  // False if the search was given up.
  template <class Lanes, class List>
  POINTPROJ_FN bool find(Lanes& lanes, List& list, int query) const {
    Vec3<Real> q = load_position(query_points, query);
    const bool searches = is_finite(q);
    if (!searches) q = {{0, 0, 0}};
    NearestVisitor<Real, List> visitor{list, nearest.k};
    const bool complete = visit_shells<levels>(cells, queries.cloud_of(query), q, searches, lanes, visitor);
    if (lanes.any(complete)) nearest.write(lanes, list, query, searches);
    return complete;
  }
};

// ---- tasks of a kNN search, or of one within a radius (lists.h)

// A thread or a warp for each query. If there are many, each gets few registers, so that a GPU holds more at once:
// self-kNN of 10^7 uniform points 5.7 ms, 7.6 without this limit.
template <class Search, class List, bool many = false>
struct SearchEach {
  using Real = typename Search::Real;
  using Number = float;
  static constexpr int kLanes = List::kLanes, kBlocks = sizeof(Real) == 4 && many ? 8 : 1;

  Search search;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int item) const {
    if constexpr (std::is_same_v<List, Heap<Real>>) {
      search.search_into(lanes, item, search.heaps.of(search.query_at(item), search.nearest.k));
    } else {
      search.search_into(lanes, item, List(search.nearest.k));
    }
  }
};

// ---- postponed queries

// The queries that were postponed, by `count` threads or warps. Those that exceed a thread's budget are postponed once
// more. Self-kNN of 10^7 points: surface 16.7 ms, 51 by warps only; clustered 22.8, 43.
template <class Real, class List>
struct SearchPostponed {
  using Number = float;
  static constexpr int kLanes = List::kLanes, kBlocks = 1;

  Knn<Real, Levels::kBoth> search;
  Postponed again;
  int count;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int first) const {
    for (int item = first; item < *search.postponed.count; item += count) {
      const int query = search.postponed.queries[item];
      List list(search.nearest.k);
      lanes.limit_budget();
      if (!search.find(lanes, list, query)) again.add(lanes, query);
    }
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
