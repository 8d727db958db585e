// The k nearest reference points: a thread or a warp for each query.
#pragma once

#include "top_k.h"
#include "traversal.h"

namespace pointproj::POINTPROJ_DEVICE {

// One radius for all queries, or one for each.
template <class Real>
struct Radii {
  const Real* each;  // (Q,), or null
  Real all, square;  // square: largest_square_within(all)

  POINTPROJ_FN Real of(int query) const { return each ? each[query] : all; }
  POINTPROJ_FN Real square_of(int query) const { return each ? largest_square_within(each[query]) : square; }
};

// A search that counts ends when it has found more than k, so that all are found if there are no more.
template <class Real, class List, bool counts>
struct NearestVisitor {
  List& list;
  int k;
  Real square;  // of the radius, at most kLargest
  int found = 0;

  POINTPROJ_FN Real limit() const { return counts && found <= k ? square : list.limit(); }
  POINTPROJ_FN int wanted() const { return k; }
  POINTPROJ_FN bool has_all_wanted() const { return counts ? found > k : limit() < square; }
  template <class Lanes>
  POINTPROJ_FN void process(Lanes& lanes, int, const Point<Real>& point, Real squared, bool exists) {
    const bool hit = exists && (Lanes::width == 1 || squared <= square);  // one thread shows those within limit() alone
    if constexpr (counts) found += lanes.bit_count(lanes.ballot(hit));
    list.insert(lanes, squared, point.row, hit);
  }
  template <class Lanes>
  POINTPROJ_FN void flush(Lanes&) const {}
  POINTPROJ_FN void restart(Real limit) {
    list.restart(k, lesser(limit, square));
    if (found <= k) found = 0;
  }
};

// Queries that a kernel leaves to a later one.
struct Postponed {
  int* queries;  // (Q,): ~query where all of its own cell has been visited; the results hold its neighbours there
  int* count;    // ()

  template <class Lanes>
  POINTPROJ_FN void add(Lanes& lanes, int query, Progress progress) const {
    if (lanes.lane() != 0 || !lanes.has_item) return;
    queries[lanes.fetch_add(count, 1)] = progress == Progress::kOwnCell ? ~query : query;
  }
  // Calls body(query, progress) for queries that it takes off the list, until none is left.
  template <class Lanes, class Body>
  POINTPROJ_FN void take(Lanes& lanes, Body body) const {
    while (true) {
      const int left = lanes.broadcast(lanes.lane() == 0 ? lanes.fetch_add(count, -1) : 0, 0);
      if (left <= 0) return;
      const int query = queries[left - 1];
      body(query < 0 ? ~query : query, query < 0 ? Progress::kOwnCell : Progress::kGivenUp);
    }
  }
};

// What a kNN search reads and writes; levels says what it may visit, `counts` whether it counts neighbours.
template <class Real_, Levels levels, bool counts = false>
struct Knn {
  using Real = Real_;
  static constexpr Levels kLevels = levels;
  const Real* query_points;      // (Q, 3)
  const Real* reference_points;  // (N, 3)
  Batch queries;
  CellList<Real> cells;
  bool itself;  // the queries are the searched points, and taken in their order: threads share what they read
  Radii<Real> radii;
  Nearest<Real> nearest;
  Heaps<Real> heaps;
  Postponed postponed;

  template <class List, class Lanes>
  POINTPROJ_FN void search(Lanes& lanes, int item) const {
    find<List>(lanes, itself ? cells.points.load(item).row : item, Progress::kGivenUp, postponed);
  }
  // The neighbours of a query. If the search does not get to its end, it is left to another.
  template <class List, class Lanes>
  POINTPROJ_FN void find(Lanes& lanes, int query, Progress before, const Postponed& left) const {
    Vec3<Real> q = load_position(query_points, query);
    const bool searches = is_finite(q);
    if (!searches) q = {{0, 0, 0}};
    const Real square = lesser(radii.square_of(query), kLargest<Real>);
    List list = heaps.template make<List>(query, nearest.k, square);
    NearestVisitor<Real, List, counts> visitor{list, nearest.k, square};
    if (before == Progress::kOwnCell) insert_found(lanes, query, q, visitor);
    Progress progress = visit_shells<levels>(cells, queries.cloud_of(query), q, searches, lanes, visitor, before);
    if (counts && progress == Progress::kOwnCell) progress = Progress::kGivenUp;
    if (progress != Progress::kGivenUp) nearest.write(lanes, list, query, searches, visitor.found);
    if (progress != Progress::kComplete) left.add(lanes, query, progress == Progress::kOwnCell ? progress : before);
  }
  // The neighbours that an earlier search has written.
  template <class Lanes, class Visitor>
  POINTPROJ_FN void insert_found(Lanes& lanes, int query, const Vec3<Real>& q, Visitor& visitor) const {
    for (int i = lanes.lane(); lanes.any(i < nearest.k); i += Lanes::width) {
      const int row = i < nearest.k ? nearest.row_of(query, i) : -1;
      Point<Real> point{q, row};
      if (row >= 0) point.position = load_position(reference_points, row);
      visitor.process(lanes, 0, point, squared_distance<Real>(q, point.position), row >= 0);
    }
  }
};

// The same search with other limits.
template <Levels levels, class Real, Levels other, bool counts>
Knn<Real, levels, counts> with_levels(const Knn<Real, other, counts>& search, const Postponed& postponed) {
  return {search.query_points, search.reference_points, search.queries, search.cells, search.itself, search.radii,
          search.nearest,      search.heaps,            postponed};
}

// ---- tasks of a kNN search, or of one within a radius (lists.h)

// A thread or a warp for each query. Many threads get few registers, so that a GPU holds more at once: self-kNN of 10^7
// uniform points 5.7 ms, 7.6 without this limit.
template <class Search, class List, int blocks = List::kAtOnce>
struct SearchEach {
  using Real = typename Search::Real;
  using Number = Real;
  static constexpr int kLanes = List::kLanes, kBlocks = sizeof(Real) == 4 ? blocks : 1;

  Search search;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int item) const {
    search.template search<List>(lanes, item);
  }
};

// ---- postponed queries

// The queries that were postponed, each by the thread or warp that is free. Those that exceed a thread's budget are
// postponed once more. Self-kNN of 10^7 points: surface 16.7 ms, 51 by warps only; clustered 22.8, 43.
template <class Search, class List>
struct SearchPostponed {
  using Real = typename Search::Real;
  using Number = float;
  static constexpr int kLanes = List::kLanes;
  // Registers are few so that a GPU holds more of them at once: most of the time they wait for memory.
  static constexpr bool kIsLong = sizeof(List) > sizeof(WarpBlocks<Real, 2>) && Search::kLevels == Levels::kOne;
  static constexpr int kBlocks = sizeof(Real) == 8 ? 1 : kLanes == 1 ? 4 : kIsLong ? 2 : 3;

  Search search;
  Postponed again;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int item) const {
    if (!lanes.any(item < *search.postponed.count)) return;  // others take queries meanwhile
    search.postponed.take(lanes, [&](int query, Progress before) {
      if (again.queries) lanes.limit_budget();
      search.template find<List>(lanes, query, before, again);
    });
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
