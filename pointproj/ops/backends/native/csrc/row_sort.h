// Sorting: of numbers in the lanes of a warp, one in each, and of the rows of a list in memory.
//
// Comparisons follow a bitonic network in which the lesser number always goes to the front. Places beyond the end of a
// list never move, as if they had the largest numbers: lists of any length are sorted in place.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace pointproj::POINTPROJ_DEVICE {

// exchange(mask) compares numbers of lanes whose indices differ by the bits of the mask. Two sorted halves of
// which the second is reversed become one sorted whole.
template <class Exchange>
POINTPROJ_FN void merge_in_lanes(int width, Exchange exchange) {
  POINTPROJ_UNROLL
  for (int stride = width / 2; stride > 0; stride /= 2) exchange(stride);
}

template <class Exchange>
POINTPROJ_FN void sort_in_lanes(int width, Exchange exchange) {
  POINTPROJ_UNROLL
  for (int size = 2; size <= width; size *= 2) {
    exchange(size - 1);
    merge_in_lanes(size / 2, exchange);
  }
}

POINTPROJ_FN bool is_in_front(int lane, int mask) { return (lane & mask) < (mask + 1) / 2; }

// Rows of a list in ascending order, by the lanes together. Runs of as many rows as there are lanes stay in registers:
// a list that is no longer is read and written once.
template <class Lanes>
POINTPROJ_FN void sort_rows(Lanes& lanes, int64_t* rows, int count) {
  const int lane = lanes.lane();
  const auto each_run = [&](auto sort) {
    for (int first = 0; first < count; first += Lanes::width) {
      int row = first + lane < count ? static_cast<int>(rows[first + lane]) : kNoRow;
      sort(Lanes::width, [&](int mask) {
        const int other = lanes.exchange(row, mask);
        row = is_in_front(lane, mask) ? lesser(row, other) : greater(row, other);
      });
      if (first + lane < count) rows[first + lane] = row;
    }
    lanes.sync();
  };
  const auto order = [&](int front, int back) {
    if (back >= count) return;
    const int64_t a = rows[front], b = rows[back];
    if (a <= b) return;
    rows[front] = b;
    rows[back] = a;
  };
  each_run([](int width, auto exchange) { sort_in_lanes(width, exchange); });
  for (int half = Lanes::width; half < count; half *= 2) {
    for (int i = lane; i / half * 2 * half < count; i += Lanes::width) {
      const int first = i / half * 2 * half, at = i % half;
      order(first + at, first + 2 * half - 1 - at);
    }
    lanes.sync();
    for (int stride = half / 2; stride >= Lanes::width; stride /= 2) {
      for (int i = lane; i / stride * 2 * stride < count; i += Lanes::width) {
        const int front = i / stride * 2 * stride + i % stride;
        order(front, front + stride);
      }
      lanes.sync();
    }
    each_run([](int width, auto exchange) { merge_in_lanes(width, exchange); });
  }
}

#if !defined(__CUDACC__)
inline void sort_rows(OneLane&, int64_t* rows, int count) { std::sort(rows, rows + count); }
#endif

}  // namespace pointproj::POINTPROJ_DEVICE
