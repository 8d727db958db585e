// Cells for a known radius: a table of fixed size that the cells wrap around, again and again.
//
// Cells are `width` wide wherever the points are, so no bounding box is needed and one level does for every
// density. Cells that share a place only cost a few distance tests in vain. Along x the table is contiguous:
// a row of cells is one run of points, or two where it wraps.
#pragma once

#include "build_cells.h"

namespace pointproj {

constexpr int kPlacesPerPoint = 4;
constexpr double kFarthest = 1 << 28;  // cells from the origin; what lies beyond counts as there

POINTPROJ_FN int floor_log2(unsigned x) {
#if defined(__CUDACC__)
  return 31 - __clz(x);
#else
  return 31 - __builtin_clz(x);
#endif
}

inline int64_t places_for(int64_t rows, int64_t clouds) { return kPlacesPerPoint * rows + clouds; }

// One cloud's part of the table.
struct Table {
  int base;
  int bits[3];  // places along x, y, z, as powers of two

  // First place of a row of cells.
  POINTPROJ_FN int row_of(int y, int z) const {
    const int row = ((z & ((1 << bits[2]) - 1)) << bits[1]) | (y & ((1 << bits[1]) - 1));
    return base + (row << bits[0]);
  }
  // Place in a row. Cells around the origin, where clouds mostly are, do not wrap.
  POINTPROJ_FN int along(int x) const { return (x + (1 << bits[0]) / 2) & ((1 << bits[0]) - 1); }
};

template <class Real>
struct Wrapped {
  Real* widths;  // (clouds,) edge of the cells
  int* start;   // (places + 2,) first sorted point of each place; then of points not finite
  Points<Real> points;
  Batch batch;

  POINTPROJ_FN Table table_of(int cloud) const {
    const int begin = batch.first_row(cloud), size = batch.first_row(cloud + 1) - begin;
    const int bits = floor_log2(greater(kPlacesPerPoint * size, 1));
    return {kPlacesPerPoint * begin + cloud, {(bits + 2) / 3, (bits + 1) / 3, bits / 3}};
  }
  POINTPROJ_FN static int cell_along(Real x, Real per_unit) {
    return static_cast<int>(floor(lesser(greater(x * per_unit, Real(-kFarthest)), Real(kFarthest))));
  }
};

// Rows of values in the order of sorted points, each padded with zeros: read in long words, next to each other.
template <class Real, class Sum>
struct SortRows {
  static constexpr int kLanes = 32;
  using Number = float;

  Points<Real> points;
  const Sum* values;  // (rows, channels)
  int channels, padded;
  Sum* sorted;  // (rows, padded)

  POINTPROJ_FN void row(int at, int lane, int width) const {
    const Sum* from = values + static_cast<int64_t>(points.load(at).row) * channels;
    Sum* to = sorted + static_cast<int64_t>(at) * padded;
    for (int c = lane; c < padded; c += width) to[c] = c < channels ? from[c] : Sum(0);
  }
  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int at) const {
    row(at, lanes.lane(), Lanes::width);
  }
};

// One set of points that is sorted.
template <class Real>
struct Side {
  const Real* positions;
  Wrapped<Real> wrapped;
  int places;

  // Place of a point; the last is for points that are not finite.
  POINTPROJ_FN int place_of(int row) const {
    const Vec3<Real> p = load_row(positions, row);
    if (!is_finite(p)) return places;
    const int cloud = wrapped.batch.cloud_of(row);
    const Table table = wrapped.table_of(cloud);
    const Real per_unit = Real(1) / wrapped.widths[cloud];
    return table.row_of(Wrapped<Real>::cell_along(p[1], per_unit), Wrapped<Real>::cell_along(p[2], per_unit)) +
           table.along(Wrapped<Real>::cell_along(p[0], per_unit));
  }
};

// Sorts one set of points, or two at once: what is counted and scanned lies one behind the other.
template <class Real>
struct BuildWrapped {
  Side<Real> sides[2];
  int count;  // of the sides
  const Real* radii;  // (clouds,), or null: `radius` then
  Real radius;
  int cells_per_radius;
  int* occupancy;  // (slots,)
  int* place;      // (rows, 2)
  int* partial;

  POINTPROJ_EVERYWHERE int rows() const {
    return sides[0].wrapped.batch.rows + (count > 1 ? sides[1].wrapped.batch.rows : 0);
  }
  POINTPROJ_EVERYWHERE int slots() const { return sides[0].places + 1 + (count > 1 ? sides[1].places + 1 : 0); }

  template <class Machine>
  POINTPROJ_FN void operator()(Machine& machine) const {
    const int first_rows = sides[0].wrapped.batch.rows, first_slots = sides[0].places + 1;
    machine.each(slots(), [&](int i) { occupancy[i] = 0; });
    machine.each(sides[0].wrapped.batch.clouds, [&](int cloud) {
      for (int side = 0; side < count; ++side) {
        sides[side].wrapped.start[0] = 0;
        sides[side].wrapped.widths[cloud] = (radii ? radii[cloud] : radius) / Real(cells_per_radius);
      }
    });
    machine.barrier();
    machine.count(
        rows(), occupancy, place,
        [&](int row) -> Slot {
          if (row < first_rows) return {sides[0].place_of(row), true};
          return {first_slots + sides[1].place_of(row - first_rows), true};
        },
        [](int) {});
    machine.barrier();
    machine.scan(occupancy, slots(), partial, [&](int64_t slot, int before_next) {
      if (slot < first_slots) {
        sides[0].wrapped.start[slot + 1] = before_next;
      } else {
        sides[1].wrapped.start[slot - first_slots + 1] = before_next - first_rows;
      }
    });
    machine.barrier();
    machine.each(rows(), [&](int row) {
      const Side<Real>& side = sides[row < first_rows ? 0 : 1];
      const int slot = place[2 * static_cast<int64_t>(row)] - (row < first_rows ? 0 : first_slots);
      const int at = side.wrapped.start[slot] + place[2 * static_cast<int64_t>(row) + 1];
      const int own = row - (row < first_rows ? 0 : first_rows);
      side.wrapped.points.store(at, load_row(side.positions, own), own);
    });
  }
};

// Meet everything within the radius, and some that is farther away; nothing unless `searches`.
template <class Real, class Lanes, class Visitor>
POINTPROJ_FN void search_ball(
    const Wrapped<Real>& wrapped, int cloud, const Vec3<Real>& q, bool searches, Real radius, Lanes& lanes,
    Visitor& visitor) {
  const Table table = wrapped.table_of(cloud);
  const Real width = wrapped.widths[cloud], per_unit = Real(1) / width;
  const Real largest = greater(Real(fabs(q[0])), greater(Real(fabs(q[1])), Real(fabs(q[2]))));
  const Real slack = kEpsilon<Real> * Real(kRoundings) * (largest + radius);
  const Real limit = (radius + slack) * (radius + slack);
  int first[3], size[3];
  bool whole = false;  // the ball reaches around the table: no row can be left out by its distance
  POINTPROJ_UNROLL
  for (int axis = 0; axis < 3; ++axis) {
    first[axis] = wrapped.cell_along(q[axis] - radius - slack, per_unit);
    size[axis] = wrapped.cell_along(q[axis] + radius + slack, per_unit) - first[axis] + 1;
    if (size[axis] >= (1 << table.bits[axis])) {
      size[axis] = 1 << table.bits[axis];
      whole = true;
    }
  }
  // Distance along an axis to a cell's slab, never too large.
  const Real half_width = width / 2;
  const auto middle = [&](Real x) {
    return lesser(greater(x, Real(-kFarthest) * width), Real(kFarthest) * width) - half_width;
  };
  const Real middle_y = middle(q[1]), middle_z = middle(q[2]), beside = half_width + slack;
  const auto gap = [&](Real middle, int cell) {
    return greater(Real(fabs(Real(cell) * width - middle)) - beside, Real(0));
  };
  const int along = 1 << table.bits[0];
  const int begin_x = table.along(first[0]);
  const int split = begin_x + size[0] > along ? 1 : 0;  // whether rows wrap, and come in two parts
  const int parts = size[1] << split, rows = searches ? parts * size[2] : 0;
  int part = lanes.lane(), row_z = 0;
  for (int begin_row = 0; lanes.anywhere(begin_row < rows); begin_row += Lanes::width) {
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
      if (!whole) {  // only what the ball reaches in this row
        const Real half = quick_sqrt(greater(limit - across, Real(0))) + slack;
        x0 += greater(wrapped.cell_along(q[0] - half, per_unit) - first[0], 0);
        x1 = lesser(x1, begin_x + wrapped.cell_along(q[0] + half, per_unit) - first[0] + 1);
      }
      if ((part & split) == 0) {
        x1 = lesser(x1, along);
      } else {
        x0 = greater(x0 - along, 0);
        x1 -= along;
      }
      if ((whole || across <= limit) && x0 < x1) {
        const int place = table.row_of(y, z);
        begin = wrapped.start[place + x0];
        count = wrapped.start[place + x1] - begin;
      }
    }
    part += Lanes::width;
    visitor.visit(lanes, wrapped.points, begin, count);
  }
}

}  // namespace pointproj
