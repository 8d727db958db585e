// The torch operators of neighbour lists within a radius: they check, allocate, and choose kernels.
#include "lists.h"

#include <ATen/ops/cumsum.h>

#include "tensors.h"

namespace pointproj {

namespace {

// So few queries leave a GPU idle unless a warp works on each: of short lists, of longer ones; as in the kNN search.
constexpr int kFewQueries = 1 << 14, kManyQueries = 1 << 17;
constexpr int kLongestWarpList = 128;  // in the registers of a GPU's warp

// The points of both sides, their hash grids, and the radius of each query or of all.
struct Problem {
  const Tensor& query_points;
  const Tensor& reference_points;
  double radius;
  const OptionalTensor& radii;
  Batch queries, references;
  Device device;
  Tables query_grid, reference_grid;

  Problem(const Tensor& query_points, const OptionalTensor& query_offsets, const Tensor& reference_points,
          const OptionalTensor& reference_offsets, int64_t clouds, TensorList given, double radius,
          const OptionalTensor& radii)
      : query_points(query_points), reference_points(reference_points), radius(radius), radii(radii),
        device(query_points) {
    check_pair(query_points, reference_points);
    queries = batch_of(query_points, query_offsets, clouds);
    references = batch_of(reference_points, reference_offsets, clouds);
    if (radii) {
      check_like("radii", *radii, {query_points.size(0)}, query_points.scalar_type(), query_points);
    } else {
      check_radius(radius);
    }
    if (!given.empty()) check_hash_grid("reference_grid", given, reference_points, references);
    if (query_points.size(0) > 0) make_grids(given);
  }

  // Points that search among themselves need one grid. The order inside of a cell decides nothing here.
  void make_grids(TensorList given) {
    const LargestRadius largest = {radius, radii ? OptionalTensor(radii->max()) : std::nullopt};
    const Cloud query_cloud{query_points, queries}, reference_cloud{reference_points, references};
    const bool itself = query_points.const_data_ptr() == reference_points.const_data_ptr() &&
                        query_points.size(0) == reference_points.size(0);
    if (!given.empty()) {
      reference_grid = {given[0], given[1], given[2]};
    } else if (itself) {
      reference_grid = make_hash_grids<1>({{reference_cloud}}, largest, false)[0];
    } else {
      const auto made = make_hash_grids<2>({{query_cloud, reference_cloud}}, largest, false);
      query_grid = made[0];
      reference_grid = made[1];
    }
    if (itself) {
      query_grid = reference_grid;
    } else if (!given.empty()) {
      query_grid = make_hash_grids<1>({{query_cloud}}, largest, false)[0];
    }
  }
  template <class Real>
  BallQueries<Real> view() const {
    const Real limit = static_cast<Real>(radius);
    return {view_sorted_points<Real>(query_grid[2]), queries, view_hash_grid<Real>(reference_grid, references),
            {radii ? data<const Real>(*radii) : nullptr, limit, largest_square_within(limit)}};
  }
};

template <int kLength, class Real>
void search_by_thread(const Device& device, const RadiusSearch<Real>& search) {
  device.each(RadiusSearchByThread<Real, kLength>{search}, search.queries.batch.rows);
}

template <class Real>
void search_in_registers(const Device& device, const RadiusSearch<Real>& search) {
  const int queries = search.queries.batch.rows, k = search.nearest.k;
  if (k > 64) {
    device.each_on_gpu(RadiusSearchByWarp<Real, 4>{search}, queries);
  } else if (k > kLongestList) {
    device.each_on_gpu(RadiusSearchByWarp<Real, 2>{search}, queries);
  } else if (device.is_cuda && queries <= (k <= 8 ? kFewQueries : kManyQueries)) {
    device.each_on_gpu(RadiusSearchByWarp<Real, 1>{search}, queries);
  } else if (k <= 8) {
    search_by_thread<8>(device, search);
  } else if (k <= 16) {
    search_by_thread<16>(device, search);
  } else {
    search_by_thread<kLongestList>(device, search);
  }
}

// Distances and rows of the k nearest within the radius (Q, k), and how many there are in all (Q,).
std::tuple<Tensor, Tensor, Tensor> radius_search(
    const Tensor& query_points, const OptionalTensor& query_offsets, const Tensor& reference_points,
    const OptionalTensor& reference_offsets, int64_t clouds, TensorList reference_grid, double radius,
    const OptionalTensor& radii, int64_t k) {
  TORCH_CHECK(k >= 1 && k <= kLargestInt, "k must be positive; got ", k);
  const Problem problem(query_points, query_offsets, reference_points, reference_offsets, clouds, reference_grid,
                        radius, radii);
  const int64_t queries = query_points.size(0);
  const bool in_memory = k > (problem.device.is_cuda ? kLongestWarpList : kLongestList);
  const Tensor distances = at::empty({queries, k}, query_points.options());
  const Tensor rows = empty_longs({queries, k}, query_points), counts = empty_longs({queries}, query_points);
  if (queries == 0) return {distances, rows, counts};
  const Tensor heap_rows = in_memory ? empty_ints({queries, k}, query_points) : Tensor();
  for_positions(query_points, [&](auto real) {
    using Real = decltype(real);
    const RadiusSearch<Real> search{problem.view<Real>(),
                                    {static_cast<int>(k), nullptr, data<int64_t>(rows), data<Real>(distances)},
                                    {data<Real>(distances), in_memory ? data<int>(heap_rows) : nullptr},
                                    data<int64_t>(counts)};
    if (in_memory) return problem.device.each(RadiusSearchInMemory<Real>{search}, queries);
    search_in_registers(problem.device, search);
  });
  return {distances, rows, counts};
}

// Where the neighbours of each query begin (Q + 1,), their rows, ascending, as far as there is room, and their distances
// (capacity,).
std::tuple<Tensor, Tensor, Tensor> radius_list(
    const Tensor& query_points, const OptionalTensor& query_offsets, const Tensor& reference_points,
    const OptionalTensor& reference_offsets, int64_t clouds, TensorList reference_grid, double radius,
    const OptionalTensor& radii, int64_t capacity) {
  TORCH_CHECK(capacity >= 0, "capacity must not be negative; got ", capacity);
  const Problem problem(query_points, query_offsets, reference_points, reference_offsets, clouds, reference_grid,
                        radius, radii);
  const int64_t queries = query_points.size(0);
  const Tensor row_splits = empty_longs({queries + 1}, query_points), rows = empty_longs({capacity}, query_points);
  const Tensor distances = at::empty({capacity}, query_points.options());
  if (queries == 0) return {row_splits.zero_(), rows.fill_(-1), distances.fill_(kInfinity<double>)};
  Tensor ends = row_splits.slice(0, 1);
  for_positions(query_points, [&](auto real) {
    using Real = decltype(real);
    const BallQueries<Real> view = problem.view<Real>();
    problem.device.each(CountWithin<Real>{view, data<int64_t>(row_splits)}, queries);
    at::cumsum_out(ends, ends, 0);
    if (capacity == 0) return;
    const Tensor whole = empty_longs({reference_points.size(0)}, query_points);
    problem.device.each(
        ListWithin<Real>{view, data<const Real>(reference_points), data<const int64_t>(row_splits),
                         data<int64_t>(rows), data<Real>(distances), capacity, data<int64_t>(whole)},
        queries);
  });
  return {row_splits, rows, distances};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pointproj, library) {
  const std::string arguments =
      "(Tensor query_points, Tensor? query_offsets, Tensor reference_points, Tensor? reference_offsets, SymInt clouds, "
      "Tensor[] reference_grid, float radius, Tensor? radii, SymInt ";
  define(library, "native_radius_search" + arguments + "k) -> (Tensor, Tensor, Tensor)", TORCH_FN(radius_search));
  define(library, "native_radius_list" + arguments + "capacity) -> (Tensor, Tensor, Tensor)", TORCH_FN(radius_list));
}

}  // namespace pointproj
