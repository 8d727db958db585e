// Searching outwards from a query, ring by ring of cells, until nothing closer can follow.
#pragma once

#include "cells.h"

namespace pointproj {

constexpr int kLargestFirstRing = 3;  // the first ring visited includes its inside
constexpr int kPlenty = 3;            // it should hold so many times the neighbours wanted
constexpr int kEverything = 1 << 20;  // a ring around all cells, for what a bound leaves of a grid that may be large

enum class Level {
  kOne,       // only one: for a query in a crowd that of the sub-cells. Gives up where the other has to be seen: most
              // queries never need it, and one thread needs few registers then
  kBoth,      // searches crowds by their sub-cells
  kSubcells,  // inside of a crowd
};

// A visitor has
//   limit()                             squared distance beyond which nothing matters, the same in all lanes
//   wanted()                            neighbours searched for
//   visit(lanes, points, begin, count)  meet a run of sorted points; each lane brings its own
template <class Real, Level level, class Lanes, class Visitor>
struct RingSearch {
  const Cells<Real>& cells;
  const Frame<Real>& frame;
  const Vec3<Real>& q;
  Lanes& lanes;
  Visitor& visitor;
  int home = -1;  // a crowd that has been searched

  // False if it gave up, which it also does when the lanes have no patience left. Lanes with no search of their own,
  // or one that has ended, stay with the others of the warp.
  POINTPROJ_FN bool operator()(bool searches) {
    int at[3];
    POINTPROJ_UNROLL
    for (int axis = 0; axis < 3; ++axis) at[axis] = frame.along(q[axis], axis);
    if constexpr (level == Level::kBoth) {
      // In its own crowd a query finds a bound that leaves little of the others.
      const int cell = frame.cell_at(q);
      if (is_cut(cell)) {
        if (!visit_crowd(cell, at[0], at[1], at[2])) return false;
        home = cell;
      }
    }
    int ring = first_ring(at), inner = -1;  // inner: the ring up to which all has been visited
    bool whole = true;
    while (lanes.anywhere(searches)) {
      if (level != Level::kOne && visitor.limit() < kInfinity<Real>) ring = kEverything;
      int low[3], high[3];
      bounds(at, ring, low, high);
      whole = visit_box(at, low, high, inner, searches) && whole;
      const Real following = beyond(at, ring);
      searches = searches && whole && following < kInfinity<Real> && following <= visitor.limit();
      inner = ring;
      if (searches) ring += 1 + ring / 2;
    }
    return whole;
  }

  POINTPROJ_FN int subcell(int cell) const {
    return level == Level::kSubcells || frame.flat ? cell : cell + cells.shift[cell];
  }
  POINTPROJ_FN bool is_cut(int cell) const { return subcell(cell + 1) - subcell(cell) > 1; }

  // So wide that the points around the query, if they go on as in its row, are plenty. Only its own cell if that holds
  // plenty: the bound found there leaves little of others.
  POINTPROJ_FN int first_ring(const int* at) const {
    const int row = frame.base + (at[2] * frame.shape[1] + at[1]) * frame.shape[0];
    const int left = subcell(row + greater(at[0] - 1, 0));
    const int right = subcell(row + lesser(at[0] + 2, frame.shape[0]));
    const float points = static_cast<float>(cells.start[right] - cells.start[left]);
    const float plenty = static_cast<float>(kPlenty * visitor.wanted());
    if (points >= plenty) {
      const int own = cells.start[subcell(row + at[0] + 1)] - cells.start[subcell(row + at[0])];
      if (static_cast<float>(own) >= plenty) return 0;
    }
    int ring = 1;
    for (int larger = 2; larger <= kLargestFirstRing; ++larger) {
      const float side = static_cast<float>(2 * ring + 1);
      if (points * side * side * side < 3 * plenty) ring = larger;
    }
    return ring;
  }

  POINTPROJ_FN void bounds(const int* at, int ring, int* low, int* high) const {
    const Real limit = visitor.limit();
    POINTPROJ_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      low[axis] = greater(at[axis] - ring, 0);
      high[axis] = lesser(at[axis] + ring, frame.shape[axis] - 1);
      if (limit < kInfinity<Real>) {  // enough is found: what can still be closer
        const Real far = sqrt(limit) + frame.slack;
        low[axis] = greater(low[axis], frame.along(q[axis] - far, axis));
        high[axis] = lesser(high[axis], frame.along(q[axis] + far, axis));
      }
    }
  }

  // Squared distance to the nearest cell outside a ring around `at`, never too large.
  POINTPROJ_FN Real beyond(const int* at, int ring) const {
    Real outside[3], nearest = kInfinity<Real>;
    POINTPROJ_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const Real away = greater(frame.outer_low[axis] - q[axis], q[axis] - frame.outer_high[axis]);
      outside[axis] = greater(away - frame.slack, Real(0));
      outside[axis] *= outside[axis];
    }
    POINTPROJ_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const Real rest = outside[(axis + 1) % 3] + outside[(axis + 2) % 3];
      if (at[axis] - ring > 0) {
        const Real face = greater(q[axis] - frame.face(axis, at[axis] - ring) - frame.slack, Real(0));
        nearest = lesser(nearest, rest + face * face);
      }
      if (at[axis] + ring < frame.shape[axis] - 1) {
        const Real face = greater(frame.face(axis, at[axis] + ring + 1) - q[axis] - frame.slack, Real(0));
        nearest = lesser(nearest, rest + face * face);
      }
    }
    return nearest;
  }

  // The j-th of the numbers from low to high, those nearest `at` first.
  POINTPROJ_FN static int nearest_first(int j, int at, int low, int high) {
    const int left = greater(at - low, 0), both = lesser(left, greater(high - at, 0));
    if (j <= 2 * both) return at + (j % 2 == 1 ? -(j + 1) / 2 : j / 2);
    return left > both ? at - j + both : at + j - both;
  }

  // Of the cells from `first` to `last` along an axis those within a squared distance.
  POINTPROJ_FN void narrow(Real within, int axis, int* first, int* last) const {
    if (within < Real(0)) {
      *last = *first - 1;
    } else if (within < kInfinity<Real>) {
      const Real far = sqrt(within) + frame.slack;
      *first = greater(*first, frame.along(q[axis] - far, axis));
      *last = lesser(*last, frame.along(q[axis] + far, axis));
    }
  }

  // The part of a row of cells that the bound can reach.
  POINTPROJ_FN void reach(int y, int z, int* first, int* last) const {
    const Real across_y = frame.gap(q[1], 1, y), across_z = frame.gap(q[2], 2, z);
    narrow(visitor.limit() - (across_y * across_y + across_z * across_z), 0, first, last);
  }

  // Visit the cells from `low` to `high`, but for those up to ring `inner`, within the bound; none unless `searches`.
  POINTPROJ_FN bool visit_box(const int* at, const int* low, const int* high, int inner, bool searches) {
    if constexpr (level == Level::kOne) {
      return visit_rows(at, low, high, inner, searches);
    } else {
      return visit_planes(at, low, high, inner, searches);
    }
  }

  // The lanes take the rows of a small box all at once.
  POINTPROJ_FN bool visit_rows(const int* at, const int* low, const int* high, int inner, bool searches) {
    const int width = high[1] - low[1] + 1;
    int height = searches && width > 0 ? high[2] - low[2] + 1 : 0;
    bool whole = true;
    const int parts = lanes.anywhere(inner >= 0) ? 2 : 1;  // rows seen before have only their two new ends
    for (int part = 0; part < parts; ++part) {
      int row_y = lanes.lane(), row_z = 0;
      for (int rows = 0; lanes.anywhere(rows < width * height); rows += Lanes::width) {
        while (row_z < height && row_y >= width) {
          row_y -= width;
          row_z += 1;
        }
        // The rows nearest the query first: they tighten the bound.
        const int y = nearest_first(row_y, at[1], low[1], high[1]);
        const int z = nearest_first(row_z, at[2], low[2], high[2]);
        const bool seen = abs(z - at[2]) <= inner && abs(y - at[1]) <= inner;
        const bool there = row_z < height && (part == 0 || seen);
        row_y += Lanes::width;
        if (!visit_part(there, seen, part, inner, at, low, high, y, z)) {
          whole = false;
          height = 0;
        }
      }
    }
    return whole;
  }

  // Plane by plane, of each only what the bound leaves: a box in or near a crowd may be large.
  POINTPROJ_FN bool visit_planes(const int* at, const int* low, const int* high, int inner, bool searches) {
    const int depth = searches ? high[2] - low[2] + 1 : 0, parts = inner >= 0 ? 2 : 1;
    for (int part = 0; part < parts; ++part) {
      for (int j = 0; j < depth; ++j) {
        const int z = nearest_first(j, at[2], low[2], high[2]);
        const bool near = abs(z - at[2]) <= inner;
        int first = low[1], last = high[1];
        if (part == 1) {
          first = greater(first, at[1] - inner);
          last = near ? lesser(last, at[1] + inner) : first - 1;
        }
        const Real across = frame.gap(q[2], 2, z);
        narrow(visitor.limit() - across * across, 1, &first, &last);
        for (int row = 0; row <= last - first; row += Lanes::width) {
          const bool there = row + lanes.lane() <= last - first;
          const int y = nearest_first(lesser(row + lanes.lane(), last - first), at[1], first, last);
          const bool seen = near && abs(y - at[1]) <= inner;
          if (!visit_part(there, seen, part, inner, at, low, high, y, z)) return false;
        }
      }
    }
    return true;
  }

  // What is new of a row, of each lane its own: of one seen before its left or its right end.
  POINTPROJ_FN bool visit_part(bool there, bool seen, int part, int inner, const int* at, const int* low,
                               const int* high, int y, int z) {
    int first = low[0], last = high[0];
    if (seen && part == 0) last = lesser(last, at[0] - inner - 1);
    if (seen && part == 1) first = greater(first, at[0] + inner + 1);
    if (there) reach(y, z, &first, &last);
    return visit_row(!there || first > last, y, z, first, last);
  }


  // Cells of one row, of each lane its own.
  POINTPROJ_FN bool visit_row(bool idle, int y, int z, int first, int last) {
    int begin = 0, count = 0;
    bool crowded = false;
    if (!idle) {
      const int cell = frame.base + (z * frame.shape[1] + y) * frame.shape[0];
      const int begin_cell = subcell(cell + first), end_cell = subcell(cell + last + 1);
      crowded = end_cell - begin_cell != last + 1 - first;
      if (!crowded) {
        begin = cells.start[begin_cell];
        count = cells.start[end_cell] - begin;
      }
    }
    visitor.visit(lanes, cells.points, begin, count);
    if (!lanes.has_patience(count)) return false;
    if constexpr (level == Level::kOne) {
      if (lanes.ballot(crowded)) return false;
    }
    if constexpr (level == Level::kBoth) {
      unsigned waiting = lanes.ballot(crowded);
      while (waiting) {
        const int source = lanes.lowest_bit(waiting);
        waiting &= waiting - 1;
        const bool whole = visit_crowds(
            lanes.take(first, source), lanes.take(last, source), lanes.take(y, source), lanes.take(z, source));
        if (!whole) return false;
      }
    }
    return true;
  }

  POINTPROJ_FN bool visit_crowd(int cell, int x, int y, int z) {
    const Frame<Real> inside = cell_frame(cells, frame, cell, x, y, z);
    return RingSearch<Real, Level::kSubcells, Lanes, Visitor>{cells, inside, q, lanes, visitor}(true);
  }

  // A run of cells, some of them cut: all lanes go through it together, cell by cell.
  POINTPROJ_FN bool visit_crowds(int first, int last, int y, int z) {
    const Real across_y = frame.gap(q[1], 1, y), across_z = frame.gap(q[2], 2, z);
    for (int x = first; x <= last; ++x) {
      const Real along = frame.gap(q[0], 0, x);
      if (!(along * along + across_y * across_y + across_z * across_z <= visitor.limit())) continue;
      const int cell = frame.base + (z * frame.shape[1] + y) * frame.shape[0] + x;
      const int begin_cell = subcell(cell), end_cell = subcell(cell + 1);
      if (cell == home) continue;
      if (end_cell - begin_cell > 1) {
        if (!visit_crowd(cell, x, y, z)) return false;
      } else {
        const int begin = cells.start[begin_cell], count = cells.start[end_cell] - begin;
        visitor.visit(lanes, cells.points, begin, lanes.lane() == 0 ? count : 0);
      }
    }
    return true;
  }
};

// Search a cloud from a finite point, where `searches`; false if it gave up.
template <Level level, class Real, class Lanes, class Visitor>
POINTPROJ_FN bool search_rings(
    const Cells<Real>& cells, int cloud, const Vec3<Real>& q, bool searches, Lanes& lanes, Visitor& visitor) {
  Frame<Real> frame = cloud_frame(cells, cloud);
  searches = searches && frame.low[0] < kInfinity<Real>;  // the cloud has a finite point
  if (!lanes.anywhere(searches)) return true;
  frame.slack = slack_for(frame, q);
  RingSearch<Real, level, Lanes, Visitor> search{cells, frame, q, lanes, visitor};
  if constexpr (level == Level::kOne) {
    const int cell = frame.cell_at(q);
    if (search.is_cut(cell)) {
      const int at[3] = {frame.along(q[0], 0), frame.along(q[1], 1), frame.along(q[2], 2)};
      const Real outside = search.beyond(at, 0);
      frame = cell_frame(cells, Frame<Real>(frame), cell, at[0], at[1], at[2]);
      lanes.begin_patience();
      return search(searches) && !(outside <= visitor.limit());
    }
  }
  return search(searches);
}

}  // namespace pointproj
