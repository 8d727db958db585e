// How a search keeps the k nearest, exactly, ties by the lower row.
//
// One candidate a lane: insert(lanes, squared distance, row, exists). limit() is the k-th squared distance so far,
// write(lanes, k, put) ends the search: put(place, squared distance, row), the row kNoRow where there are fewer than k.
#pragma once

#include "row_sort.h"

namespace pointproj::POINTPROJ_DEVICE {

constexpr int kShortestList = 8;  // so few are looked for by single threads of a GPU, also in dense cells
constexpr int kLongestThreadList = 32;  // in the registers of a thread; on a GPU a warp keeps more of them
constexpr int kLongestList = kOnGpu ? 128 : kLongestThreadList;  // more are kept in a heap in memory
// So few queries leave a GPU idle unless a warp works on each: of short lists, of longer ones.
constexpr int kFewQueries = 1 << 14, kManyQueries = 1 << 17;

// body(the length of a thread's list for k neighbours, as a constant)
template <class Body>
void with_length(int64_t k, Body body) {
  if (k <= kShortestList) return body(std::integral_constant<int, kShortestList>());
  if (k <= 16) return body(std::integral_constant<int, 16>());
  body(std::integral_constant<int, kLongestThreadList>());
}

template <class Real>
POINTPROJ_FN bool is_before(Real squared, int row, Real other, int other_row) {
  return squared < other || (squared == other && row < other_row);
}

POINTPROJ_FN int row_or_none(int row) { return row == kNoRow ? -1 : row; }

// The results of a search: rows as int or int64_t, and distances if they are wanted.
template <class Real>
struct Nearest {
  int k;
  int* rows;           // (Q, k), or null
  int64_t* long_rows;  // (Q, k), or null
  Real* distances;     // (Q, k), or null

  // A query that is not finite has no neighbours, at a distance that is no number.
  template <class Lanes, class List>
  POINTPROJ_FN void write(Lanes& lanes, List& list, int query, bool finite) const {
    const int64_t first = static_cast<int64_t>(query) * k;
    list.write(lanes, k, [&](int place, Real squared, int row) {
      const int64_t at = first + place;
      if (rows) rows[at] = row_or_none(row);
      if (long_rows) long_rows[at] = row_or_none(row);
      if (distances) distances[at] = finite ? Real(sqrt(squared)) : kNan<Real>;
    });
  }
};

// One thread's k best in registers, in ascending order. Places that k leaves over are in front, and stay.
template <class Real, int kLength>
struct SortedList {
  static constexpr int kLanes = 1;
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
  template <class Lanes>
  POINTPROJ_FN void insert(Lanes&, Real newcomer, int row, bool exists) {
    bool moves = exists && is_before(newcomer, row, squared[kLength - 1], rows[kLength - 1]);
    if (!moves) return;
    POINTPROJ_UNROLL
    for (int i = kLength - 1; i > 0; --i) {
      const bool next_moves = is_before(newcomer, row, squared[i - 1], rows[i - 1]);
      if (moves) {
        squared[i] = next_moves ? squared[i - 1] : newcomer;
        rows[i] = next_moves ? rows[i - 1] : row;
      }
      moves = next_moves;
#if !defined(__CUDACC__)
      if (!moves) return;  // a thread alone can stop where the newcomer stays
#endif
    }
    if (moves) {
      squared[0] = newcomer;
      rows[0] = row;
    }
  }
  template <class Lanes, class Put>
  POINTPROJ_FN void write(Lanes&, int k, Put put) const {
    POINTPROJ_UNROLL
    for (int i = 0; i < kLength; ++i) {
      if (i >= kLength - k) put(i - (kLength - k), squared[i], rows[i]);
    }
  }
};

// Any number of neighbours: a heap in memory, its farthest neighbour on top. It may be where the results go.
template <class Real>
struct Heap {
  static constexpr int kLanes = 1;
  Real* squared;
  int* rows;
  int most, size = 0;

  POINTPROJ_FN Heap(Real* squared, int* rows, int k) : squared(squared), rows(rows), most(k) {}
  POINTPROJ_FN Real limit() const { return size < most ? kInfinity<Real> : squared[0]; }
  template <class Lanes>
  POINTPROJ_FN void insert(Lanes&, Real newcomer, int row, bool exists) {
    if (!exists) return;
    if (size < most) {
      rise(size++, newcomer, row);
    } else if (is_before(newcomer, row, squared[0], rows[0])) {
      sink(size, newcomer, row);
    }
  }
  // Put a neighbour in a place at the bottom and restore the heap.
  POINTPROJ_FN void rise(int at, Real newcomer, int row) {
    while (at > 0) {
      const int parent = (at - 1) / 2;
      if (!is_before(squared[parent], rows[parent], newcomer, row)) break;
      squared[at] = squared[parent];
      rows[at] = rows[parent];
      at = parent;
    }
    squared[at] = newcomer;
    rows[at] = row;
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
  template <class Lanes, class Put>
  POINTPROJ_FN void write(Lanes&, int, Put put) {
    for (int last = size - 1; last > 0; --last) {
      const Real farthest = squared[0];
      const int row = rows[0];
      sink(last, squared[last], rows[last]);
      squared[last] = farthest;
      rows[last] = row;
    }
    for (int i = 0; i < most; ++i) put(i, i < size ? squared[i] : kInfinity<Real>, i < size ? rows[i] : kNoRow);
  }
};

// Lists in memory, where k is larger than kLongestList. They may be where the results go.
template <class Real>
struct Heaps {
  Real* squared;  // (Q, k)
  int* rows;      // (Q, k)

  POINTPROJ_FN Heap<Real> of(int query, int k) const {
    const int64_t first = static_cast<int64_t>(query) * k;
    return Heap<Real>(squared + first, rows + first, k);
  }
};

// The k best of a whole warp: the i-th in lane i % 32 of block i / 32.
// Newcomers are sorted, and merged with one block after the other.
template <class Real, int kBlocks>
struct WarpBlocks {
  static constexpr int kLanes = 32;
  Real squared[kBlocks];
  int rows[kBlocks];
  Real worst = kInfinity<Real>;
  int k;

  POINTPROJ_FN explicit WarpBlocks(int k) : k(k) {
    POINTPROJ_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      squared[block] = kInfinity<Real>;
      rows[block] = kNoRow;
    }
  }
  POINTPROJ_FN Real limit() const { return worst; }
  template <class Lanes, class Put>
  POINTPROJ_FN void write(Lanes& lanes, int, Put put) const {
    POINTPROJ_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      const int i = block * Lanes::width + lanes.lane();
      if (i < k) put(i, squared[block], rows[block]);
    }
  }
  template <class Lanes>
  POINTPROJ_FN void insert(Lanes& lanes, Real candidate, int row, bool exists) {
    static_assert(Lanes::width == 32);
    const bool hit = exists && candidate <= worst;
    if (!lanes.any(hit)) return;
    if (!hit) {
      candidate = kInfinity<Real>;
      row = kNoRow;
    }
    sort_in_lanes(Lanes::width, [&](int mask) { exchange(lanes, mask, candidate, row); });
    merge<kBlocks - 1>(lanes, candidate, row);
    POINTPROJ_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      const Real farthest = lanes.take(squared[block], (k - 1) % Lanes::width);
      if (block == (k - 1) / Lanes::width) worst = farthest;
    }
  }
  // The nearer half of a block and 32 candidates, both sorted, goes on to the block before, the other half stays; of
  // the last block it is left out.
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
      merge<block - 1>(lanes, candidate, row);
    } else {
      squared[0] = candidate;
      rows[0] = row;
    }
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

template <class List>
struct ListType {
  using Type = List;
};

// body(the list of a warp for k neighbours, as a type)
template <class Real, class Body>
void with_warp_list(int64_t k, Body body) {
  if (k <= 32) return body(ListType<WarpBlocks<Real, 1>>());
  if (k <= 64) return body(ListType<WarpBlocks<Real, 2>>());
  body(ListType<WarpBlocks<Real, 4>>());
}

// body(the list for k neighbours of each of so many queries, as a type)
template <class Real, class Body>
void with_list(int64_t k, int queries, Body body) {
  if constexpr (kOnGpu) {
    const bool few = queries <= (k <= kShortestList ? kFewQueries : kManyQueries);
    if (few || k > kLongestThreadList) return with_warp_list<Real>(k, body);
  }
  with_length(k, [&](auto length) { body(ListType<SortedList<Real, length>>()); });
}

}  // namespace pointproj::POINTPROJ_DEVICE
