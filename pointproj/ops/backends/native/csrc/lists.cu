// Neighbour lists within a radius: which kernels run, one after another.
#include "lists.h"

#include "index.h"

namespace pointproj::POINTPROJ_DEVICE {

namespace {

// The points of both sides, their hash grids, and the radius of each query or of all.
struct Balls {
  const Clouds& clouds;
  double radius;
  const OptionalTensor& radii;
  OptionalTensor query_grid, reference_grid;

  // Points that search among themselves need one grid. The order inside of a cell decides nothing here.
  Balls(const Clouds& clouds, const OptionalTensor& given, double radius, const OptionalTensor& radii)
      : clouds(clouds), radius(radius), radii(radii), reference_grid(given) {
    const auto& [queries, references, device] = clouds;
    if (radii) {
      check_like("radii", *radii, {queries.batch.rows}, queries.points.scalar_type(), queries.points);
    } else {
      check_radius(radius);
    }
    const int64_t words = sizes_of_hash_grid(references).words();
    if (given) reference_grid = checked_table("reference_grid", *given, words, references.points);
    if (queries.batch.rows == 0) return;
    const LargestRadius largest = {radius, radii ? OptionalTensor(torch::stable::amax(*radii, 0)) : std::nullopt};
    if (clouds.itself()) {
      if (!given) reference_grid = make_hash_grids({references}, device, largest, false);
      query_grid = reference_grid;
    } else if (given) {
      query_grid = make_hash_grids({queries}, device, largest, false);
    } else {
      query_grid = make_hash_grids({queries, references}, device, largest, false);
    }
  }
  template <class Real>
  BallQueries<Real> view() const {
    const auto& [queries, references, device] = clouds;
    int* const own = words_of(*query_grid);
    int* const others = reference_grid ? words_of(*reference_grid) : own + sizes_of_hash_grid(queries).words();
    const Real limit = static_cast<Real>(radius);
    return {view_hash_grid<Real>(own, queries).points, queries.batch, view_hash_grid<Real>(others, references),
            {data<const Real>(radii), limit, largest_square_within(limit)}};
  }
};

// Distances and rows of the k nearest within the radius (Q, k), and how many there are in all (Q,).
std::tuple<Tensor, Tensor, Tensor> radius_search(POINTPROJ_POINTS, const OptionalTensor& reference_grid, double radius,
                                                 const OptionalTensor& radii, int64_t k) {
  POINTPROJ_CHECK(k >= 1 && k <= kLargestInt, "k must be positive; got ", k);
  const Clouds clouds(query_points, query_offsets, reference_points, reference_offsets, clouds_in_all);
  const Balls balls(clouds, reference_grid, radius, radii);
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
                                    {data<Real>(distances), data<int>(heap_rows)},
                                    data<int64_t>(counts)};
    if (in_memory) return clouds.device.each(SearchEach<RadiusSearch<Real>, Heap<Real>>{search}, queries);
    with_list<Real>(k, queries, [&](auto list) {
      clouds.device.each(SearchEach<RadiusSearch<Real>, typename decltype(list)::Type>{search}, queries);
    });
  });
  return {distances, rows, counts};
}

// Where the neighbours of each query begin (Q + 1,), their rows, ascending, as far as there is room, and their
// distances (capacity,).
std::tuple<Tensor, Tensor, Tensor> radius_list(POINTPROJ_POINTS, const OptionalTensor& reference_grid, double radius,
                                               const OptionalTensor& radii, int64_t capacity) {
  POINTPROJ_CHECK(capacity >= 0, "capacity must not be negative; got ", capacity);
  const Clouds clouds(query_points, query_offsets, reference_points, reference_offsets, clouds_in_all);
  const Balls balls(clouds, reference_grid, radius, radii);
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
    clouds.device.each(CountWithin<Real>{view, data<int64_t>(row_splits)}, queries);
    const std::optional<ScalarType> same_dtype;
    call("aten::cumsum_", "", torch::stable::narrow(row_splits, 0, 1, queries), /*dim=*/int64_t(0), same_dtype);
    if (capacity == 0) return;
    const Tensor whole = empty_longs({reference_points.size(0)}, query_points);
    clouds.device.each(
        ListWithin<Real>{view, data<const Real>(reference_points), data<const int64_t>(row_splits),
                         data<int64_t>(rows), data<Real>(distances), capacity, data<int64_t>(whole)},
        queries);
  });
  return {row_splits, rows, distances};
}

const std::string kArguments = "(" + kPoints + "Tensor? reference_grid, float radius, Tensor? radii, SymInt ";
const std::string kResults = ") -> (Tensor, Tensor, Tensor)";
const Operators registered(__FILE__,
                           {{"native_radius_search", kArguments + "k" + kResults, TORCH_BOX(&radius_search)},
                            {"native_radius_list", kArguments + "capacity" + kResults, TORCH_BOX(&radius_list)}});

}  // namespace

}  // namespace pointproj::POINTPROJ_DEVICE
