// The search of a tile: 16 points in the order of their cells, and all that is near any of them.
#pragma once

#include "tiles.h"
#include "warp_lanes.cuh"

namespace pointproj {

constexpr int kTileWarps = 2;
constexpr int kCandidates = 32;  // that are met at once; at most as many more wait

// Of one warp.
struct TileMemory {
  float4 candidates[2 * kCandidates];  // position, and the place among the sorted points
  int run[32];
};

// A warp's part of the search for 16 points: lanes 16 to 31 repeat what the others have.
template <class Take>
struct TileSearch {
  const RadiusNeighbors<float, DefaultWeighting<float>>& problem;
  TileMemory& memory;
  Take& take;  // take(waiting, which points search)
  int warp;    // of the block
  int waiting = 0, chunks_before = 0;

  // Whether the lane's point searches, and where it is.
  POINTPROJ_FN void operator()(bool there, const Vec3<float>& q, int cloud) {
    const HashTable table = problem.others.table_of(cloud);
    const float width = *problem.others.width, per_unit = 1.0f / width;
    const int row =
        table.row(HashGrid<float>::cell_along(q[1], per_unit), HashGrid<float>::cell_along(q[2], per_unit));
    unsigned todo = __ballot_sync(kAll, there);
    // Points of one row of cells together: others may be far away.
    while (todo != 0) {
      const int chosen = __ffs(todo) - 1;
      const int chosen_row = __shfl_sync(kAll, row, chosen);
      const bool active = there && row == chosen_row;
      const unsigned group = __ballot_sync(kAll, active);
      todo &= ~group;
      Vec3<float> low, high;
      POINTPROJ_UNROLL
      for (int axis = 0; axis < 3; ++axis) {
        low[axis] = active ? q[axis] : kInfinity<float>;
        high[axis] = active ? q[axis] : -kInfinity<float>;
        POINTPROJ_UNROLL
        for (int step = 8; step > 0; step >>= 1) {
          low[axis] = lesser(low[axis], __shfl_xor_sync(kAll, low[axis], step));
          high[axis] = greater(high[axis], __shfl_xor_sync(kAll, high[axis], step));
        }
      }
      visit_box(problem.others.table_of(__shfl_sync(kAll, cloud, chosen)), low, high, width, per_unit, group);
      flush(group);
    }
  }

  // All points that are near the box; what is not within the radius of any of its points may be among them.
  POINTPROJ_FN void visit_box(const HashTable& table, const Vec3<float>& low, const Vec3<float>& high, float width,
                              float per_unit, unsigned group) {
    const float radius = problem.radius;
    float largest = 0;
    POINTPROJ_UNROLL
    for (int axis = 0; axis < 3; ++axis) largest = greater(largest, greater(float(fabs(low[axis])), float(fabs(high[axis]))));
    const float slack = kEpsilon<float> * float(kRoundingErrors) * (largest + radius) + kLeastDistance<float>;
    const float limit = lesser((radius + slack) * (radius + slack), kLargest<float>);
    int first[3], size[3];
    bool wraps = false;
    POINTPROJ_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      first[axis] = HashGrid<float>::cell_along(low[axis] - radius - slack, per_unit);
      size[axis] = HashGrid<float>::cell_along(high[axis] + radius + slack, per_unit) - first[axis] + 1;
      if (size[axis] >= table.size(axis)) {
        size[axis] = table.size(axis);
        wraps = true;
      }
    }
    // Distance along an axis between a cell and the box, never too large.
    const float farthest = float(kFarthest) * width;
    const auto gap = [&](int axis, int cell) {
      const float begin = float(cell) * width;
      const float away = greater(greater(low[axis], -farthest) - (begin + width), begin - lesser(high[axis], farthest));
      return greater(away - slack, 0.0f);
    };
    const int lane = threadIdx.x & 31, along = table.size(0), begin_x = table.along(first[0]);
    const int split_rows = begin_x + size[0] > along ? 1 : 0, parts = size[1] << split_rows, rows = parts * size[2];
    for (int begin_row = 0; begin_row < rows; begin_row += 32) {
      const int row_z = (begin_row + lane) / parts, part = (begin_row + lane) - row_z * parts;
      int begin = 0, count = 0;
      if (row_z < size[2]) {
        const int y = first[1] + (part >> split_rows), z = first[2] + row_z;
        const float across_y = gap(1, y), across_z = gap(2, z), across = across_y * across_y + across_z * across_z;
        int x0 = begin_x, x1 = begin_x + size[0];
        if (!wraps) {
          const float half = quick_sqrt(greater(limit - across, 0.0f)) + slack;
          x0 += greater(HashGrid<float>::cell_along(low[0] - half, per_unit) - first[0], 0);
          x1 = lesser(x1, begin_x + HashGrid<float>::cell_along(high[0] + half, per_unit) - first[0] + 1);
        }
        if ((part & split_rows) == 0) {
          x1 = lesser(x1, along);
        } else {
          x0 = greater(x0 - along, 0);
          x1 -= along;
        }
        if ((wraps || across <= limit) && x0 < x1) {
          const int slot = table.row(y, z);
          begin = problem.others.start[slot + x0];
          count = problem.others.start[slot + x1] - begin;
        }
      }
      visit_runs(begin, count, low, high, limit, group);
    }
  }

  // Each lane brings a run of points; the warps of the block take turns.
  POINTPROJ_FN void visit_runs(int begin, int count, const Vec3<float>& low, const Vec3<float>& high, float limit,
                               unsigned group) {
    const int lane = threadIdx.x & 31;
    const int end = running_sum(count), first = end - count, candidates = __shfl_sync(kAll, end, 31);
    const unsigned runs = __ballot_sync(kAll, count > 0), lower = (1u << lane) - 1u;
    __syncwarp();
    if (count > 0) memory.run[__popc(runs & lower)] = begin - first;
    __syncwarp();
    int runs_before = -1;
    for (int start = 0; start < candidates; start += 32) {
      const bool starts = count > 0 && first >= start && first < start + 32;
      const unsigned heads = __reduce_or_sync(kAll, starts ? 1u << (first - start) : 0u);
      const int at_run = runs_before + __popc(heads & (lower | (1u << lane)));
      runs_before += __popc(heads);
      if (chunks_before++ % kTileWarps != warp) continue;
      const int candidate = start + lane;
      bool near = candidate < candidates;
      float4 found;
      if (near) {
        const int at = memory.run[at_run] + candidate;
        const Point<float> point = problem.others.points.load(at);
        float square = 0;
        POINTPROJ_UNROLL
        for (int axis = 0; axis < 3; ++axis) {
          const float away = greater(greater(low[axis] - point.position[axis], point.position[axis] - high[axis]), 0.0f);
          square += away * away;
        }
        near = square <= limit;
        const int number = problem.by_row ? point.row : at;
        found = make_float4(point.position[0], point.position[1], point.position[2], __int_as_float(number));
      }
      const unsigned hits = __ballot_sync(kAll, near);
      if (near) memory.candidates[waiting + __popc(hits & lower)] = found;
      waiting += __popc(hits);
      if (waiting < kCandidates) continue;
      __syncwarp();
      take(kCandidates, group);
      waiting -= kCandidates;
      __syncwarp();
      if (lane < waiting) found = memory.candidates[kCandidates + lane];
      __syncwarp();
      if (lane < waiting) memory.candidates[lane] = found;
    }
  }

  // The last few; the list ends in points that are nowhere.
  POINTPROJ_FN void flush(unsigned group) {
    const int lane = threadIdx.x & 31;
    if (waiting == 0) return;
    if (lane >= waiting) memory.candidates[lane] = make_float4(kNan<float>, 0, 0, __int_as_float(0));
    __syncwarp();
    take(waiting, group);
    __syncwarp();
    waiting = 0;
  }
};

}  // namespace pointproj
