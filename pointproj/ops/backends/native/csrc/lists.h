// Neighbours within a radius as lists: the nearest of each query and the count of all, or all of them.
//
// Every query goes through its ball in the hash grid of the searched points. Queries are taken in the order of their
// own cells, so that threads side by side read the same points. Where a ball holds many more than the nearest that are
// wanted, these are searched for in the cell list instead, shell by shell.
#pragma once

#include "hash_grid.h"
#include "search.h"

namespace pointproj::POINTPROJ_DEVICE {

constexpr int kGivenUp = -1;

template <class Real, class Take>
struct BallVisitor {
  Real square;
  Take& take;
  int found = 0;

  POINTPROJ_FN Real limit() const { return square; }
  template <class Lanes>
  POINTPROJ_FN void process(Lanes& lanes, int, const Point<Real>& point, Real squared, bool exists) {
    const bool hit = exists && squared <= square;
    const unsigned hits = lanes.ballot(hit);
    take(found + lanes.bits_before(hits), squared, point.row, hit);
    found += lanes.bit_count(hits);
  }
  template <class Lanes>
  POINTPROJ_FN void flush(Lanes&) const {}
};

// The queries in the order of their cells, and the points that they search.
template <class Real>
struct BallQueries {
  SortedPoints<Real> points;
  Batch batch;
  HashGrid<Real> others;
  Radii<Real> radii;

  // Calls take(rank, squared distance, row, hit) with a candidate in each lane; ranks number the hits. Their count, or
  // kGivenUp if there are more candidates than the budget.
  template <class Lanes, class Take>
  POINTPROJ_FN int each_within(Lanes& lanes, const Point<Real>& query, Take take, int budget = kNoRow) const {
    const Real radius = radii.of(query.row);
    const bool searches = is_finite(query.position) && radius >= Real(0);
    if (!lanes.any(searches)) return 0;
    const Vec3<Real> q = searches ? query.position : Vec3<Real>{{0, 0, 0}};
    BallVisitor<Real, Take> visitor{radii.square_of(query.row), take};
    const bool complete =
        visit_ball(others, batch.cloud_of(query.row), q, searches, radius, lanes, visitor, budget);
    return complete ? visitor.found : kGivenUp;
  }
};

// ---- the nearest within the radius

// Candidates in a ball beyond which the k nearest are found faster shell by shell: where the ball holds about 4 k.
constexpr int kCandidates = 64, kCandidatesOfEach = kOnGpu ? 8 : 12, kMostCandidates = 1 << 24;

template <class Real_>
struct RadiusSearch {
  using Real = Real_;
  BallQueries<Real> queries;
  Nearest<Real> nearest;
  Heaps<Real> heaps;
  Postponed postponed;

  template <class List, class Lanes>
  POINTPROJ_FN void search(Lanes& lanes, int item) const {
    const Point<Real> query = queries.points.load(item);
    using Inserted = std::conditional_t<List::kLanes == 32, Gathered<List>, List>;
    Inserted list = heaps.template make<Inserted>(query.row, nearest.k, kInfinity<Real>);
    const int budget = kCandidates + kCandidatesOfEach * lesser(nearest.k, kMostCandidates / kCandidatesOfEach);
    const int found = queries.each_within(
        lanes, query,
        [&](int, Real squared, int row, bool hit) {
          list.insert(lanes, squared, row, hit && squared < kInfinity<Real>);
        },
        budget);
    if (found == kGivenUp) return postponed.add(lanes, query.row, Progress::kGivenUp);
    nearest.write(lanes, list, query.row, is_finite(query.position), found);
  }
};

// ---- all within the radius

template <class Real>
struct CountWithin {
  using Number = float;
  static constexpr int kLanes = 32;

  BallQueries<Real> queries;
  int64_t* row_splits;  // (Q + 1,): 0, then the counts

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int at) const {
    const Point<Real> query = queries.points.load(at);
    const int found = queries.each_within(lanes, query, [](int, Real, int, bool) {});
    if (lanes.lane() != 0) return;
    row_splits[query.row + 1] = found;
    if (at == 0) row_splits[0] = 0;
  }
};

// The rows of each query in ascending order and their distances, up to the capacity; places left over get -1 and
// infinity.
template <class Real>
struct ListWithin {
  using Number = float;
  static constexpr int kLanes = 32;

  BallQueries<Real> queries;
  const Real* reference_points;  // (N, 3)
  const int64_t* row_splits;     // (Q + 1,)
  int64_t* rows;                 // (capacity,)
  Real* distances;               // (capacity,)
  int64_t capacity;
  int64_t* overflow;  // (N,): all rows of the one query of which only the first fit

  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes& lanes, int at) const {
    fill_rest(lanes, at);
    const Point<Real> query = queries.points.load(at);
    const int64_t begin = row_splits[query.row], end = row_splits[query.row + 1];
    if (begin == end || begin >= capacity) return;
    int64_t* to = end <= capacity ? rows + begin : overflow;
    queries.each_within(lanes, query, [&](int rank, Real, int row, bool hit) {
      if (hit) to[rank] = row;
    });
    lanes.sync();
    sort_rows(lanes, to, static_cast<int>(end - begin));
    for (int64_t i = begin + lanes.lane(); i < lesser(end, capacity); i += Lanes::width) {
      const int64_t row = to[i - begin];
      const Vec3<Real> position = load_position(reference_points, static_cast<int>(row));
      distances[i] = sqrt(squared_distance<Real>(query.position, position));
      if (end > capacity) rows[i] = row;
    }
  }

  // Each query fills its share of the places left over.
  template <class Lanes>
  POINTPROJ_FN void fill_rest(Lanes& lanes, int at) const {
    const int64_t count = queries.batch.rows, first = row_splits[count] + static_cast<int64_t>(at) * Lanes::width;
    for (int64_t i = first + lanes.lane(); i < capacity; i += count * Lanes::width) {
      rows[i] = -1;
      distances[i] = kInfinity<Real>;
    }
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
