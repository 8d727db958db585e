// The CPU: all cores, one thread a point.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "lanes.h"
#include "scan.h"

namespace pointproj::POINTPROJ_DEVICE {

constexpr int64_t kPointsAtOnce = 1 << 18;  // for fewer, one thread is faster than waiting for a second
constexpr int64_t kPartsAtOnce = 64;
constexpr int64_t kSearchesAtOnce = 64;

// The threads of a build.
struct Cores {
  void barrier() const {}
  int fetch_add(int* to, int value) const {
    const int before = *to;
    *to += value;
    return before;
  }
  void fetch_max(int* to, int value) const {
    int seen = __atomic_load_n(to, __ATOMIC_RELAXED);
    while (seen < value && !__atomic_compare_exchange_n(to, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
  template <class Body>
  void each(int size, Body body) const {
    torch::stable::parallel_for(0, size, kPointsAtOnce, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(static_cast<int>(i));
    });
  }
  template <class Body>
  void each_warp(int size, Body body) const {
    torch::stable::parallel_for(0, size, kPartsAtOnce, [&](int64_t begin, int64_t end) {
      OneLane lanes;
      for (int64_t i = begin; i < end; ++i) body(lanes, static_cast<int>(i));
    });
  }
  // Ranks in the order of the rows, so that the same points always give the same order.
  template <class SlotOf, class Crossing>
  void count(int rows, int* occupancy, int* place, SlotOf slot_of, int limit, Crossing crossing) const {
    each(rows, [&](int row) {
      const Slot slot = slot_of(row);
      place[2 * static_cast<int64_t>(row)] = slot.needs_rank ? slot.at : ~slot.at;
    });
    for (int64_t row = 0; row < rows; ++row) {
      const int slot = place[2 * row];
      if (slot < 0) {
        place[2 * row] = ~slot;
        continue;
      }
      const int rank = occupancy[slot]++;
      place[2 * row + 1] = rank;
      if (rank + 1 == limit) crossing(slot);
    }
  }
  template <class Test>
  int count_if(int size, int*, Test test) const {
    int found = 0;
    for (int i = 0; i < size; ++i) found += test(i) ? 1 : 0;
    return found;
  }
  // store(i, sum of the first i + 1)
  template <class Store>
  void scan(const int* in, int size, int*, Store store) const {
    int sum = 0;
    for (int64_t i = 0; i < size; ++i) store(i, sum += in[i]);
  }
};

struct Device {
  explicit Device(const torch::stable::Tensor&) {}
  void clear(void* data, int64_t bytes) const { std::memset(data, 0, static_cast<size_t>(bytes)); }
  template <class Task>
  void build(const Task& task, int64_t) const {
    Cores machine;
    task(machine);
  }
  template <class Task>
  void each(const Task& task, int64_t items) const {
    torch::stable::parallel_for(0, items, kSearchesAtOnce, [&](int64_t begin, int64_t end) {
      OneLane lanes;
      for (int64_t i = begin; i < end; ++i) task(lanes, i);
    });
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
