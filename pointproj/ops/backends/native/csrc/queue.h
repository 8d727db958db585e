// Neighbours of one point, collected until there are enough to add up; on a GPU in shared memory.
#pragma once

#include "common.h"

namespace pointproj::POINTPROJ_DEVICE {

constexpr int kQueueLength = 96;  // W2's operator at r = 0.25: 147 us, 164 with 32

// The number of a neighbour, and its squared distance, later its weight.
template <class Sum>
struct alignas(2 * sizeof(Sum)) Neighbor {
  Sum value;
  int at;
};

template <class Sum, class Lanes>
struct Queue {
  Neighbor<Sum>* neighbors;
  int size = 0;

  POINTPROJ_FN explicit Queue(Lanes& lanes) : neighbors(lanes.template reserve<Sum>()) {}
  // Adds the candidate of each lane, if it is a hit.
  POINTPROJ_FN void push(Lanes& lanes, bool hit, int at, Sum squared) {
    const unsigned hits = lanes.ballot(hit);
    if (hit) neighbors[size + lanes.bits_before(hits)] = {squared, at};
    size += lanes.bit_count(hits);
  }
  POINTPROJ_FN bool is_full() const { return size > kQueueLength - Lanes::kMostAtOnce; }
  // Calls add(neighbors, size) and empties the queue.
  template <class Add>
  POINTPROJ_FN void flush(Lanes& lanes, Add& add) {
    lanes.sync();
    add(neighbors, size);
    lanes.sync();
    size = 0;
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
