// The k nearest reference points: a thread or a warp a query.
#pragma once

#include "top_k.h"
#include "traversal.h"

namespace pointproj {

template <class Real, class List>
struct NearestVisitor {
  List& list;
  int k;

  POINTPROJ_FN Real limit() const { return list.limit(); }
  POINTPROJ_FN int wanted() const { return lesser(k, kLongestList); }
  template <class Lanes>
  POINTPROJ_FN void meet(Lanes& lanes, int, const Point<Real>& point, Real squared, bool exists) {
    list.insert(lanes, squared, point.row, exists && squared < kInfinity<Real>);
  }
  template <class Lanes>
  POINTPROJ_FN void pause(Lanes&) const {}
};

// Queries that a kernel has given up, for a later one.
struct Postponed {
  int* queries;  // (Q,)
  int* count;    // ()

  template <class Lanes>
  POINTPROJ_FN void add(Lanes& lanes, int query) const {
    if (lanes.lane() == 0 && lanes.has_item) queries[lanes.fetch_add(count, 1)] = query;
  }
};

// What a search reads and writes.
template <class Real>
struct Search {
  const Real* query_points;  // (Q, 3)
  Batch queries;
  CellList<Real> cells;
  bool itself;  // the queries are the searched points: in the order of the cells threads share what they read
  Nearest<Real> nearest;
  Heaps<Real> heaps;
  Postponed postponed;

  POINTPROJ_FN int query_at(int item) const { return itself ? cells.points.load(item).row : item; }

  // False if it gave up.
  template <Levels levels, class Lanes, class List>
  POINTPROJ_FN bool find(Lanes& lanes, List&& list, int query) const {
    Vec3<Real> q = load_position(query_points, query);
    const bool searches = is_finite(q);
    if (!searches) q = {{0, 0, 0}};
    NearestVisitor<Real, std::remove_reference_t<List>> visitor{list, nearest.k};
    const bool complete = visit_shells<levels>(cells, queries.cloud_of(query), q, searches, lanes, visitor);
    if (lanes.any(complete)) nearest.write(lanes, list, query, searches);
    return complete;
  }
};

// One thread a query, the list in registers. Of many queries a GPU should hold many at once, whatever that costs each:
// self-kNN of 10^7 uniform points 5.7 ms, 7.6 with as many registers as a thread likes.
template <class Real, int kLength, Levels levels, bool many = false>
struct SearchByThread {
  static constexpr int kLanes = 1, kBlocks = sizeof(Real) == 4 && many ? 8 : 1;

  Search<Real> search;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int item) const {
    const int query = search.query_at(item);
    const bool found = search.template find<levels>(lanes, SortedList<Real, kLength>(search.nearest.k), query);
    if (!found) search.postponed.add(lanes, query);
  }
};

// One thread a query, the list in memory.
template <class Real>
struct SearchInMemory {
  static constexpr int kLanes = 1, kBlocks = 1;

  Search<Real> search;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int item) const {
    const int query = search.query_at(item), k = search.nearest.k;
    search.template find<Levels::kBoth>(lanes, search.heaps.of(query, k), query);
  }
};

// A warp a query, where there are few. Long lists take their candidates many at a time. Serves self-kNN of 10^4 points.
template <class Real, class List>
struct SearchByWarp {
  using Number = float;
  static constexpr int kLanes = 32;

  Search<Real> search;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int item) const {
    const int query = search.query_at(item);
    const bool found = search.template find<Levels::kOne>(lanes, List(search.nearest.k), query);
    if (!found) search.postponed.add(lanes, query);
  }
};

// A thread for each of the queries that were postponed; there are `threads` of them in all. What takes them too long
// is postponed once more. Self-kNN of 10^7 points, against warps alone: surface 16.7 ms, 51; clustered 22.8, 43.
template <class Real>
struct SearchPostponedByThread {
  static constexpr int kLanes = 1, kBlocks = 1;

  Search<Real> search;
  Postponed again;
  int threads;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int thread) const {
    for (int item = thread; item < *search.postponed.count; item += threads) {
      const int query = search.postponed.queries[item];
      SortedList<Real, kShortestList> list(search.nearest.k);
      lanes.limit_budget();
      if (!search.template find<Levels::kBoth>(lanes, list, query)) again.add(lanes, query);
    }
  }
};

// A warp for each of the queries that were postponed; there are `warps` of them in all.
template <class Real>
struct SearchPostponedByWarp {
  using Number = float;
  static constexpr int kLanes = 32;

  Search<Real> search;
  int warps;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int warp) const {
    for (int item = warp; item < *search.postponed.count; item += warps) {
      WarpList<Real> list(search.nearest.k);
      search.template find<Levels::kBoth>(lanes, list, search.postponed.queries[item]);
    }
  }
};

}  // namespace pointproj
