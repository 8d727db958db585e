// The two-level cell list as tables, and where a point falls.
//
// The box that holds most of a cloud is divided into cells; those at its border extend to the farthest points. A dense
// cell is subdivided where most of its points are. Points are sorted by (cell, sub-cell), so cells that follow each
// other along x hold one contiguous run of points.
#pragma once

#include "common.h"

namespace pointproj::POINTPROJ_DEVICE {

constexpr int kDenseCell = 256;  // points; a cell with so many is subdivided
constexpr int kCrowdedCell = 1024, kDenseBesideCrowded = 64;  // or with so few, in a set with a cell of so many
constexpr int kAxisBits = 10;    // into less than 2^kAxisBits sub-cells along an axis
constexpr int kAxisMask = (1 << kAxisBits) - 1;

// Sizes of the tables, which follow from shapes.
template <class Number = int64_t>
struct CellListSizes {
  Number rows, clouds, density;  // density: cells for every two points

  POINTPROJ_EVERYWHERE Number cells() const { return density * rows / 2 + clouds; }
  POINTPROJ_EVERYWHERE Number dense_cells() const { return dense_cells_of(rows); }
  POINTPROJ_EVERYWHERE static Number dense_cells_of(const Number& rows) { return rows / kDenseBesideCrowded + 2; }
  POINTPROJ_EVERYWHERE Number subcells() const { return cells() + rows; }
};

template <class Real>
struct CellList {
  Real* grids;     // (clouds, 12): corner of each grid, edges of its cells, lowest and highest point of the cloud
  Real* subgrids;  // (dense cells, 6): corner and edges of the sub-cells
  int count;       // of the cells
  int* shapes;     // (clouds, 4): cells along x, y, z; number of the first cell
  int* dense;      // (cells,): for a cell that is subdivided, its row in the tables of dense cells
  int* subshapes;  // (dense cells,): sub-cells along x, y, z, kAxisBits bits each
  int* shift;      // (cells + 1,): the first sub-cell of cell c is number c + shift[c]
  int* start;      // (subcells + 2,): first sorted point of each sub-cell; then of points not finite
  SortedPoints<Real> points;

  CellList(const CellListSizes<>& sizes, Real* reals, int* ints, SortedPoints<Real> points)
      : grids(reals), subgrids(reals + 12 * sizes.clouds), count(static_cast<int>(sizes.cells())), points(points) {
    shapes = ints;
    dense = shapes + 4 * sizes.clouds;
    subshapes = dense + sizes.cells();
    shift = subshapes + sizes.dense_cells();
    start = shift + sizes.cells() + 1;
  }
};

// One grid of cells, a cloud's or that inside a dense cell.
template <class Real>
struct Grid {
  Vec3<Real> low, edge, per_unit;    // per_unit: cells a unit of length
  Vec3<Real> outer_low, outer_high;  // border cells extend to here
  int shape[3];
  int base;    // number of cell 0 in the tables
  bool flat;   // none of these cells is subdivided
  Real slack;  // error that a distance to a cell may have

  POINTPROJ_FN void set(const Real* corner_and_edges, int axis, int cells) {
    low[axis] = corner_and_edges[axis];
    edge[axis] = corner_and_edges[3 + axis];
    per_unit[axis] = edge[axis] > Real(0) ? Real(1) / edge[axis] : Real(0);
    shape[axis] = cells;
  }
  // Cell along one axis; points outside, by rounding or far away, go to the border.
  POINTPROJ_FN int along(Real x, int axis) const {
    const Real t = (x - low[axis]) * per_unit[axis];
    if (!(t > Real(0))) return 0;
    return static_cast<int>(lesser(t, Real(shape[axis] - 1)));
  }
  // Number of the first cell of a row along x.
  POINTPROJ_FN int row(int y, int z) const { return base + (z * shape[1] + y) * shape[0]; }
  POINTPROJ_FN int cell_at(const Vec3<Real>& p) const { return row(along(p[1], 1), along(p[2], 2)) + along(p[0], 0); }
  // Both ends of a cell along an axis.
  POINTPROJ_FN Real face(int axis, int cell) const { return low[axis] + Real(cell) * edge[axis]; }
  POINTPROJ_FN Real begin_of(int axis, int cell) const { return cell > 0 ? face(axis, cell) : outer_low[axis]; }
  POINTPROJ_FN Real end_of(int axis, int cell) const {
    return cell < shape[axis] - 1 ? face(axis, cell + 1) : outer_high[axis];
  }
  // Distance along an axis from x to a cell, never too large.
  POINTPROJ_FN Real gap(Real x, int axis, int cell) const {
    const Real away = greater(begin_of(axis, cell) - x, x - end_of(axis, cell));
    return greater(away - slack, Real(0));
  }
};

template <class Real>
POINTPROJ_FN Grid<Real> cloud_grid(const CellList<Real>& cells, int cloud) {
  Grid<Real> grid;
  const Real* from = cells.grids + 12 * static_cast<int64_t>(cloud);
  POINTPROJ_UNROLL
  for (int axis = 0; axis < 3; ++axis) {
    grid.set(from, axis, cells.shapes[4 * cloud + axis]);
    grid.outer_low[axis] = from[6 + axis];
    grid.outer_high[axis] = from[9 + axis];
  }
  grid.base = cells.shapes[4 * cloud + 3];
  grid.flat = cells.shift[cells.count] == 0;
  grid.slack = Real(0);
  return grid;
}

// Slack for distances from q, since points and the faces of cells are rounded differently.
//
// Let u be half an epsilon and m the largest coordinate of q and of the grid's ends. `along` rounds three times and
// `face` twice, so a point lies outside the faces of its cell by at most 11 u m, however far it is beyond the grid:
// ends at outermost points are exact. A distance to a cell, if positive, is at most 2 m. With its rounding, those of a
// square and of sums, here and in the squared distance of a point, that is 23 u m. A quick root adds 4 u m: in all less
// than 16 epsilons of m.
template <class Real>
POINTPROJ_FN Real slack_for(const Grid<Real>& grid, const Vec3<Real>& q) {
  Real largest = Real(0);
  POINTPROJ_UNROLL
  for (int axis = 0; axis < 3; ++axis) {
    const Real low = fabs(grid.low[axis]), high = fabs(grid.face(axis, grid.shape[axis]));
    largest = greater(largest, greater(Real(fabs(q[axis])), greater(low, high)));
  }
  return kEpsilon<Real> * Real(kRoundingErrors) * largest + kLeastDistance<Real>;
}

template <class Real>
POINTPROJ_FN void set_subgrid(Grid<Real>& grid, const CellList<Real>& cells, int dense) {
  const int shape = cells.subshapes[dense];
  POINTPROJ_UNROLL
  for (int axis = 0; axis < 3; ++axis) {
    grid.set(cells.subgrids + 6 * static_cast<int64_t>(dense), axis, (shape >> (axis * kAxisBits)) & kAxisMask);
  }
}

// The grid inside a cell that is subdivided.
template <class Real>
POINTPROJ_FN Grid<Real> subgrid_of(
    const CellList<Real>& cells, const Grid<Real>& parent, int cell, const int* at, const Vec3<Real>& q) {
  Grid<Real> grid;
  POINTPROJ_UNROLL
  for (int axis = 0; axis < 3; ++axis) {
    grid.outer_low[axis] = parent.begin_of(axis, at[axis]);
    grid.outer_high[axis] = parent.end_of(axis, at[axis]);
  }
  set_subgrid(grid, cells, cells.dense[cell]);
  grid.base = cell + cells.shift[cell];
  grid.flat = true;
  grid.slack = greater(parent.slack, slack_for(grid, q));  // a cell at the border may be wider than the parent
  return grid;
}

}  // namespace pointproj::POINTPROJ_DEVICE
