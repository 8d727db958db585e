// The two-level cell list as tables, and where a point falls.
//
// The box that holds most of a cloud is cut into cells; those at its border reach out to the farthest points. A
// cell that holds a crowd is cut again where most of its points lie. Points are sorted by (cell, sub-cell), so
// cells that follow each other along x hold one contiguous run of points.
#pragma once

#include "common.h"

namespace pointproj {

constexpr int kCrowd = 256;    // a cell with so many points is cut
constexpr int kAxisBits = 10;  // into less than 2^kAxisBits sub-cells along an axis
constexpr int kAxisMask = (1 << kAxisBits) - 1;
constexpr double kRoundings = 16;  // errors, in units of the largest coordinate, a distance to a cell can have

// Sizes of the tables, known from shapes alone.
struct CellSizes {
  int64_t rows, clouds, density;  // density: cells for every two points

  POINTPROJ_EVERYWHERE int64_t cells() const { return density * rows / 2 + clouds; }
  POINTPROJ_EVERYWHERE int64_t cuts() const { return rows / kCrowd + 2; }
  POINTPROJ_EVERYWHERE int64_t subcells() const { return cells() + rows; }
  POINTPROJ_EVERYWHERE int64_t reals() const { return 12 * clouds + 6 * cuts(); }
  POINTPROJ_EVERYWHERE int64_t numbers() const { return 4 * clouds + cells() + cuts() + (cells() + 1) + (subcells() + 2); }
};

template <class Real>
struct Cells {
  Real* frames;     // (clouds, 12): corner of each grid, edges of its cells, lowest and highest point of the cloud
  Real* subframes;  // (cuts, 6): corner and edges of the sub-cells
  int count;        // of the cells
  int* dims;        // (clouds, 4): cells along x, y, z; number of the first cell
  int* cut;         // (cells,): for a cell that is cut, its row in the tables of sub-cells
  int* subdims;     // (cuts,): sub-cells along x, y, z, kAxisBits bits each
  int* shift;       // (cells + 1,): the first sub-cell of cell c is number c + shift[c]
  int* start;       // (subcells + 2,): first sorted point of each sub-cell; then of points not finite
  Points<Real> points;

  Cells(const CellSizes& sizes, Real* reals, int* numbers, Points<Real> points)
      : frames(reals), subframes(reals + 12 * sizes.clouds), count(static_cast<int>(sizes.cells())), points(points) {
    dims = numbers;
    cut = dims + 4 * sizes.clouds;
    subdims = cut + sizes.cells();
    shift = subdims + sizes.cuts();
    start = shift + sizes.cells() + 1;
  }
};

// Cells a unit of length; 0 for an axis without extent.
template <class Real>
POINTPROJ_FN Real inverse(Real edge) {
  return edge > Real(0) ? Real(1) / edge : Real(0);
}

// Cell along one axis; points outside, by rounding or far away, go to the border.
template <class Real>
POINTPROJ_FN int axis_cell(Real x, Real low, Real per_unit, int cells) {
  const Real t = (x - low) * per_unit;
  if (!(t > Real(0))) return 0;
  return static_cast<int>(lesser(t, Real(cells - 1)));
}

// One grid of cells, a cloud's or that inside one cell, with distances to its cells.
template <class Real>
struct Frame {
  Vec3<Real> low, edge, per_unit;
  Vec3<Real> outer_low, outer_high;  // border cells reach out to here
  int shape[3];
  int base;   // number of cell 0 in the tables
  bool flat;  // none of these cells is cut
  Real slack;

  POINTPROJ_FN int along(Real x, int axis) const { return axis_cell(x, low[axis], per_unit[axis], shape[axis]); }
  POINTPROJ_FN Real face(int axis, int cell) const { return low[axis] + Real(cell) * edge[axis]; }
  POINTPROJ_FN int cell_at(const Vec3<Real>& p) const {
    return base + (along(p[2], 2) * shape[1] + along(p[1], 1)) * shape[0] + along(p[0], 0);
  }
  // Both ends of a cell along an axis.
  POINTPROJ_FN Real begin_of(int axis, int cell) const { return cell > 0 ? face(axis, cell) : outer_low[axis]; }
  POINTPROJ_FN Real end_of(int axis, int cell) const {
    return cell < shape[axis] - 1 ? face(axis, cell + 1) : outer_high[axis];
  }
  // Distance along an axis from x to a cell's slab, never too large.
  POINTPROJ_FN Real gap(Real x, int axis, int cell) const {
    const Real away = greater(begin_of(axis, cell) - x, x - end_of(axis, cell));
    return greater(away - slack, Real(0));
  }
};

template <class Real>
POINTPROJ_FN Frame<Real> cloud_frame(const Cells<Real>& cells, int cloud) {
  Frame<Real> frame;
  const Real* from = cells.frames + 12 * static_cast<int64_t>(cloud);
  POINTPROJ_UNROLL
  for (int axis = 0; axis < 3; ++axis) {
    frame.low[axis] = from[axis];
    frame.edge[axis] = from[3 + axis];
    frame.per_unit[axis] = inverse(frame.edge[axis]);
    frame.outer_low[axis] = from[6 + axis];
    frame.outer_high[axis] = from[9 + axis];
    frame.shape[axis] = cells.dims[4 * cloud + axis];
  }
  frame.base = cells.dims[4 * cloud + 3];
  frame.flat = cells.shift[cells.count] == 0;
  frame.slack = Real(0);
  return frame;
}

// Slack for distances from q: a point and the border of its cell are computed in different ways.
template <class Real>
POINTPROJ_FN Real slack_for(const Frame<Real>& frame, const Vec3<Real>& q) {
  Real largest = Real(0);
  POINTPROJ_UNROLL
  for (int axis = 0; axis < 3; ++axis) {
    largest = greater(largest, greater(fabs(frame.outer_low[axis]), fabs(frame.outer_high[axis])));
    largest = greater(largest, Real(fabs(q[axis])));
  }
  return kEpsilon<Real> * Real(kRoundings) * largest;
}

template <class Real>
POINTPROJ_FN void set_subgrid(Frame<Real>& frame, const Cells<Real>& cells, int crowd) {
  const Real* from = cells.subframes + 6 * static_cast<int64_t>(crowd);
  const int packed = cells.subdims[crowd];
  POINTPROJ_UNROLL
  for (int axis = 0; axis < 3; ++axis) {
    frame.low[axis] = from[axis];
    frame.edge[axis] = from[3 + axis];
    frame.per_unit[axis] = inverse(frame.edge[axis]);
    frame.shape[axis] = (packed >> (axis * kAxisBits)) & kAxisMask;
  }
}

// The grid inside a cell that is cut.
template <class Real>
POINTPROJ_FN Frame<Real> cell_frame(
    const Cells<Real>& cells, const Frame<Real>& parent, int cell, int x, int y, int z) {
  Frame<Real> frame;
  const int at[3] = {x, y, z};
  POINTPROJ_UNROLL
  for (int axis = 0; axis < 3; ++axis) {
    frame.outer_low[axis] = parent.begin_of(axis, at[axis]);
    frame.outer_high[axis] = parent.end_of(axis, at[axis]);
  }
  set_subgrid(frame, cells, cells.cut[cell]);
  frame.base = cell + cells.shift[cell];
  frame.flat = true;
  frame.slack = parent.slack;
  return frame;
}

}  // namespace pointproj
