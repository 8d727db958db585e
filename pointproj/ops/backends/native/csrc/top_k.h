// Lists of the k nearest candidates of a search, exact, ties by the lower row. A list has
//   insert(lanes, squared distance, row, exists)   one candidate in each lane, within the first limit
//   limit()                                        the k-th squared distance so far; with fewer, the first limit
//   restart(k, limit)                              forgets all candidates
//   write(lanes, k, store)                         store(place, squared distance, row) for k places, kNoRow for none
//   kLanes, kAtOnce                                lanes of a query; blocks of threads that a GPU's processor shall hold
#pragma once

#include "queue.h"
#include "row_sort.h"

namespace pointproj::POINTPROJ_DEVICE {

constexpr int kShortestList = 8;  // for these, single threads of a GPU search also dense cells
constexpr int kLongestThreadList = 32;  // in the registers of a thread; longer ones in those of a warp
constexpr int kLongestList = kOnGpu ? 256 : kLongestThreadList;  // longer ones are heaps in memory
// With no more queries, a GPU takes a warp for each, since threads would leave it idle: for short and for longer lists.
constexpr int kFewQueries = 1 << 14, kManyQueries = 1 << 17;

// body(the length of a thread's list for k neighbours, as a constant)
template <class Body>
void with_length(int64_t k, Body body) {
  if (k <= kShortestList) return body(std::integral_constant<int, kShortestList>());
  if (k <= 16) return body(std::integral_constant<int, 16>());
  body(std::integral_constant<int, kLongestThreadList>());
}

// A GPU compares bits, two instructions instead of three: squares are not negative, and a negative number that stands
// for a limit or for an empty place is compared with squares alone.
template <class Real>
POINTPROJ_FN bool is_before(Real squared, int row, Real other, int other_row) {
  if constexpr (kOnGpu && sizeof(Real) == 4) {
    const auto bits = [](Real x, int at) { return int64_t(__float_as_int(x)) << 32 | unsigned(at); };
    return bits(squared, row) < bits(other, other_row);
  } else {
    return squared < other || (squared == other && row < other_row);
  }
}

POINTPROJ_FN int row_or_none(int row) { return row == kNoRow ? -1 : row; }

// The results of a search: rows as int or int64_t, and distances if they are wanted.
template <class Real>
struct Nearest {
  int k;
  int* rows;           // (Q, k), or null
  int64_t* long_rows;  // (Q, k), or null
  Real* distances;     // (Q, k), or null
  int64_t* counts;     // (Q,), or null: all that were searched for, or k + 1 if there are more

  POINTPROJ_FN int row_of(int query, int place) const {
    const int64_t at = static_cast<int64_t>(query) * k + place;
    return rows ? rows[at] : static_cast<int>(long_rows[at]);
  }
  // A query that is not finite has no neighbours, at a distance that is no number.
  template <class Lanes, class List>
  POINTPROJ_FN void write(Lanes& lanes, List& list, int query, bool finite, int found) const {
    if (counts && lanes.lane() == 0) counts[query] = lesser(found, k < kNoRow ? k + 1 : k);
    const int64_t first = static_cast<int64_t>(query) * k;
    list.write(lanes, k, [&](int place, Real squared, int row) {
      const int64_t at = first + place;
      if (row == kNoRow) squared = kInfinity<Real>;
      if (rows) rows[at] = row_or_none(row);
      if (long_rows) long_rows[at] = row_or_none(row);
      if (distances) distances[at] = finite ? Real(sqrt(squared)) : kNan<Real>;
    });
  }
};

// The k nearest in the registers of a thread, in ascending order; places that k does not need are in front.
template <class Real, int kLength>
struct SortedList {
  static constexpr int kLanes = 1, kAtOnce = 1;
  Real squared[kLength];
  int rows[kLength];

  POINTPROJ_FN SortedList(int k, Real limit) { restart(k, limit); }
  POINTPROJ_FN void restart(int k, Real limit) {
    POINTPROJ_UNROLL
    for (int i = 0; i < kLength; ++i) {
      squared[i] = i < kLength - k ? -kInfinity<Real> : limit;
      rows[i] = kNoRow;
    }
  }
  POINTPROJ_FN Real limit() const { return squared[kLength - 1]; }
  // Those behind the candidate move up. All comparisons are with the old list, so none depends on another.
  template <class Lanes>
  POINTPROJ_FN void insert(Lanes&, Real candidate, int row, bool exists) {
    bool moves = exists && is_before(candidate, row, squared[kLength - 1], rows[kLength - 1]);
    if (!moves) return;
    POINTPROJ_UNROLL
    for (int i = kLength - 1; i > 0; --i) {
      const bool next_moves = is_before(candidate, row, squared[i - 1], rows[i - 1]);
      if (moves) {
        squared[i] = next_moves ? squared[i - 1] : candidate;
        rows[i] = next_moves ? rows[i - 1] : row;
      }
      moves = next_moves;
#if !defined(__CUDACC__)
      if (!moves) return;  // one thread can stop where the candidate stays
#endif
    }
    if (moves) {
      squared[0] = candidate;
      rows[0] = row;
    }
  }
  template <class Lanes, class Store>
  POINTPROJ_FN void write(Lanes&, int k, Store store) const {
    POINTPROJ_UNROLL
    for (int i = 0; i < kLength; ++i) {
      if (i >= kLength - k) store(i - (kLength - k), squared[i], rows[i]);
    }
  }
};

// Any number of neighbours: a heap in memory, the farthest on top. It may be made in the results.
template <class Real>
struct Heap {
  static constexpr int kLanes = 1, kAtOnce = 1;
  Real* squared;
  int* rows;
  int most, size;
  Real first_limit;

  POINTPROJ_FN Heap(Real* squared, int* rows, int k, Real limit) : squared(squared), rows(rows) { restart(k, limit); }
  POINTPROJ_FN void restart(int k, Real limit) {
    most = k;
    size = 0;
    first_limit = limit;
  }
  POINTPROJ_FN Real limit() const { return size < most ? first_limit : squared[0]; }
  template <class Lanes>
  POINTPROJ_FN void insert(Lanes&, Real candidate, int row, bool exists) {
    if (!exists) return;
    if (size < most) {
      rise(size++, candidate, row);
    } else if (is_before(candidate, row, squared[0], rows[0])) {
      sink(size, candidate, row);
    }
  }
  // Put a neighbour in a place at the bottom and restore the heap.
  POINTPROJ_FN void rise(int at, Real candidate, int row) {
    while (at > 0) {
      const int parent = (at - 1) / 2;
      if (!is_before(squared[parent], rows[parent], candidate, row)) break;
      squared[at] = squared[parent];
      rows[at] = rows[parent];
      at = parent;
    }
    squared[at] = candidate;
    rows[at] = row;
  }
  // Put a neighbour on top of the first `count` places and restore the heap.
  POINTPROJ_FN void sink(int count, Real candidate, int row) {
    int at = 0, child = 1;
    while (child < count) {
      if (child + 1 < count && is_before(squared[child], rows[child], squared[child + 1], rows[child + 1])) {
        ++child;
      }
      if (!is_before(candidate, row, squared[child], rows[child])) break;
      squared[at] = squared[child];
      rows[at] = rows[child];
      at = child;
      child = 2 * at + 1;
    }
    squared[at] = candidate;
    rows[at] = row;
  }
  // Heap sort: take the farthest off the top, fill the rows from behind.
  template <class Lanes, class Store>
  POINTPROJ_FN void write(Lanes&, int, Store store) {
    for (int last = size - 1; last > 0; --last) {
      const Real farthest = squared[0];
      const int row = rows[0];
      sink(last, squared[last], rows[last]);
      squared[last] = farthest;
      rows[last] = row;
    }
    for (int i = 0; i < most; ++i) store(i, i < size ? squared[i] : kInfinity<Real>, i < size ? rows[i] : kNoRow);
  }
};

// The heaps of all queries, where k is larger than kLongestList.
template <class Real>
struct Heaps {
  Real* squared;  // (Q, k)
  int* rows;      // (Q, k)

  // The list of a query, a heap or any other.
  template <class List>
  POINTPROJ_FN List make(int query, int k, Real limit) const {
    if constexpr (std::is_same_v<List, Heap<Real>>) {
      const int64_t first = static_cast<int64_t>(query) * k;
      return Heap<Real>(squared + first, rows + first, k, limit);
    } else {
      return List(k, limit);
    }
  }
};

// The k nearest in the registers of a warp: the i-th in lane i % 32 of block i / 32.
// Few candidates are put in their places one by one; many are sorted, and merged with one block after the other.
template <class Real, int kBlocks>
struct WarpBlocks {
  static constexpr int kLanes = 32, kFew = 8, kAtOnce = kBlocks > 4 ? 2 : 4;
  Real squared[kBlocks];
  int rows[kBlocks];
  Real worst;
  int k;
  bool is_empty;

  POINTPROJ_FN WarpBlocks(int k, Real limit) { restart(k, limit); }
  POINTPROJ_FN void restart(int count, Real limit) {
    worst = limit;
    k = count;
    is_empty = true;
    POINTPROJ_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      squared[block] = kInfinity<Real>;
      rows[block] = kNoRow;
    }
  }
  POINTPROJ_FN Real limit() const { return worst; }
  template <class Lanes, class Store>
  POINTPROJ_FN void write(Lanes& lanes, int, Store store) const {
    POINTPROJ_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      const int i = block * Lanes::width + lanes.lane();
      if (i < k) store(i, squared[block], rows[block]);
    }
  }
  template <class Lanes>
  POINTPROJ_FN void insert(Lanes& lanes, Real candidate, int row, bool exists) {
    static_assert(Lanes::width == 32);
    const bool hit = exists && candidate <= worst;
    unsigned hits = lanes.ballot(hit);
    if (hits == 0) return;
    if (lanes.bit_count(hits) <= kFew) {
      for (; hits != 0; hits &= hits - 1) {
        const int source = lanes.lowest_bit(hits);
        put(lanes, lanes.broadcast(candidate, source), lanes.broadcast(row, source));
      }
    } else {
      if (!hit) {
        candidate = kInfinity<Real>;
        row = kNoRow;
      }
      sort_in_lanes(Lanes::width, [&](int mask) { exchange(lanes, mask, candidate, row); });
      if (is_empty) {
        squared[0] = candidate;
        rows[0] = row;
      } else {
        merge<kBlocks - 1>(lanes, candidate, row);
      }
    }
    is_empty = false;
    POINTPROJ_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      const Real farthest = lanes.broadcast(squared[block], (k - 1) % Lanes::width);
      if (block == (k - 1) / Lanes::width) worst = lesser(worst, farthest);
    }
  }
  // One candidate, the same in all lanes: those behind it move up.
  template <class Lanes>
  POINTPROJ_FN void put(Lanes& lanes, Real candidate, int row) {
    const int before = (lanes.lane() + Lanes::width - 1) % Lanes::width;
    Real last = -kInfinity<Real>;  // in lane 0, what the block before had in its last lane
    int last_row = 0;
    POINTPROJ_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      Real other = lanes.broadcast(squared[block], before);
      int other_row = lanes.broadcast(rows[block], before);
      if (lanes.lane() == 0) {
        const Real kept = other;
        const int kept_row = other_row;
        other = last;
        other_row = last_row;
        last = kept;
        last_row = kept_row;
      }
      const bool other_moves = is_before(candidate, row, other, other_row);
      if (is_before(candidate, row, squared[block], rows[block])) {
        squared[block] = other_moves ? other : candidate;
        rows[block] = other_moves ? other_row : row;
      }
    }
  }
  // Splits a block and 32 candidates, both sorted. The nearer half goes on to the block before, unless all of that is
  // nearer still; the farther half is the new block behind, if there is one.
  template <int block, class Lanes>
  POINTPROJ_FN void merge(Lanes& lanes, Real candidate, int row) {
    const Real other = lanes.exchange(candidate, Lanes::width - 1);
    const int other_row = lanes.exchange(row, Lanes::width - 1);
    Real kept = squared[block];
    int kept_row = rows[block];
    const bool nearer = is_before(other, other_row, kept, kept_row);
    candidate = nearer ? other : kept;
    row = nearer ? other_row : kept_row;
    merge_in_lanes(Lanes::width, [&](int mask) { exchange(lanes, mask, candidate, row); });
    if constexpr (block + 1 < kBlocks) {
      if (!nearer) {
        kept = other;
        kept_row = other_row;
      }
      merge_in_lanes(Lanes::width, [&](int mask) { exchange(lanes, mask, kept, kept_row); });
      squared[block + 1] = kept;
      rows[block + 1] = kept_row;
    }
    if constexpr (block > 0) {
      const Real last = lanes.broadcast(squared[block - 1], Lanes::width - 1), first = lanes.broadcast(candidate, 0);
      const int last_row = lanes.broadcast(rows[block - 1], Lanes::width - 1), first_row = lanes.broadcast(row, 0);
      if (is_before(first, first_row, last, last_row)) return merge<block - 1>(lanes, candidate, row);
    }
    squared[block] = candidate;
    rows[block] = row;
  }
  template <class Lanes>
  POINTPROJ_FN static void exchange(Lanes& lanes, int mask, Real& squared, int& row) {
    const Real other = lanes.exchange(squared, mask);
    const int other_row = lanes.exchange(row, mask);
    if (is_before(other, other_row, squared, row) == is_in_front(lanes.lane(), mask)) {
      squared = other;
      row = other_row;
    }
  }
};

// Candidates wait, on a GPU in shared memory, until a list of a warp gets one from each lane: it sorts them all, also
// where few are within the limit.
template <class List>
struct Gathered {
  static constexpr int kPlaces = 64;  // fewer than a warp wait when as many come
  static_assert(kPlaces <= kQueueLength);
  List list;
  int first = 0, waiting = 0;

  template <class Real>
  POINTPROJ_FN Gathered(int k, Real limit) : list(k, limit) {}
  template <class Lanes, class Real>
  POINTPROJ_FN void insert(Lanes& lanes, Real candidate, int row, bool exists) {
    const bool hit = exists && candidate <= list.limit();
    const unsigned hits = lanes.ballot(hit);
    if (hit) lanes.template reserve<Real>()[(first + waiting + lanes.bits_before(hits)) % kPlaces] = {candidate, row};
    waiting += lanes.bit_count(hits);
    if (waiting >= Lanes::width) pass_on<Real>(lanes);
  }
  template <class Real, class Lanes>
  POINTPROJ_FN void pass_on(Lanes& lanes) {
    lanes.sync();
    const Neighbor<Real> next = lanes.template reserve<Real>()[first + lanes.lane()];
    lanes.sync();
    list.insert(lanes, next.value, next.at, lanes.lane() < waiting);
    first = Lanes::width - first;
    waiting -= Lanes::width;
  }
  template <class Lanes, class Store>
  POINTPROJ_FN void write(Lanes& lanes, int k, Store store) {
    if (waiting > 0) pass_on<decltype(list.limit())>(lanes);
    list.write(lanes, k, store);
  }
};

// body(the list of a warp for k neighbours, as a type)
template <class Real, class Body>
void with_warp_list(int64_t k, Body body) {
  if (k <= 32) return body(std::type_identity<WarpBlocks<Real, 1>>());
  if (k <= 64) return body(std::type_identity<WarpBlocks<Real, 2>>());
  if (k <= 128) return body(std::type_identity<WarpBlocks<Real, 4>>());
  body(std::type_identity<WarpBlocks<Real, 8>>());
}

// body(the list for k neighbours of each of so many queries, as a type)
template <class Real, class Body>
void with_list(int64_t k, int queries, Body body) {
  if constexpr (kOnGpu) {
    const bool few = queries <= (k <= kShortestList ? kFewQueries : kManyQueries);
    if (few || k > kLongestThreadList) return with_warp_list<Real>(k, body);
  }
  with_length(k, [&](auto length) { body(std::type_identity<SortedList<Real, length>>()); });
}

}  // namespace pointproj::POINTPROJ_DEVICE
