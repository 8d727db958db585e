// The hash grid: cells for a known radius, in a table of fixed size. It repeats, so cells far apart share a slot.
//
// All cells have one width, so no bounding box is needed, and one level serves every density. A shared slot costs a few
// needless distance tests. Along x the table is contiguous: a row of cells is one run of points, or two at the end of
// the table. For one large cloud, a sample gives the table its shape: of a cube of slots a thin cloud would use a few,
// each shared by many cells.
#pragma once

#include "scan.h"

namespace pointproj::POINTPROJ_DEVICE {

// Slots for each point: with more, fewer points of other cells are tested, but clearing and scanning take longer.
POINTPROJ_EVERYWHERE constexpr PerRow slots_per_point() { return {4, 2, 1 << 22}; }
template <class Real>
constexpr Real kWidest = std::numeric_limits<Real>::max() / 8;  // edge of cells; the narrowest is kLeastDistance
constexpr double kFarthest = 1 << 28;  // cells from the origin; points beyond are placed there

POINTPROJ_FN int floor_log2(unsigned x) {
#if defined(__CUDACC__)
  return 31 - __clz(x);
#else
  return 31 - __builtin_clz(x);
#endif
}

// The lowest 16 bits, with a 0 before each.
POINTPROJ_FN unsigned interleaved(unsigned x) {
  x = (x | (x << 8)) & 0x00ff00ffu;
  x = (x | (x << 4)) & 0x0f0f0f0fu;
  x = (x | (x << 2)) & 0x33333333u;
  return (x | (x << 1)) & 0x55555555u;
}

// One cloud's part of the table.
struct HashTable {
  int base;
  int bits[3];  // slots along x, y, z, as powers of two

  POINTPROJ_FN int size(int axis) const { return 1 << bits[axis]; }
  // First slot of a row of cells. Rows are along a Z-curve, of which y takes the lower bits: what is near in space is
  // near in the table too, so that points and features are still in the cache when the next row reads them. Such curves
  // lie one behind the other along the longer of the two sides.
  POINTPROJ_FN int row(int y, int z) const {
    const bool is_longer_y = bits[1] > bits[2];
    const int common = is_longer_y ? bits[2] : bits[1], longer = is_longer_y ? bits[1] : bits[2];
    const unsigned low = (1u << common) - 1, beyond = (1u << longer) - (1u << common);
    const unsigned curve = ((is_longer_y ? y : z) & beyond) << common;
    const unsigned row = interleaved(y & low) | (interleaved(z & low) << 1) | curve;
    return base + static_cast<int>(row << bits[0]);
  }
  // Slot in a row. Cells around the origin, where clouds mostly are, do not wrap.
  POINTPROJ_FN int along(int x) const { return (x + size(0) / 2) & (size(0) - 1); }
};

template <class Real>
struct HashGrid {
  Real* width;  // () edge of the cells
  int* shape;   // () bits of the table along x, y, z, each in a byte; 0 for a cube
  int* start;   // (slots + 2,) first sorted point of each slot; then of points not finite
  SortedPoints<Real> points;
  Batch batch;

  POINTPROJ_EVERYWHERE static int64_t slots_of(const Batch& batch) {
    return int64_t(slots_per_point().at(batch.rows)) * batch.rows + batch.clouds;
  }
  POINTPROJ_EVERYWHERE int slots() const { return static_cast<int>(slots_of(batch)); }
  POINTPROJ_FN HashTable table_of(int cloud, int shape) const {
    const int begin = batch.first_row(cloud), base = slots_per_point().at(batch.rows) * begin + cloud;
    if (shape) return {base, {shape & 255, (shape >> 8) & 255, shape >> 16}};
    const int bits = bits_for(batch.first_row(cloud + 1) - begin);
    return {base, {(bits + 2) / 3, (bits + 1) / 3, bits / 3}};
  }
  POINTPROJ_FN int bits_for(int points) const {
    return floor_log2(greater(slots_per_point().at(batch.rows) * points, 1));
  }
  POINTPROJ_FN static int cell_along(Real x, Real per_unit) {
    return static_cast<int>(floor(lesser(greater(x * per_unit, Real(-kFarthest)), Real(kFarthest))));
  }
  // The last slot is for points that are not finite.
  POINTPROJ_FN int slot_of(const Vec3<Real>& p, int row, Real per_unit, int shape) const {
    if (!is_finite(p)) return slots();
    const HashTable table = table_of(batch.cloud_of(row), shape);
    return table.row(cell_along(p[1], per_unit), cell_along(p[2], per_unit)) + table.along(cell_along(p[0], per_unit));
  }
};

// A GPU takes cells as wide as the radius if points have fewer neighbours than this, else half as wide, which spares
// tests of points. W2's operator at r = 0.1 and 0.2: 56 and 122 us with wide cells, 67 and 109 with narrow ones.
constexpr int kFewNeighbors = 16;
constexpr int kSampledPoints = 512, kSampledPairs = kSampledPoints * 256;  // points of one set, pairs with the other
constexpr int kShaped = kOnGpu ? 1 << 18 : 1 << 13;  // points; for fewer, finding a shape takes longer than it saves
constexpr int kShapePairs = 1 << 10;  // whose distances along the axes decide
constexpr int kLeastBits = 3;         // along an axis: no ball extends around the table

// Sorts one set of points, or two at once, the slots of one behind those of the other: one launch instead of two saves
// 10 of 63 us of W2's operator.
template <class Real>
struct BuildHashGrids {
  struct Side {
    const Real* positions;
    HashGrid<Real> grid;
    int cells;  // along the radius; 0 if a sample decides
  };
  Side sides[2];
  int count;            // of the sides
  Real radius;          // the largest of the searches
  const Real* largest;  // the same, where only the device knows it; or null
  Build build;
  CountingSort sort;

  // Results are right for every width, so long as it and its inverse are finite. A NaN becomes the narrowest.
  POINTPROJ_FN Real cell_width(int cells) const {
    return lesser(greater(kLeastDistance<Real>, (largest ? *largest : radius) / Real(cells)), kWidest<Real>);
  }

  POINTPROJ_FN static int sampled(unsigned i, int rows) {
    return static_cast<int>((static_cast<uint64_t>(i * 2654435769u) * static_cast<unsigned>(rows)) >> 32);
  }
  // Whether two sampled points, one of each set, are within the radius. Their rows differ: the sets may be the same.
  POINTPROJ_FN bool is_near(int pair) const {
    const Batch &first = sides[0].grid.batch, &second = sides[1].grid.batch;
    if (first.rows == 0 || second.rows == 0) return false;
    const int a = sampled(pair % kSampledPoints, first.rows);
    const int b = sampled(kSampledPoints + pair / kSampledPoints, second.rows);
    const Vec3<Real> p = load_position(sides[0].positions, a), q = load_position(sides[1].positions, b);
    return squared_distance<Real>(p, q) <= radius * radius && first.cloud_of(a) == second.cloud_of(b);
  }

  // Adds the logarithms of the cells between two sampled points, along each axis; at most those of a cube of slots, so
  // that a few points far away do not decide.
  template <class Machine>
  POINTPROJ_FN void measure(Machine& machine, int pair, const Side& side, Real per_unit, int* logarithms) const {
    const int rows = side.grid.batch.rows;
    if (rows == 0) return;
    const Vec3<Real> p = load_position(side.positions, sampled(pair, rows));
    const Vec3<Real> q = load_position(side.positions, sampled(pair * pair, rows));  // in any place of the order
    if (!is_finite(p) || !is_finite(q)) return;
    const int farthest = 1 << ((side.grid.bits_for(rows) + 2) / 3);
    POINTPROJ_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const int cells = side.grid.cell_along(p[axis], per_unit) - side.grid.cell_along(q[axis], per_unit);
      machine.fetch_add(logarithms + axis, floor_log2(1 + lesser(abs(cells), farthest)));
    }
  }
  // The shape for which cells fill the table along all axes alike, from the sums of logarithms.
  POINTPROJ_FN static int shape_for(int bits, const int* logarithms) {
    if (bits < 3 * kLeastBits) return 0;
    float extent[3];
    for (int axis = 0; axis < 3; ++axis) extent[axis] = static_cast<float>(logarithms[axis]) / kShapePairs;
    const auto whole = [](float wanted, int most) {
      return lesser(greater(static_cast<int>(floor(wanted + 0.5f)), kLeastBits), most);
    };
    const int x = whole((bits + 2 * extent[0] - extent[1] - extent[2]) / 3, bits - 2 * kLeastBits);
    const int y = whole((bits - x + extent[1] - extent[2]) / 2, bits - x - kLeastBits);
    return x | (y << 8) | ((bits - x - y) << 16);
  }

  template <class Machine>
  POINTPROJ_FN void operator()(Machine& machine) const {
    const bool is_shaped = sort.rows > kShaped && sides[0].grid.batch.clouds == 1;
    const int first_rows = sides[0].grid.batch.rows, first_slots = sides[0].grid.slots() + 1;
    build.clear(machine);
    machine.each(sort.slots, [&](int i) { sort.occupancy[i] = 0; });
    int cells[2] = {sides[0].cells, sides[count - 1].cells};
    if (cells[0] == 0) {
      const Real near = Real(machine.count_if(kSampledPairs, sort.partial, [&](int pair) { return is_near(pair); }));
      for (int side = 0; side < 2; ++side) {
        cells[side] = near / Real(kSampledPairs) * Real(sides[side].grid.batch.rows) < Real(kFewNeighbors) ? 1 : 2;
      }
    } else {
      if (is_shaped) machine.each(6, [&](int i) { sort.partial[i] = 0; });
      machine.barrier();
    }
    const Real per_unit[2] = {Real(1) / cell_width(cells[0]), Real(1) / cell_width(cells[1])};
    if (is_shaped) {
      machine.each(count * kShapePairs, [&](int i) {
        const int side = i / kShapePairs;
        const Real inverse = side == 0 ? per_unit[0] : per_unit[1];
        measure(machine, i % kShapePairs, sides[side], inverse, sort.partial + 3 * side);
      });
      machine.barrier();
    }
    const auto shape_of = [&](int side) {
      const HashGrid<Real>& grid = sides[side].grid;
      return is_shaped ? shape_for(grid.bits_for(grid.batch.rows), sort.partial + 3 * side) : 0;
    };
    const int shapes[2] = {shape_of(0), shape_of(count - 1)};
    machine.each(count, [&](int side) {
      sides[side].grid.start[0] = 0;
      *sides[side].grid.width = cell_width(side == 0 ? cells[0] : cells[1]);
      *sides[side].grid.shape = side == 0 ? shapes[0] : shapes[1];
    });
    const auto slot_of = [&](int side, int row) {
      return sides[side].grid.slot_of(load_position(sides[side].positions, row), row, per_unit[side], shapes[side]);
    };
    sort.count(machine, [&](int row) -> Slot {
      if (row < first_rows) return {slot_of(0, row), true};
      return {first_slots + slot_of(1, row - first_rows), true};
    });
    sort.scatter(
        machine,
        [&](int64_t slot, int end) {
          if (slot < first_slots) {
            sides[0].grid.start[slot + 1] = end;
          } else {
            sides[1].grid.start[slot - first_slots + 1] = end - first_rows;
          }
        },
        [&](int row, int slot, int rank) {
          const bool first = row < first_rows;
          const Side& side = sides[first ? 0 : 1];
          const int own = first ? row : row - first_rows;
          const int at = side.grid.start[first ? slot : slot - first_slots] + rank;
          side.grid.points.store(at, load_position(side.positions, own), own);
        });
  }
};

// Visits all points of a cloud within the radius, and some that are farther; none unless `searches`. False if it was
// given up, since these are more than the budget.
template <class Real, class Lanes, class Visitor>
POINTPROJ_FN bool visit_ball(
    const HashGrid<Real>& grid, int cloud, const Vec3<Real>& q, bool searches, Real radius, Lanes& lanes,
    Visitor& visitor, int budget = kNoRow) {
  const bool is_limited = budget != kNoRow;
  const HashTable table = grid.table_of(cloud, *grid.shape);
  const Real width = *grid.width, per_unit = Real(1) / width;
  const Real largest = greater(Real(fabs(q[0])), greater(Real(fabs(q[1])), Real(fabs(q[2]))));
  const Real slack = kEpsilon<Real> * Real(kRoundingErrors) * (largest + radius) + kLeastDistance<Real>;
  // Finite, so that differences from it are too: no neighbour is so far away that the square overflows.
  const Real limit = lesser((radius + slack) * (radius + slack), kLargest<Real>);
  int first[3], size[3];
  bool wraps = false;  // the ball extends around the table: no row can be left out by its distance
  POINTPROJ_UNROLL
  for (int axis = 0; axis < 3; ++axis) {
    first[axis] = grid.cell_along(q[axis] - radius - slack, per_unit);
    size[axis] = grid.cell_along(q[axis] + radius + slack, per_unit) - first[axis] + 1;
    if (size[axis] >= table.size(axis)) {
      size[axis] = table.size(axis);
      wraps = true;
    }
  }
  // Distance along an axis to a cell, never too large.
  const Real half_width = width / 2;
  const auto middle = [&](Real x) {
    return lesser(greater(x, Real(-kFarthest) * width), Real(kFarthest) * width) - half_width;
  };
  const Real middle_y = middle(q[1]), middle_z = middle(q[2]), beside = half_width + slack;
  const auto gap = [&](Real middle, int cell) {
    return greater(Real(fabs(Real(cell) * width - middle)) - beside, Real(0));
  };
  const int along = table.size(0);
  const int begin_x = table.along(first[0]);
  const int split = begin_x + size[0] > along ? 1 : 0;  // whether rows wrap, and come in two parts
  const int parts = size[1] << split, rows = searches ? parts * size[2] : 0;
  int part = lanes.lane(), row_z = 0;
  for (int begin_row = 0; lanes.any(begin_row < rows); begin_row += Lanes::width) {
    while (part >= parts) {
      part -= parts;
      row_z += 1;
    }
    int begin = 0, count = 0;
    if (searches && row_z < size[2]) {
      const int y = first[1] + (part >> split), z = first[2] + row_z;
      const Real across_y = gap(middle_y, y), across_z = gap(middle_z, z);
      const Real across = across_y * across_y + across_z * across_z;
      int x0 = begin_x, x1 = begin_x + size[0];
      if (!wraps) {  // only the part of the row inside the ball
        const Real half = quick_sqrt(greater(limit - across, Real(0))) + slack;
        x0 += greater(grid.cell_along(q[0] - half, per_unit) - first[0], 0);
        x1 = lesser(x1, begin_x + grid.cell_along(q[0] + half, per_unit) - first[0] + 1);
      }
      if ((part & split) == 0) {
        x1 = lesser(x1, along);
      } else {
        x0 = greater(x0 - along, 0);
        x1 -= along;
      }
      if ((wraps || across <= limit) && x0 < x1) {
        const int slot = table.row(y, z);
        begin = grid.start[slot + x0];
        count = grid.start[slot + x1] - begin;
      }
    }
    part += Lanes::width;
    const int visited = lanes.visit(grid.points, q, begin, count, visitor, budget);
    if (is_limited) {
      budget -= visited;
      if (budget < 0) return false;
    }
  }
  return true;
}

}  // namespace pointproj::POINTPROJ_DEVICE
