// Counting sort: how many rows each slot has, the running sum of that, and every row to its place.
#pragma once

#include "common.h"

namespace pointproj::POINTPROJ_DEVICE {

constexpr int kMostBuildBlocks = 2048;  // of a GPU: as many partial sums of a scan
constexpr int kPartialSums = kOnGpu ? kMostBuildBlocks : 6;  // also of samples: two sets along three axes

struct Slot {
  int at;
  bool needs_rank;  // else the row has a rank in this slot
};

// What the build of an index has to do with the search that asks for it.
struct Build {
  int* cleared;       // (2,), or null: the counts of postponed queries
  const int* needed;  // (), or null: nothing is built where it holds 0

  template <class Machine>
  POINTPROJ_FN void clear(Machine& machine) const {
    if (cleared) machine.each(2, [&](int i) { cleared[i] = 0; });
  }
};

struct CountingSort {
  int rows, slots;
  int* occupancy;  // (slots,), zero before
  int* place;      // (rows, 2): the slot of each row, and its rank there
  int* partial;    // (kPartialSums,)

  // Ranks rows in their slots. Calls crossing(slot) where a slot gets its `limit`-th row.
  template <class Machine, class SlotOf, class Crossing>
  POINTPROJ_FN void count(Machine& machine, SlotOf slot_of, int limit, Crossing crossing) const {
    machine.count(rows, occupancy, place, slot_of, limit, crossing);
    machine.barrier();
  }
  template <class Machine, class SlotOf>
  POINTPROJ_FN void count(Machine& machine, SlotOf slot_of) const {
    count(machine, slot_of, -1, [](int) {});
  }
  // Calls set_end(slot, rows up to the end of it) for each slot, then move(row, slot, rank) for each row.
  template <class Machine, class SetEnd, class Move>
  POINTPROJ_FN void scatter(Machine& machine, SetEnd set_end, Move move) const {
    machine.scan(occupancy, slots, partial, set_end);
    machine.barrier();
    machine.each(rows, [&](int row) {
      const int* slot = place + 2 * static_cast<int64_t>(row);
      move(row, slot[0], slot[1]);
    });
  }
};

// Stores points in a given order.
template <class Real>
struct ReorderPoints {
  static constexpr int kLanes = 1, kBlocks = 1;

  const Real* positions;  // (rows, 3)
  const int64_t* order;   // (rows,)
  SortedPoints<Real> sorted;

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes&, int at) const {
    const int row = static_cast<int>(order[at]);
    sorted.store(at, load_position(positions, row), row);
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
