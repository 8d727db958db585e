// Neighbour lists within a radius: which kernels run, one after another.
#include "lists.h"
#include "index.h"

namespace pointproj::POINTPROJ_DEVICE {
namespace {

constexpr int kPostponedThreads = 1 << 18, kPostponedWarps = 3 << 10;

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
  OptionalTensor postponed;  // (2 Q + 2,): queries that a kernel leaves to the next, of two; the counts of both

  // Points that search among themselves need one grid. Results do not depend on the order of points in a cell.
  explicit Balls(const BallArguments& given, bool postpones = false)
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
    if (postpones) postponed = empty_ints({2 * int64_t(queries.batch.rows) + 2}, queries.points);
    const Build build{postpones ? data<int>(*postponed) + 2 * int64_t(queries.batch.rows) : nullptr};
    const LargestRadius largest = {radius, radii ? OptionalTensor(torch::stable::amax(*radii, 0)) : std::nullopt};
    if (sets.itself()) {
      if (!is_given) reference_grid = make_hash_grids({references}, device, largest, false, build);
      if (is_given && postpones) device.clear(build.cleared, 2 * sizeof(int));
      query_grid = reference_grid;
    } else if (is_given) {
      query_grid = make_hash_grids({queries}, device, largest, false, build);
    } else {
      query_grid = make_hash_grids({queries, references}, device, largest, false, build);
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

struct NearestArguments {
  Clouds points;
  OptionalTensor reference_grid, cell_list;
  double radius;
  OptionalTensor radii;
  int64_t most;
  POINTPROJ_FIELDS(points, reference_grid, cell_list, radius, radii, most)
};

// Those of `search` that the balls left, from the cell list, which is made if there are any. `again` has room for as
// many queries.
template <class Real>
void search_postponed(const PointSets& sets, const OptionalTensor& given, const RadiusSearch<Real>& balls,
                      const Postponed& again) {
  const auto& [queries, references, device] = sets;
  const int count = kOnGpu ? queries.batch.rows : *balls.postponed.count;
  if (count == 0) return;
  const Tensor table = given ? *given : make_cell_list(references, device, {nullptr, balls.postponed.count});
  const int k = balls.nearest.k;
  using InFull = Knn<Real, Levels::kBoth, true>;
  const InFull search{data<const Real>(queries.points), data<const Real>(references.points), queries.batch,
                      view_cell_list<Real>(words_of(table), references), false, balls.queries.radii, balls.nearest,
                      balls.heaps, balls.postponed};
  if (k > kLongestList) {
    const int threads = lesser(count, kPostponedThreads);
    return device.each(SearchPostponed<InFull, Heap<Real>>{search, {}}, threads);
  }
  if constexpr (kOnGpu) {
    using OneLevel = Knn<Real, Levels::kOne, true>;
    const int warps = lesser(count, kPostponedWarps);
    with_warp_list<Real>(k, [&](auto list) {
      using List = typename decltype(list)::type;
      device.each(SearchPostponed<OneLevel, List>{with_levels<Levels::kOne>(search, search.postponed), again}, warps);
      device.each(SearchPostponed<InFull, List>{with_levels<Levels::kBoth>(search, again), {}}, warps);
    });
  } else {
    with_length(k, [&](auto length) {
      device.each(SearchPostponed<InFull, SortedList<Real, length>>{search, {}}, count);
    });
  }
}

// Distances and rows of the k nearest within the radius (Q, k), and how many there are in all (Q,), or k + 1 if there
// are more.
Tensors<3> radius_search(const NearestArguments& given) {
  const int64_t k = given.most;
  POINTPROJ_CHECK(k >= 1 && k <= kLargestInt, "k must be positive; got ", k);
  const BallArguments within{given.points, given.reference_grid, given.radius, given.radii, k};
  const Balls balls(within, true);
  const PointSet& references = balls.sets.references;
  const OptionalTensor cell_list =
      given.cell_list ? OptionalTensor(checked_table("cell_list", *given.cell_list,
                                                     sizes_of(references).cell_list().words(), references.points))
                      : std::nullopt;
  const Tensor& query_points = given.points.query_points;
  const int64_t queries = query_points.size(0);
  const bool in_memory = k > kLongestList;
  const Tensor distances = empty({queries, k}, query_points);
  const Tensor rows = empty_longs({queries, k}, query_points), counts = empty_longs({queries}, query_points);
  if (queries == 0) return {distances, rows, counts};
  const Tensor heap_rows = empty_ints({in_memory ? queries : 0, k}, query_points);
  int* const first = data<int>(*balls.postponed);
  const Device& device = balls.sets.device;
  for_positions(query_points, [&](auto real) {
    using Real = decltype(real);
    const RadiusSearch<Real> search{
        balls.view<Real>(),
        {static_cast<int>(k), nullptr, data<int64_t>(rows), data<Real>(distances), data<int64_t>(counts)},
        {data<Real>(distances), data<int>(heap_rows)},
        {first, first + 2 * queries}};
    if (in_memory) {
      device.each(SearchEach<RadiusSearch<Real>, Heap<Real>>{search}, queries);
    } else {
      with_list<Real>(k, queries, [&](auto list) {
        using List = typename decltype(list)::type;
        // One block more than for kNN, since a ball needs fewer registers: lists of 32 139 us, 147 without it.
        device.each(SearchEach<RadiusSearch<Real>, List, List::kAtOnce + List::kAtOnce / 4>{search}, queries);
      });
    }
    search_postponed(balls.sets, cell_list, search, {first + queries, first + 2 * queries + 1});
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
