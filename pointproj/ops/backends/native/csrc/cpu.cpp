// The CPU: all cores, one thread a point.
#include <ATen/Parallel.h>

#include "launch.h"
#include "listed.h"
#include "one_lane.h"
#include "within.h"

namespace pointproj {

namespace {

constexpr int64_t kPointsAtOnce = 1 << 15;  // fewer are not worth a second thread
constexpr int64_t kPartsAtOnce = 64;
constexpr int64_t kSearchesAtOnce = 64;

struct Cores {
  void barrier() const {}
  int fetch_add(int* to, int value) const {
    const int before = *to;
    *to += value;
    return before;
  }
  void raise(int* to, int value) const {
    int seen = __atomic_load_n(to, __ATOMIC_RELAXED);
    while (seen < value && !__atomic_compare_exchange_n(to, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
  template <class Body>
  void each(int size, Body body) const {
    at::parallel_for(0, size, kPointsAtOnce, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(static_cast<int>(i));
    });
  }
  template <class Body>
  void each_group(int size, Body body) const {
    at::parallel_for(0, size, kPartsAtOnce, [&](int64_t begin, int64_t end) {
      OneLane lanes;
      for (int64_t i = begin; i < end; ++i) body(lanes, static_cast<int>(i));
    });
  }
  // Ranks in the order of the rows, so that the same points always give the same order.
  template <class SlotOf, class Crossing>
  void count(int rows, int* occupancy, int* place, SlotOf slot_of, Crossing crossing) const {
    each(rows, [&](int row) {
      const Slot slot = slot_of(row);
      place[2 * static_cast<int64_t>(row)] = slot.counted ? slot.cell : ~slot.cell;
    });
    for (int64_t row = 0; row < rows; ++row) {
      const int cell = place[2 * row];
      if (cell < 0) {
        place[2 * row] = ~cell;
        continue;
      }
      const int rank = occupancy[cell]++;
      place[2 * row + 1] = rank;
      if (rank + 1 == kCrowd) crossing(cell);
    }
  }
  // store(i, sum of the first i + 1)
  template <class Store>
  void scan(const int* in, int size, int*, Store store) const {
    int sum = 0;
    for (int64_t i = 0; i < size; ++i) store(i, sum += in[i]);
  }
};

}  // namespace

namespace cpu {

template <class Task>
void build(const Task& task) {
  Cores machine;
  task(machine);
}

template <class Task>
void each(const Task& task, int64_t items) {
  at::parallel_for(0, items, kSearchesAtOnce, [&](int64_t begin, int64_t end) {
    OneLane lanes;
    for (int64_t i = begin; i < end; ++i) task(lanes, i);
  });
}

#define BUILD(...) template void build(const __VA_ARGS__&);
#define EACH(...) template void each(const __VA_ARGS__&, int64_t);
#define SEARCH(Real)                               \
  BUILD(BuildCells<Real>)                          \
  BUILD(BuildWrapped<Real>)                        \
  EACH(SearchAlone<Real, 8, Level::kBoth, false>)  \
  EACH(SearchAlone<Real, 16, Level::kBoth, false>) \
  EACH(SearchAlone<Real, 32, Level::kBoth, false>) \
  EACH(SearchInMemory<Real>)
#define AGGREGATE(...)           \
  EACH(SortRows<__VA_ARGS__>)        \
  EACH(AggregateWithin<__VA_ARGS__>) \
  EACH(GatherWithin<__VA_ARGS__>)    \
  EACH(PullWithin<__VA_ARGS__>)      \
  EACH(PushWithin<__VA_ARGS__>)      \
  EACH(AggregateListed<__VA_ARGS__>) \
  EACH(PullListed<__VA_ARGS__>)      \
  EACH(PushListed<__VA_ARGS__>)

BUILD(InvertLists)
EACH(GatherListed<float>)
EACH(GatherListed<double>)
SEARCH(float)
SEARCH(double)
AGGREGATE(float, float)
AGGREGATE(float, double)
AGGREGATE(double, double)

}  // namespace cpu
}  // namespace pointproj
