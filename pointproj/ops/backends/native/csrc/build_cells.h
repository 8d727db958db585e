// Building the two-level cell list: the same steps on both devices, each a loop that all threads share.
#pragma once

#include "cells.h"

namespace pointproj {

constexpr int kPointsPerPart = 512;
constexpr int kMostParts = 2048;
constexpr int kSample = 64;               // about so many points of a crowd say where its sub-cells go
constexpr double kMargin = 1.0 / 16;      // and so much of their extent is added on each side
constexpr int kFraction = 1 << 30;        // positions inside a cell, as integers up to here

struct Slot {
  int cell;
  bool counted;
};

template <class Real>
struct BuildCells {
  const Real* positions;  // (rows, 3)
  Batch batch;
  CellSizes sizes;
  Cells<Real> cells;
  Real* boxes;          // (clouds, parts, 6) lowest and highest corner of a part of each cloud
  int parts;            // of each cloud
  int* place;           // (rows, 2) slot of each point among the sub-cells, and its rank there
  int* occupancy;       // (subcells + 1,)
  int* suboccupancy;    // (subcells + 1,)
  int* extra;           // (cells,) sub-cells that a cell has beyond one
  int* extent;          // (cuts, 6)
  int* cut_cells;       // (cuts,)
  int* cut_count;       // (1,)
  int* partial;         // (most blocks,) sums of a scan

  static int parts_of(int64_t rows, int64_t clouds) {
    const int64_t wanted = rows / clouds / kPointsPerPart, most = kMostParts / lesser(clouds, int64_t(kMostParts));
    return static_cast<int>(greater(int64_t(1), lesser(wanted, most)));
  }

  POINTPROJ_FN int last_slot() const { return static_cast<int>(sizes.subcells()); }

  template <class Machine>
  POINTPROJ_FN void operator()(Machine& machine) const {
    clear(machine);
    bound_parts(machine);
    machine.barrier();
    choose_grids(machine);
    machine.barrier();
    count(machine);
    machine.barrier();
    const bool crowded = *cut_count > 0;
    if (crowded) cut_crowds(machine);
    machine.scan(crowded ? suboccupancy : occupancy, last_slot() + 1, partial,
                 [&](int64_t slot, int sum) { cells.start[slot + 1] = sum; });
    machine.barrier();
    machine.each(batch.rows, [&](int row) {
      const int* slot = place + 2 * static_cast<int64_t>(row);
      cells.points.store(cells.start[slot[0]] + slot[1], load_row(positions, row), row);
    });
  }

  template <class Machine>
  POINTPROJ_FN void clear(Machine& machine) const {
    machine.each(last_slot() + 1, [&](int i) { occupancy[i] = 0; });
    machine.each(static_cast<int>(sizes.cells()) + 1, [&](int i) { cells.shift[i] = 0; });
    machine.each(static_cast<int>(sizes.cuts()), [&](int i) {
      for (int j = 0; j < 6; ++j) {
        extent[6 * i + j] = 0;
        cells.subframes[6 * i + j] = 0;  // the same points give the same tables, used or not
      }
      if (i == 0) {
        *cut_count = 0;
        cells.start[0] = 0;
      }
    });
  }

  template <class Machine>
  POINTPROJ_FN void bound_parts(Machine& machine) const {
    machine.each_group(batch.clouds * parts, [&](auto& lanes, int item) {
      const int cloud = item / parts, part = item % parts;
      const int first = batch.first_row(cloud);
      const int64_t size = batch.first_row(cloud + 1) - first;
      const int begin = first + static_cast<int>(size * part / parts);
      const int end = first + static_cast<int>(size * (part + 1) / parts);
      Vec3<Real> low, high;
      for (int axis = 0; axis < 3; ++axis) {
        low[axis] = kInfinity<Real>;
        high[axis] = -kInfinity<Real>;
      }
      for (int row = begin + lanes.lane(); row < end; row += lanes.width) {
        const Vec3<Real> p = load_row(positions, row);
        if (!is_finite(p)) continue;
        for (int axis = 0; axis < 3; ++axis) {
          low[axis] = lesser(low[axis], p[axis]);
          high[axis] = greater(high[axis], p[axis]);
        }
      }
      for (int axis = 0; axis < 3; ++axis) {
        low[axis] = lanes.minimum(low[axis]);
        high[axis] = -lanes.minimum(-high[axis]);
        if (lanes.lane() == 0) {
          boxes[6 * static_cast<int64_t>(item) + axis] = low[axis];
          boxes[6 * static_cast<int64_t>(item) + 3 + axis] = high[axis];
        }
      }
    });
  }

  // A grid over the box that holds most of a cloud: parts know it from their mean corners, without outliers.
  template <class Machine>
  POINTPROJ_FN void choose_grids(Machine& machine) const {
    machine.each_group(batch.clouds, [&](auto& lanes, int cloud) {
      Real low[3], high[3], mean_low[3], mean_high[3], filled = 0;
      for (int axis = 0; axis < 3; ++axis) {
        low[axis] = kInfinity<Real>;
        high[axis] = -kInfinity<Real>;
        mean_low[axis] = mean_high[axis] = 0;
      }
      for (int part = lanes.lane(); part < parts; part += lanes.width) {
        const Real* box = boxes + 6 * (static_cast<int64_t>(cloud) * parts + part);
        if (!(box[0] < kInfinity<Real>)) continue;
        filled += 1;
        for (int axis = 0; axis < 3; ++axis) {
          low[axis] = lesser(low[axis], box[axis]);
          high[axis] = greater(high[axis], box[3 + axis]);
          mean_low[axis] += box[axis];
          mean_high[axis] += box[3 + axis];
        }
      }
      filled = lanes.sum(filled);
      Vec3<Real> extent;
      Real* frame = cells.frames + 12 * static_cast<int64_t>(cloud);
      for (int axis = 0; axis < 3; ++axis) {
        low[axis] = lanes.minimum(low[axis]);
        high[axis] = -lanes.minimum(-high[axis]);
        const Real sum_low = lanes.sum(mean_low[axis]), sum_high = lanes.sum(mean_high[axis]);
        if (lanes.lane() == 0) {
          frame[6 + axis] = low[axis];
          frame[9 + axis] = high[axis];
        }
        if (filled > Real(1)) {
          low[axis] = greater(low[axis], sum_low / filled);
          high[axis] = lesser(high[axis], sum_high / filled);
        }
        extent[axis] = filled > Real(0) ? greater(high[axis] - low[axis], Real(0)) : Real(0);
      }
      if (lanes.lane() != 0) return;
      const int64_t begin = batch.first_row(cloud), end = batch.first_row(cloud + 1);
      int shape[3];
      grid_shape(extent, static_cast<int>(sizes.density * (end - begin) / 2 + 1), shape);
      for (int axis = 0; axis < 3; ++axis) {
        frame[axis] = low[axis];
        frame[3 + axis] = extent[axis] / Real(shape[axis]);
        cells.dims[4 * cloud + axis] = shape[axis];
      }
      cells.dims[4 * cloud + 3] = static_cast<int>(sizes.density * begin / 2 + cloud);
    });
  }

  // Cells along each axis, near cubes, fewer than `budget` in all. An axis thinner than the edge that all axes
  // together suggest gets one cell, and the others share; at most three can drop out, so the fourth round is
  // final.
  POINTPROJ_FN static void grid_shape(const Vec3<Real>& extent, int budget, int* shape) {
    const Real longest = greater(extent[0], greater(extent[1], extent[2]));
    shape[0] = shape[1] = shape[2] = 1;
    if (!(longest > Real(0))) return;
    const Real share = Real(budget) * Real(0.9999);  // so that rounding cannot exceed the budget
    Real edge = Real(1e-6);
    for (int round = 0; round < 4; ++round) {
      int axes = 0;
      Real volume = Real(1) / share;
      for (int axis = 0; axis < 3; ++axis) {
        if (extent[axis] / longest > edge) {
          axes += 1;
          volume *= extent[axis] / longest;
        }
      }
      if (axes == 3) edge = greater(edge, Real(cbrt(volume)));
      if (axes == 2) edge = greater(edge, Real(sqrt(volume)));
      if (axes == 1) edge = greater(edge, volume);
    }
    for (int axis = 0; axis < 3; ++axis) {
      if (extent[axis] / longest > edge) shape[axis] = static_cast<int>(extent[axis] / longest / edge);
    }
  }

  template <class Machine>
  POINTPROJ_FN void count(Machine& machine) const {
    machine.count(
        batch.rows, occupancy, place,
        [&](int row) -> Slot {
          const Vec3<Real> p = load_row(positions, row);
          if (!is_finite(p)) return {last_slot(), true};
          return {cloud_frame(cells, batch.cloud_of(row)).cell_at(p), true};
        },
        [&](int cell) {
          if (cell == last_slot()) return;
          const int crowd = machine.fetch_add(cut_count, 1);
          cells.cut[cell] = crowd;
          cut_cells[crowd] = cell;
        });
  }

  template <class Machine>
  POINTPROJ_FN void cut_crowds(Machine& machine) const {
    const int all_cells = static_cast<int>(sizes.cells());
    machine.each(last_slot() + 1, [&](int i) { suboccupancy[i] = 0; });
    machine.each(all_cells, [&](int i) { extra[i] = 0; });
    sample(machine);
    machine.barrier();
    machine.each(*cut_count, [&](int crowd) { cut(crowd); });
    machine.barrier();
    machine.scan(extra, all_cells, partial, [&](int64_t cell, int sum) { cells.shift[cell + 1] = sum; });
    machine.barrier();
    machine.each(all_cells, [&](int cell) {
      if (occupancy[cell] < kCrowd) suboccupancy[cell + cells.shift[cell]] = occupancy[cell];
      if (cell == 0) suboccupancy[last_slot()] = occupancy[last_slot()];
    });
    machine.count(
        batch.rows, suboccupancy, place,
        [&](int row) -> Slot {
          const int cell = place[2 * static_cast<int64_t>(row)];
          if (cell == last_slot()) return {cell, false};
          const int subcell = cell + cells.shift[cell];
          if (occupancy[cell] < kCrowd) return {subcell, false};
          Frame<Real> frame;
          set_subgrid(frame, cells, cells.cut[cell]);
          frame.base = subcell;
          return {frame.cell_at(load_row(positions, row)), true};
        },
        [](int) {});
    machine.barrier();
  }

  // Extent of a sample of each crowd, in fractions of its cell; the lowest ones counted from above.
  template <class Machine>
  POINTPROJ_FN void sample(Machine& machine) const {
    machine.each(batch.rows, [&](int row) {
      const int cell = place[2 * static_cast<int64_t>(row)];
      if (cell == last_slot() || occupancy[cell] < kCrowd) return;
      // By row, not by arrival: the same points give the same cells.
      const unsigned scattered = (static_cast<unsigned>(row) * 1640531527u) >> 8;
      if (scattered % static_cast<unsigned>(occupancy[cell]) >= kSample) return;
      const Vec3<Real> p = load_row(positions, row);
      const Frame<Real> frame = cloud_frame(cells, batch.cloud_of(row));
      int* to = extent + 6 * static_cast<int64_t>(cells.cut[cell]);
      for (int axis = 0; axis < 3; ++axis) {
        const int at = frame.along(p[axis], axis);
        const Real low = frame.begin_of(axis, at), high = frame.end_of(axis, at);
        Real t = 0;
        if (high > low) t = lesser(greater((p[axis] - low) / (high - low), Real(0)), Real(1));
        const int q = static_cast<int>(lesser(int64_t(t * Real(kFraction)), int64_t(kFraction - 1)));
        machine.raise(to + axis, kFraction - 1 - q);
        machine.raise(to + 3 + axis, q);
      }
    });
  }

  // Choose the sub-cells of a crowded cell.
  POINTPROJ_FN void cut(int crowd) const {
    const int cell = cut_cells[crowd];
    int cloud = 0;
    while (cloud + 1 < batch.clouds && cells.dims[4 * cloud + 7] <= cell) ++cloud;
    const Frame<Real> frame = cloud_frame(cells, cloud);
    const int local = cell - frame.base;
    const int at[3] = {local % frame.shape[0], (local / frame.shape[0]) % frame.shape[1],
                       local / (frame.shape[0] * frame.shape[1])};
    Vec3<Real> low, width;
    for (int axis = 0; axis < 3; ++axis) {
      const Real cell_low = frame.begin_of(axis, at[axis]), cell_high = frame.end_of(axis, at[axis]);
      Real begin = Real(kFraction - 1 - extent[6 * crowd + axis]) / Real(kFraction);
      Real end = Real(extent[6 * crowd + 3 + axis] + 1) / Real(kFraction);
      const Real margin = greater(end - begin, Real(0)) * Real(kMargin);
      begin = greater(begin - margin, Real(0));
      end = lesser(end + margin, Real(1));
      if (begin >= end) {  // no point was sampled
        begin = 0;
        end = 1;
      }
      low[axis] = cell_low + (cell_high - cell_low) * begin;
      width[axis] = (cell_high - cell_low) * (end - begin);
    }
    int shape[3], packed = 0, product = 1;
    grid_shape(width, occupancy[cell], shape);
    Real* to = cells.subframes + 6 * static_cast<int64_t>(crowd);
    for (int axis = 0; axis < 3; ++axis) {
      shape[axis] = lesser(shape[axis], kAxisMask);
      to[axis] = low[axis];
      to[3 + axis] = width[axis] / Real(shape[axis]);
      packed |= shape[axis] << (axis * kAxisBits);
      product *= shape[axis];
    }
    cells.subdims[crowd] = packed;
    extra[cell] = product - 1;
  }
};

}  // namespace pointproj
