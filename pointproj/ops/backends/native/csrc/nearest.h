// The k nearest reference points, exactly, ties by the lower row.
#pragma once

#include "rings.h"

namespace pointproj {

constexpr int kLongestList = 32;  // more neighbours than that wait in a heap in memory
constexpr int kShortestList = 8;   // so few are looked for by single threads of a GPU, also in crowds

template <class Real>
POINTPROJ_FN bool is_before(Real squared, int row, Real other, int other_row) {
  return squared < other || (squared == other && row < other_row);
}

// One thread's k best in registers, in ascending order. Places that k leaves over lie in front, and stay.
template <class Real, int kLength>
struct SortedList {
  Real squared[kLength];
  int rows[kLength];

  POINTPROJ_FN explicit SortedList(int k) {
    POINTPROJ_UNROLL
    for (int i = 0; i < kLength; ++i) {
      squared[i] = i < kLength - k ? -kInfinity<Real> : kInfinity<Real>;
      rows[i] = kNoRow;
    }
  }
  POINTPROJ_FN Real limit() const { return squared[kLength - 1]; }
  // Those behind the newcomer move up. No comparison waits for another: all are with the old list.
  POINTPROJ_FN void insert(Real newcomer, int row) {
    bool moves = is_before(newcomer, row, squared[kLength - 1], rows[kLength - 1]);
    if (!moves) return;
    POINTPROJ_UNROLL
    for (int i = kLength - 1; i > 0; --i) {
      const bool next_moves = is_before(newcomer, row, squared[i - 1], rows[i - 1]);
      if (moves) {
        squared[i] = next_moves ? squared[i - 1] : newcomer;
        rows[i] = next_moves ? rows[i - 1] : row;
      }
      moves = next_moves;
    }
    if (moves) {
      squared[0] = newcomer;
      rows[0] = row;
    }
  }
  POINTPROJ_FN void write(int k, int* to) {
    POINTPROJ_UNROLL
    for (int i = 0; i < kLength; ++i) {
      if (i >= kLength - k) to[i - (kLength - k)] = rows[i] == kNoRow ? -1 : rows[i];
    }
  }
};

// Any number of neighbours: a heap in memory, in the output rows, its farthest neighbour on top.
template <class Real>
struct Heap {
  Real* squared;
  int* rows;
  int size;

  POINTPROJ_FN Heap(Real* squared, int* rows, int k) : squared(squared), rows(rows), size(k) {
    for (int i = 0; i < k; ++i) {
      squared[i] = kInfinity<Real>;
      rows[i] = kNoRow;
    }
  }
  POINTPROJ_FN Real limit() const { return squared[0]; }
  POINTPROJ_FN void insert(Real newcomer, int row) {
    if (is_before(newcomer, row, squared[0], rows[0])) sink(size, newcomer, row);
  }
  // Put a neighbour on top of the first `count` places and restore the heap.
  POINTPROJ_FN void sink(int count, Real newcomer, int row) {
    int at = 0, child = 1;
    while (child < count) {
      if (child + 1 < count && is_before(squared[child], rows[child], squared[child + 1], rows[child + 1])) {
        ++child;
      }
      if (!is_before(newcomer, row, squared[child], rows[child])) break;
      squared[at] = squared[child];
      rows[at] = rows[child];
      at = child;
      child = 2 * at + 1;
    }
    squared[at] = newcomer;
    rows[at] = row;
  }
  // Heap sort: take the farthest off the top, fill the rows from behind.
  POINTPROJ_FN void write(int, int*) {
    for (int last = size - 1; last > 0; --last) {
      const Real farthest = squared[0];
      const int row = rows[0];
      sink(last, squared[last], rows[last]);
      squared[last] = farthest;
      rows[last] = row;
    }
    for (int i = 0; i < size; ++i) {
      if (rows[i] == kNoRow) rows[i] = -1;
    }
  }
};

// Meets candidates and keeps the best: List is one of those above, or one that the lanes of a warp share.
template <class Real, class List>
struct NearestVisitor {
  const Vec3<Real>& q;
  List& list;
  int k;

  POINTPROJ_FN Real limit() const { return list.limit(); }
  POINTPROJ_FN int wanted() const { return lesser(k, kLongestList); }
  template <class Lanes>
  POINTPROJ_FN void visit(Lanes& lanes, const Points<Real>& points, int begin, int count) {
    lanes.meet(
        points, q, begin, count, [&]() { return list.limit(); },
        [&](int, const Point<Real>& point, Real squared, bool exists) {
          lanes.insert(list, squared, point.row, exists && squared < kInfinity<Real>);
        },
        []() {});
  }
};

// What a search reads and writes.
template <class Real>
struct Search {
  const Real* query_points;  // (Q, 3)
  Batch queries;
  Cells<Real> cells;
  bool itself;  // the queries are the searched points: in the order of the cells threads share what they read
  int k;
  int* rows;      // (Q, k)
  Real* heap;     // (Q, k) if k > kLongestList
  int* left;        // (Q,) queries that have met a crowd, for later kernels
  int* left_count;  // ()

  POINTPROJ_FN int query_at(int item) const { return itself ? cells.points.load(item).row : item; }

  template <class Lanes>
  POINTPROJ_FN void leave(Lanes& lanes, int query) const {
    if (lanes.lane() == 0 && lanes.has_item) left[lanes.fetch_add(left_count, 1)] = query;
  }

  template <Level level, class Lanes, class List>
  POINTPROJ_FN bool find(Lanes& lanes, List& list, int query) const {
    Vec3<Real> q = load_row(query_points, query);
    const bool searches = is_finite(q);
    if (!searches) q = {{0, 0, 0}};
    NearestVisitor<Real, List> visitor{q, list, k};
    const bool whole = search_rings<level>(cells, queries.cloud_of(query), q, searches, lanes, visitor);
    if (lanes.anywhere(whole)) list.write(k, rows + static_cast<int64_t>(query) * k);
    return whole;
  }
};

// One thread a query, the list in registers. Of many queries a GPU should hold many at once, whatever that costs each.
template <class Real, int kLength, Level level, bool many>
struct SearchAlone {
  static constexpr int kBlocks = sizeof(Real) == 4 && many ? 8 : 1;

  Search<Real> search;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int item) const {
    const int query = search.query_at(item);
    SortedList<Real, kLength> list(search.k);
    if (!search.template find<level>(lanes, list, query)) search.leave(lanes, query);
  }
};

// One thread a query, the list in memory.
template <class Real>
struct SearchInMemory {
  static constexpr int kBlocks = 1;

  Search<Real> search;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int item) const {
    const int query = search.query_at(item);
    const int64_t first = static_cast<int64_t>(query) * search.k;
    Heap<Real> heap(search.heap + first, search.rows + first, search.k);
    search.template find<Level::kBoth>(lanes, heap, query);
  }
};

// A warp a query.
template <class Real>
struct SearchTogether {
  static constexpr int kLanes = 32;
  using Number = Real;

  Search<Real> search;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int item) const {
    const int query = search.query_at(item);
    typename Lanes::template List<Real> list(search.k);
    if (!search.template find<Level::kOne>(lanes, list, query)) search.leave(lanes, query);
  }
};

// A thread for each of the queries that are left; there are `threads` of them in all. What takes them too long is
// left once more.
template <class Real>
struct SearchLeftAlone {
  static constexpr int kBlocks = 1;

  Search<Real> search, again;
  int threads;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int thread) const {
    for (int item = thread; item < *search.left_count; item += threads) {
      SortedList<Real, kShortestList> list(search.k);
      lanes.begin_patience();
      if (!search.template find<Level::kBoth>(lanes, list, search.left[item])) again.leave(lanes, search.left[item]);
    }
  }
};

// A warp for each of the queries that are left; there are `warps` of them in all.
template <class Real>
struct SearchLeft {
  static constexpr int kLanes = 32;
  using Number = float;

  Search<Real> search;
  int warps;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int warp) const {
    for (int item = warp; item < *search.left_count; item += warps) {
      typename Lanes::template List<Real> list(search.k);
      search.template find<Level::kBoth>(lanes, list, search.left[item]);
    }
  }
};

}  // namespace pointproj
