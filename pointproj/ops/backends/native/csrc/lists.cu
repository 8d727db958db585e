// Neighbour lists within a radius: which kernels run, one after another.
#include "lists.h"
#include "index.h"

namespace pointproj::POINTPROJ_DEVICE {
namespace {

struct BallArguments {
  Clouds points;
  OptionalTensor reference_grid;
  double radius;
  OptionalTensor radii;  // (Q,), instead of the radius
  int64_t most;          // neighbours, at most: of each query, or in the whole list
  POINTPROJ_FIELDS(points, reference_grid, radius, radii, most)
};

// The points and the hash grids of both sides, and the radius of each query or of all.
struct Balls {
  PointSets sets;
  double radius;
  const OptionalTensor& radii;
  OptionalTensor query_grid, reference_grid;

  // Points that search among themselves need one grid. Results do not depend on the order of points in a cell.
  explicit Balls(const BallArguments& given)
      : sets(given.points), radius(given.radius), radii(given.radii), reference_grid(given.reference_grid) {
    const auto& [queries, references, device] = sets;
    if (radii) {
      check_like("radii", *radii, {queries.batch.rows}, queries.points.scalar_type(), queries.points);
    } else {
      check_radius(radius);
    }
    const int64_t words = sizes_of(references).hash_grid().words();
    const bool is_given = reference_grid.has_value();
    if (is_given) reference_grid = checked_table("reference_grid", *reference_grid, words, references.points);
    if (queries.batch.rows == 0) return;
    const LargestRadius largest = {radius, radii ? OptionalTensor(torch::stable::amax(*radii, 0)) : std::nullopt};
    if (sets.itself()) {
      if (!is_given) reference_grid = make_hash_grids({references}, device, largest, false);
      query_grid = reference_grid;
    } else if (is_given) {
      query_grid = make_hash_grids({queries}, device, largest, false);
    } else {
      query_grid = make_hash_grids({queries, references}, device, largest, false);
    }
  }
  template <class Real>
  BallQueries<Real> view() const {
    const auto& [queries, references, device] = sets;
    int* const own = words_of(*query_grid);
    int* const others = reference_grid ? words_of(*reference_grid) : own + sizes_of(queries).hash_grid().words();
    const Real limit = static_cast<Real>(radius);
    return {view_hash_grid<Real>(own, queries).points, queries.batch, view_hash_grid<Real>(others, references),
            {data<const Real>(radii), limit, largest_square_within(limit)}};
  }
};

// Distances and rows of the k nearest within the radius (Q, k), and how many there are in all (Q,).
Tensors<3> radius_search(const BallArguments& given) {
  const int64_t k = given.most;
  POINTPROJ_CHECK(k >= 1 && k <= kLargestInt, "k must be positive; got ", k);
  const Balls balls(given);
  const Tensor& query_points = given.points.query_points;
  const int64_t queries = query_points.size(0);
  const bool in_memory = k > kLongestList;
  const Tensor distances = empty({queries, k}, query_points);
  const Tensor rows = empty_longs({queries, k}, query_points), counts = empty_longs({queries}, query_points);
  if (queries == 0) return {distances, rows, counts};
  const Tensor heap_rows = empty_ints({in_memory ? queries : 0, k}, query_points);
  for_positions(query_points, [&](auto real) {
    using Real = decltype(real);
    const RadiusSearch<Real> search{balls.view<Real>(),
                                    {static_cast<int>(k), nullptr, data<int64_t>(rows), data<Real>(distances)},
                                    {data<Real>(distances), data<int>(heap_rows)}, data<int64_t>(counts)};
    if (in_memory) return balls.sets.device.each(SearchEach<RadiusSearch<Real>, Heap<Real>>{search}, queries);
    with_list<Real>(k, queries, [&](auto list) {
      balls.sets.device.each(SearchEach<RadiusSearch<Real>, typename decltype(list)::type>{search}, queries);
    });
  });
  return {distances, rows, counts};
}

// Where the neighbours of each query begin (Q + 1,), and the first `capacity` of all neighbours: their rows, ascending
// for each query, and their distances (capacity,).
Tensors<3> radius_list(const BallArguments& given) {
  const int64_t capacity = given.most;
  POINTPROJ_CHECK(capacity >= 0, "capacity must not be negative; got ", capacity);
  const Balls balls(given);
  const Tensor &query_points = given.points.query_points, &reference_points = given.points.reference_points;
  const int64_t queries = query_points.size(0);
  Tensor row_splits = empty_longs({queries + 1}, query_points), rows = empty_longs({capacity}, query_points);
  Tensor distances = empty({capacity}, query_points);
  if (queries == 0) {
    torch::stable::zero_(row_splits);
    torch::stable::fill_(rows, -1);
    torch::stable::fill_(distances, kInfinity<double>);
    return {row_splits, rows, distances};
  }
  for_positions(query_points, [&](auto real) {
    using Real = decltype(real);
    const BallQueries<Real> view = balls.view<Real>();
    balls.sets.device.each(CountWithin<Real>{view, data<int64_t>(row_splits)}, queries);
    const std::optional<ScalarType> same_dtype;
    call("aten::cumsum_", "", torch::stable::narrow(row_splits, 0, 1, queries), /*dim=*/int64_t(0), same_dtype);
    if (capacity == 0) return;
    const Tensor overflow = empty_longs({reference_points.size(0)}, query_points);
    balls.sets.device.each(
        ListWithin<Real>{view, data<const Real>(reference_points), data<const int64_t>(row_splits),
                         data<int64_t>(rows), data<Real>(distances), capacity, data<int64_t>(overflow)},
        queries);
  });
  return {row_splits, rows, distances};
}

const Operators registered(__FILE__, {operator_of<radius_search>("native_radius_search"),
                                      operator_of<radius_list>("native_radius_list")});

}  // namespace
}  // namespace pointproj::POINTPROJ_DEVICE
