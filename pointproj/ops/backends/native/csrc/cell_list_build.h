// Building the two-level cell list: the same steps on both devices, each a loop that all threads share.
#pragma once

#include "cell_list.h"
#include "scan.h"

namespace pointproj::POINTPROJ_DEVICE {

constexpr int kPointsPerPart = 512, kLeastPart = 64;  // points; in smaller parts, up to so many:
constexpr int kFewParts = 8, kMostParts = 2048;
constexpr int kRun = 4;               // consecutive points of one part
constexpr int kSample = 64;           // about so many points of a dense cell decide where its sub-cells are
constexpr double kMargin = 1.0 / 16;  // and so much of their extent is added on each side
constexpr int kFraction = 1 << 30;    // positions inside a cell, as integers up to here

template <class Real>
struct Box {
  Vec3<Real> low, high;

  POINTPROJ_FN static Box empty() {
    const Real inf = kInfinity<Real>;
    return {{{inf, inf, inf}}, {{-inf, -inf, -inf}}};
  }
  POINTPROJ_FN void include(const Box& other) {
    for (int axis = 0; axis < 3; ++axis) {
      low[axis] = lesser(low[axis], other.low[axis]);
      high[axis] = greater(high[axis], other.high[axis]);
    }
  }
  // The box of all lanes.
  template <class Lanes>
  POINTPROJ_FN void combine(Lanes& lanes) {
    for (int axis = 0; axis < 3; ++axis) {
      low[axis] = lanes.minimum(low[axis]);
      high[axis] = -lanes.minimum(-high[axis]);
    }
  }
};

// A hash, for numbers of 32 bits that look random.
POINTPROJ_FN unsigned mixed(unsigned number) {
  number = (number ^ (number >> 16)) * 0x7feb352du;
  number = (number ^ (number >> 15)) * 0x846ca68bu;
  return number ^ (number >> 16);
}

template <class Real>
struct BuildCellList {
  const Real* positions;  // (rows, 3)
  Batch batch;
  CellListSizes<> sizes;
  CellList<Real> cells;
  CountingSort sort;  // by cell
  Box<Real>* boxes;   // (clouds, parts)
  int parts;          // of each cloud
  int* suboccupancy;  // (subcells + 1,)
  int* extra;         // (cells,): sub-cells that a cell has beyond one
  int* extent;        // (dense cells, 6)
  int* dense_cells;   // (dense cells,)
  int* dense_count;   // ()
  int* largest;       // (): points of the largest cell that may be dense
  Build build;

  static int parts_of(int64_t rows, int64_t clouds) {
    const int64_t few = lesser<int64_t>(rows / clouds / kLeastPart, kFewParts);
    const int64_t wanted = greater(few, rows / clouds / kPointsPerPart);
    const int64_t most = kMostParts / lesser(clouds, int64_t(kMostParts));
    return static_cast<int>(greater(int64_t(1), lesser(wanted, most)));
  }

  // The slot of points that are not finite.
  POINTPROJ_FN int last_slot() const { return static_cast<int>(sizes.subcells()); }
  POINTPROJ_FN bool is_dense(int cell) const {
    return sort.occupancy[cell] >= (*largest >= kCrowdedCell ? kDenseBesideCrowded : kDenseCell);
  }
  POINTPROJ_FN int cell_of(int row) const { return sort.place[2 * static_cast<int64_t>(row)]; }

  template <class Machine>
  POINTPROJ_FN void operator()(Machine& machine) const {
    if (build.needed && *build.needed == 0) return;
    build.clear(machine);
    clear(machine);
    bound_parts(machine);
    machine.barrier();
    choose_grids(machine);
    machine.barrier();
    count(machine);
    CountingSort chosen = sort;
    if (*dense_count > 0 && find_largest(machine) >= kDenseCell) {
      subdivide(machine);
      chosen.occupancy = suboccupancy;
    }
    chosen.scatter(
        machine, [&](int64_t slot, int end) { cells.start[slot + 1] = end; },
        [&](int row, int slot, int rank) {
          cells.points.store(cells.start[slot] + rank, load_position(positions, row), row);
        });
  }

  template <class Machine>
  POINTPROJ_FN void clear(Machine& machine) const {
    machine.each(last_slot() + 1, [&](int i) { sort.occupancy[i] = 0; });
    machine.each(static_cast<int>(sizes.cells()) + 1, [&](int i) { cells.shift[i] = 0; });
    machine.each(static_cast<int>(sizes.dense_cells()), [&](int i) {
      for (int j = 0; j < 6; ++j) {
        extent[6 * i + j] = 0;
        cells.subgrids[6 * i + j] = 0;  // unused ones too are the same for the same points
      }
      if (i == 0) {
        *dense_count = *largest = 0;
        cells.start[0] = 0;
      }
    });
  }

  // The boxes of the parts. A part has a random short run of each section of the points: it is as wide as most of the
  // cloud, also where points are in the order of a coordinate or of a structured grid.
  template <class Machine>
  POINTPROJ_FN void bound_parts(Machine& machine) const {
    machine.each_warp(batch.clouds * parts, [&](auto& lanes, int item) {
      const int cloud = item / parts;
      const int first = batch.first_row(cloud), size = batch.first_row(cloud + 1) - first;
      const int sections = (size + kRun * parts - 1) / (kRun * parts);
      Box<Real> box = Box<Real>::empty();
      POINTPROJ_UNROLL_BY(8)  // so many loads at once
      for (int i = lanes.lane(); i < sections * kRun; i += lanes.width) {
        const unsigned section = i / kRun, run = (item + mixed(section) % parts) % parts;
        const int64_t at = (static_cast<int64_t>(section) * parts + run) * kRun + i % kRun;
        const Vec3<Real> p = load_position(positions, first + static_cast<int>(lesser<int64_t>(at, size - 1)));
        const bool valid = at < size && is_finite(p);  // without a branch, which the next loads would wait for
        for (int axis = 0; axis < 3; ++axis) {
          box.low[axis] = lesser(box.low[axis], valid ? p[axis] : kInfinity<Real>);
          box.high[axis] = greater(box.high[axis], valid ? p[axis] : -kInfinity<Real>);
        }
      }
      box.combine(lanes);
      if (lanes.lane() == 0) boxes[item] = box;
    });
  }

  // The mean box of a cloud's parts, each clipped to `most`. The result is that of all lanes; `filled` is the number of
  // parts with a finite point.
  template <class Lanes>
  POINTPROJ_FN Box<Real> mean_box(Lanes& lanes, const Box<Real>* of_parts, const Box<Real>& most, Real* filled) const {
    Box<Real> mean = {{{0, 0, 0}}, {{0, 0, 0}}};
    *filled = 0;
    POINTPROJ_UNROLL_BY(4)
    for (int part = lanes.lane(); part < parts; part += lanes.width) {
      const Box<Real> own = of_parts[part];
      const bool valid = own.low[0] < kInfinity<Real>;
      *filled += valid ? Real(1) : Real(0);
      for (int axis = 0; axis < 3; ++axis) {
        mean.low[axis] += valid ? greater(own.low[axis], most.low[axis]) : Real(0);
        mean.high[axis] += valid ? lesser(own.high[axis], most.high[axis]) : Real(0);
      }
    }
    *filled = lanes.sum(*filled);
    for (int axis = 0; axis < 3; ++axis) {
      mean.low[axis] = lanes.sum(mean.low[axis]) / *filled;
      mean.high[axis] = lanes.sum(mean.high[axis]) / *filled;
    }
    return mean;
  }

  // A grid over the box that holds most of a cloud: the mean of the boxes of its parts. All parts share a box, if no
  // outlier is in every part; a part's box counts as at most three times as wide, so outliers hardly move the mean.
  template <class Machine>
  POINTPROJ_FN void choose_grids(Machine& machine) const {
    machine.each_warp(batch.clouds, [&](auto& lanes, int cloud) {
      const Box<Real>* const of_parts = boxes + static_cast<int64_t>(cloud) * parts;
      Box<Real> box = Box<Real>::empty(), shared = Box<Real>::empty(), most;  // shared: its ends are exchanged
      POINTPROJ_UNROLL_BY(4)
      for (int part = lanes.lane(); part < parts; part += lanes.width) {
        const Box<Real> own = of_parts[part];
        box.include(own);
        if (own.low[0] < kInfinity<Real>) shared.include({own.high, own.low});
      }
      box.combine(lanes);
      shared.combine(lanes);
      for (int axis = 0; axis < 3; ++axis) {
        const Real width = shared.low[axis] - shared.high[axis], more = width < Real(0) ? kInfinity<Real> : width;
        most.low[axis] = shared.high[axis] - more;
        most.high[axis] = shared.low[axis] + more;
      }
      Real filled;
      const Box<Real> mean = mean_box(lanes, of_parts, most, &filled);
      Vec3<Real> extent;
      Real* grid = cells.grids + 12 * static_cast<int64_t>(cloud);
      for (int axis = 0; axis < 3; ++axis) {
        Real low = box.low[axis], high = box.high[axis];
        const bool overflows = !(fabs(mean.low[axis]) < kInfinity<Real> && fabs(mean.high[axis]) < kInfinity<Real>);
        if (filled > Real(1) && !overflows) {
          low = greater(low, mean.low[axis]);
          high = lesser(high, mean.high[axis]);
        }
        extent[axis] = filled > Real(0) ? greater(high - low, Real(0)) : Real(0);
        if (lanes.lane() != 0) continue;
        grid[axis] = low;
        grid[6 + axis] = box.low[axis];
        grid[9 + axis] = box.high[axis];
      }
      if (lanes.lane() != 0) return;
      const int64_t begin = batch.first_row(cloud), end = batch.first_row(cloud + 1);
      int shape[3];
      choose_shape(extent, static_cast<int>(sizes.density * (end - begin) / 2 + 1), shape);
      for (int axis = 0; axis < 3; ++axis) {
        grid[3 + axis] = extent[axis] / Real(shape[axis]);
        cells.shapes[4 * cloud + axis] = shape[axis];
      }
      cells.shapes[4 * cloud + 3] = static_cast<int>(sizes.density * begin / 2 + cloud);
    });
  }

  // Cells along each axis, near cubes, fewer than `most` in all. An axis thinner than the edge that all axes together
  // suggest gets one cell, and the others share the rest; at most three can drop out, so the fourth round is final.
  POINTPROJ_FN static void choose_shape(const Vec3<Real>& extent, int most, int* shape) {
    const Real longest = greater(extent[0], greater(extent[1], extent[2]));
    shape[0] = shape[1] = shape[2] = 1;
    if (!(longest > Real(0))) return;
    const Real share = Real(most) * Real(0.9999);  // so that rounding cannot exceed it
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
    sort.count(
        machine,
        [&](int row) -> Slot {
          const Vec3<Real> p = load_position(positions, row);
          if (!is_finite(p)) return {last_slot(), true};
          return {cloud_grid(cells, batch.cloud_of(row)).cell_at(p), true};
        },
        kDenseBesideCrowded,
        [&](int cell) {
          if (cell == last_slot()) return;
          const int dense = machine.fetch_add(dense_count, 1);
          cells.dense[cell] = dense;
          dense_cells[dense] = cell;
        });
  }

  template <class Machine>
  POINTPROJ_FN int find_largest(Machine& machine) const {
    machine.each(*dense_count, [&](int dense) {
      const int points = sort.occupancy[dense_cells[dense]];
      if (points > *largest) machine.fetch_max(largest, points);
    });
    machine.barrier();
    return *largest;
  }

  template <class Machine>
  POINTPROJ_FN void subdivide(Machine& machine) const {
    const int all_cells = static_cast<int>(sizes.cells());
    machine.each(last_slot() + 1, [&](int i) { suboccupancy[i] = 0; });
    machine.each(all_cells, [&](int i) { extra[i] = 0; });
    sample(machine);
    machine.barrier();
    machine.each(*dense_count, [&](int dense) {
      if (is_dense(dense_cells[dense])) choose_subgrid(dense);
    });
    machine.barrier();
    machine.scan(extra, all_cells, sort.partial, [&](int64_t cell, int sum) { cells.shift[cell + 1] = sum; });
    machine.barrier();
    machine.each(all_cells, [&](int cell) {
      if (!is_dense(cell)) suboccupancy[cell + cells.shift[cell]] = sort.occupancy[cell];
      if (cell == 0) suboccupancy[last_slot()] = sort.occupancy[last_slot()];
    });
    CountingSort by_subcell = sort;
    by_subcell.occupancy = suboccupancy;
    by_subcell.count(machine, [&](int row) -> Slot {
      const int cell = cell_of(row);
      if (cell == last_slot()) return {cell, false};
      const int subcell = cell + cells.shift[cell];
      if (!is_dense(cell)) return {subcell, false};
      Grid<Real> grid;
      set_subgrid(grid, cells, cells.dense[cell]);
      grid.base = subcell;
      return {grid.cell_at(load_position(positions, row)), true};
    });
  }

  // Extent of a sample of each dense cell, in fractions of the cell. Low ends are measured from the high face: so both
  // ends are maxima.
  template <class Machine>
  POINTPROJ_FN void sample(Machine& machine) const {
    machine.each(batch.rows, [&](int row) {
      const int cell = cell_of(row);
      if (cell == last_slot() || !is_dense(cell)) return;
      // Chosen by row, so that the same points give the same cells.
      const unsigned scattered = (static_cast<unsigned>(row) * 1640531527u) >> 8;
      if (scattered % static_cast<unsigned>(sort.occupancy[cell]) >= kSample) return;
      const Vec3<Real> p = load_position(positions, row);
      const Grid<Real> grid = cloud_grid(cells, batch.cloud_of(row));
      int* to = extent + 6 * static_cast<int64_t>(cells.dense[cell]);
      for (int axis = 0; axis < 3; ++axis) {
        const int at = grid.along(p[axis], axis);
        const Real low = grid.begin_of(axis, at), high = grid.end_of(axis, at);
        Real t = 0;
        if (high > low) t = lesser(greater((p[axis] - low) / (high - low), Real(0)), Real(1));
        const int q = static_cast<int>(lesser(int64_t(t * Real(kFraction)), int64_t(kFraction - 1)));
        machine.fetch_max(to + axis, kFraction - 1 - q);
        machine.fetch_max(to + 3 + axis, q);
      }
    });
  }

  POINTPROJ_FN void choose_subgrid(int dense) const {
    const int cell = dense_cells[dense];
    int cloud = 0;
    while (cloud + 1 < batch.clouds && cells.shapes[4 * cloud + 7] <= cell) ++cloud;
    const Grid<Real> grid = cloud_grid(cells, cloud);
    const int local = cell - grid.base, plane = grid.shape[0] * grid.shape[1];
    const int at[3] = {local % grid.shape[0], local / grid.shape[0] % grid.shape[1], local / plane};
    Vec3<Real> low, width;
    for (int axis = 0; axis < 3; ++axis) {
      const Real cell_low = grid.begin_of(axis, at[axis]), cell_width = grid.end_of(axis, at[axis]) - cell_low;
      Real begin = Real(kFraction - 1 - extent[6 * dense + axis]) / Real(kFraction);
      Real end = Real(extent[6 * dense + 3 + axis] + 1) / Real(kFraction);
      const Real margin = greater(end - begin, Real(0)) * Real(kMargin);
      begin = greater(begin - margin, Real(0));
      end = lesser(end + margin, Real(1));
      if (begin >= end) {  // no point was sampled
        begin = 0;
        end = 1;
      }
      low[axis] = cell_low + cell_width * begin;
      width[axis] = cell_width * (end - begin);
    }
    int shape[3], packed = 0, product = 1;
    choose_shape(width, sort.occupancy[cell], shape);
    Real* to = cells.subgrids + 6 * static_cast<int64_t>(dense);
    for (int axis = 0; axis < 3; ++axis) {
      shape[axis] = lesser(shape[axis], kAxisMask);
      to[axis] = low[axis];
      to[3 + axis] = width[axis] / Real(shape[axis]);
      packed |= shape[axis] << (axis * kAxisBits);
      product *= shape[axis];
    }
    cells.subshapes[dense] = packed;
    extra[cell] = product - 1;
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
