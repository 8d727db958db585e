// The torch operators of kNN: they check, allocate, and hand tasks to the device that the tensors are on.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <tuple>

#include "listed.h"
#include "nearest.h"
#include "torch_device.h"

namespace pointproj {

namespace {

// So few leave a GPU idle unless a warp works on each: of short lists, of longer ones.
constexpr int kFewQueries = 1 << 14, kMoreQueries = 1 << 17;
constexpr int kLeftWarps = 1 << 12, kLeftThreads = 1 << 18;

CellSizes cell_sizes(const Tensor& points, int64_t clouds) {
  const int64_t rows = points.size(0);
  // Fine cells spare distances; for many points on a GPU the tables themselves are what takes time.
  const int64_t density = !points.is_cuda() ? 2 : rows <= 1 << 18 ? 4 : 1;
  return {rows, clouds, density};
}

template <class Real>
Cells<Real> view_cells(const Tensor& points, int64_t clouds, at::TensorList tables) {
  const CellSizes sizes = cell_sizes(points, clouds);
  TORCH_CHECK(tables.size() == 3, "cells must be the 3 tables of build_cell_list; got ", tables.size());
  check_like("cells[0]", tables[0], {sizes.reals()}, points.scalar_type(), points);
  check_like("cells[1]", tables[1], {sizes.numbers()}, at::kInt, points);
  check_like("cells[2]", tables[2], sorted_points_shape(points), points.scalar_type(), points);
  return Cells<Real>(sizes, const_cast<Real*>(tables[0].const_data_ptr<Real>()),
                     const_cast<int*>(tables[1].const_data_ptr<int>()), view_points<Real>(tables[2]));
}

std::tuple<Tensor, Tensor, Tensor> build_cells(const Tensor& points, const OptionalTensor& offsets, int64_t clouds) {
  check_points("points", points);
  const Batch batch = batch_of(points, offsets, clouds);
  const Device device(points);
  const CellSizes sizes = cell_sizes(points, clouds);
  TORCH_CHECK(sizes.subcells() + 2 <= kLargestInt, "too many points for 32-bit cell numbers: ", points.size(0));
  Tensor reals = at::empty({sizes.reals()}, points.options());
  Tensor numbers = ints(sizes.numbers(), points);
  Tensor sorted = empty_sorted_points(points);
  Tensor place = at::empty({points.size(0), 2}, numbers.options());
  for_positions(points, [&](auto real) {
    using Real = decltype(real);
    const int parts = BuildCells<Real>::parts_of(sizes.rows, clouds);
    Tensor boxes = at::empty({clouds, parts, 6}, points.options());
    const int64_t slots = sizes.subcells() + 1;
    const auto scratch =
        ints(2 * slots + sizes.cells() + 7 * sizes.cuts() + 1 + cuda::kMostBlocks, points);
    int* occupancy = scratch.mutable_data_ptr<int>();
    int* suboccupancy = occupancy + slots;
    int* extra = suboccupancy + slots;
    int* extent = extra + sizes.cells();
    int* cut_cells = extent + 6 * sizes.cuts();
    int* cut_count = cut_cells + sizes.cuts();
    const Cells<Real> cells(sizes, reals.mutable_data_ptr<Real>(), numbers.mutable_data_ptr<int>(),
                            view_points<Real>(sorted));
    device.build(
        BuildCells<Real>{points.const_data_ptr<Real>(), batch, sizes, cells, boxes.mutable_data_ptr<Real>(), parts,
                         place.mutable_data_ptr<int>(), occupancy, suboccupancy, extra, extent, cut_cells, cut_count,
                         cut_count + 1},
        slots);
  });
  if (in_fixed_order(device)) sort_stably(points, place, sorted);
  return {reals, numbers, sorted};
}

// ---- search

template <int kLength, bool many, class Real>
void search_alone(const Device& device, const Search<Real>& search) {
  const int queries = search.queries.rows;
#ifdef POINTPROJ_CUDA
  if (device.is_cuda) {
    return cuda::each_thread(SearchAlone<Real, kLength, Level::kOne, many>{search}, queries, device.stream);
  }
#endif
  device.each(SearchAlone<Real, kLength, Level::kBoth, false>{search}, queries);
}

#ifdef POINTPROJ_CUDA
// What the first kernel has left: if it may be much, single threads begin, and warps finish what takes them long.
template <class Real>
void search_left(const Device& device, const Search<Real>& search, const Search<Real>& again) {
  const int queries = search.queries.rows;
  const bool alone = queries > kMoreQueries && search.k <= kShortestList;
  if (alone) {
    const int threads = std::min(queries, kLeftThreads);
    cuda::each_thread(SearchLeftAlone<Real>{search, again, threads}, threads, device.stream);
  }
  const int warps = std::min(queries, kLeftWarps);
  cuda::each_warp(SearchLeft<Real>{alone ? again : search, warps}, warps, device.stream);
}
#endif

template <class Real>
void search_in_registers(const Device& device, const Search<Real>& search, [[maybe_unused]] const Search<Real>& again) {
#ifdef POINTPROJ_CUDA
  if (device.is_cuda) cuda::clear(search.left_count, 2, device.stream);
  if (device.is_cuda && search.queries.rows <= (search.k <= kShortestList ? kFewQueries : kMoreQueries)) {
    cuda::each_warp(SearchTogether<Real>{search}, search.queries.rows, device.stream);
  } else
#endif
  if (device.is_cuda && search.k <= kShortestList && search.queries.rows > kMoreQueries) {
    search_alone<kShortestList, true>(device, search);
  } else if (search.k <= kShortestList) {
    search_alone<kShortestList, false>(device, search);
  } else if (search.k <= 16) {
    search_alone<16, false>(device, search);
  } else {
    search_alone<32, false>(device, search);
  }
#ifdef POINTPROJ_CUDA
  if (device.is_cuda) search_left(device, search, again);
#endif
}

template <class Real>
void search_in_memory(const Device& device, const Search<Real>& search) {
#ifdef POINTPROJ_CUDA
  if (device.is_cuda) return cuda::each_thread(SearchInMemory<Real>{search}, search.queries.rows, device.stream);
#endif
  device.each(SearchInMemory<Real>{search}, search.queries.rows);
}

Tensor search(const Tensor& query_points, const OptionalTensor& query_offsets, const Tensor& reference_points,
              int64_t clouds, at::TensorList cells, int64_t k) {
  check_pair(query_points, reference_points);
  const Batch queries = batch_of(query_points, query_offsets, clouds);
  TORCH_CHECK(k >= 1 && k <= reference_points.size(0), "k must be from 1 to the number of reference points, ",
              reference_points.size(0), "; got ", k);
  const Device device(query_points);
  const bool in_memory = k > kLongestList;
  Tensor rows = ints(queries.rows * k, query_points).view({queries.rows, k});
  Tensor heap = at::empty({in_memory ? queries.rows * k : 0}, query_points.options());
  Tensor left = ints(device.is_cuda && !in_memory ? 2 + 2 * static_cast<int64_t>(queries.rows) : 2, query_points);
  // A cloud that searches itself.
  const bool itself = query_points.const_data_ptr() == reference_points.const_data_ptr() &&
                      query_points.size(0) == reference_points.size(0);
  for_positions(query_points, [&](auto real) {
    using Real = decltype(real);
    Search<Real> search{query_points.const_data_ptr<Real>(), queries,
                        view_cells<Real>(reference_points, clouds, cells), itself, static_cast<int>(k),
                        rows.mutable_data_ptr<int>(), heap.mutable_data_ptr<Real>(),
                        left.mutable_data_ptr<int>() + 2, left.mutable_data_ptr<int>()};
    if (queries.rows == 0) return;
    if (in_memory) {
      search_in_memory(device, search);
    } else {
      Search<Real> again = search;
      again.left += queries.rows;
      again.left_count += 1;
      search_in_registers(device, search, again);
    }
  });
  return rows;
}

// ---- aggregation over lists

void check_lists(const Tensor& query_points, const Tensor& reference_points, const Tensor& features,
                 const Tensor& sigma, const Tensor& lists) {
  check_pair(query_points, reference_points);
  check_features(features, sigma, reference_points);
  TORCH_CHECK(lists.dim() == 2 && lists.size(1) >= 1, "neighbor_indices must have shape (queries, k); got ",
              lists.sizes());
  check_like("neighbor_indices", lists, {query_points.size(0), lists.size(1)}, at::kInt, query_points);
}

std::tuple<Tensor, Tensor> aggregate_neighbors(const Tensor& query_points, const Tensor& reference_points,
                                               const Tensor& features, const Tensor& sigma, const Tensor& lists) {
  check_lists(query_points, reference_points, features, sigma, lists);
  const Device device(query_points);
  const int64_t queries = query_points.size(0), channels = features.size(1);
  Tensor aggregated = at::empty({queries, channels}, features.options());
  Tensor weights = at::empty(lists.sizes(), features.options());
  const int chunks = device.chunks(channels);
  for_dtypes(query_points, features, [&](auto real, auto sum) {
    using Real = decltype(real);
    using Sum = decltype(sum);
    device.each(
        AggregateListed<Real, Sum>{
            query_points.const_data_ptr<Real>(), reference_points.const_data_ptr<Real>(),
            features.const_data_ptr<Sum>(), sigma.const_data_ptr<Sum>(),
            {lists.const_data_ptr<int>(), static_cast<int>(lists.size(1))},
            static_cast<int>(channels), chunks, aggregated.mutable_data_ptr<Sum>(),
            weights.mutable_data_ptr<Sum>()},
        queries * chunks);
  });
  return {aggregated, weights};
}

struct Inverted {
  Tensor start, order;

  InvertedLists view(int64_t k) const {
    return {start.const_data_ptr<int>(), order.const_data_ptr<int>(), static_cast<int>(k)};
  }
};

Inverted invert(const Device& device, const Tensor& lists, int64_t references) {
  const int64_t pairs = lists.numel();
  TORCH_CHECK(pairs <= kLargestInt, "gradients of more than ", kLargestInt, " pairs of neighbours are not supported; got ",
              pairs, ": split the queries");
  if (in_fixed_order(device)) {
    const Tensor rows = lists.view({-1});
    const Tensor order = at::argsort(rows, /*stable=*/true, /*dim=*/0, /*descending=*/false);
    const Tensor ends = at::arange(references + 1, lists.options());
    const Tensor start = at::searchsorted(rows.index_select(0, order), ends, /*out_int32=*/true);
    return {start, order.to(at::kInt)};
  }
  Inverted inverted{ints(references + 2, lists), ints(pairs, lists)};
  const Tensor place = at::empty({pairs, 2}, lists.options());
  const Tensor scratch = ints(references + 1 + cuda::kMostBlocks, lists);
  int* occupancy = scratch.mutable_data_ptr<int>();
  device.build(
      InvertLists{lists.const_data_ptr<int>(), static_cast<int>(pairs), static_cast<int>(references),
                  inverted.start.mutable_data_ptr<int>(), inverted.order.mutable_data_ptr<int>(), occupancy,
                  place.mutable_data_ptr<int>(), occupancy + references + 1},
      std::max(pairs, references + 1));
  return inverted;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> aggregate_neighbors_backward(
    const Tensor& grad, std::array<bool, 4> needs, const Tensor& query_points, const Tensor& reference_points,
    const Tensor& features, const Tensor& sigma, const Tensor& lists, const Tensor& aggregated,
    const Tensor& weights) {
  check_lists(query_points, reference_points, features, sigma, lists);
  const int64_t queries = query_points.size(0), references = reference_points.size(0), k = lists.size(1);
  check_like("grad", grad, aggregated.sizes(), features.scalar_type(), features);
  check_like("aggregated", aggregated, {queries, features.size(1)}, features.scalar_type(), features);
  check_like("weights", weights, lists.sizes(), features.scalar_type(), features);
  const bool of_queries = needs[0], of_references = needs[1], of_features = needs[2], of_sigma = needs[3];
  const Device device(query_points);
  const int channels = static_cast<int>(features.size(1)), chunks = device.chunks(channels);
  const bool pulls = of_queries || of_references || of_sigma;
  Tensor d_query = empty_if(pulls, query_points), d_reference = empty_if(of_references, reference_points);
  // In any order a GPU is quicker without inverted lists.
  const bool spreads = of_features && !of_references && device.is_cuda && !in_fixed_order(device);
  Tensor d_features = spreads ? at::zeros_like(features) : empty_if(of_features, features);
  Tensor d_sigma = empty_if(false, sigma);
  const bool gathers = of_references || (of_features && !spreads);
  const Inverted inverted = gathers ? invert(device, lists, references) : Inverted{};
  for_dtypes(query_points, features, [&](auto real, auto sum) {
    using Real = decltype(real);
    using Sum = decltype(sum);
#ifdef POINTPROJ_CUDA
    if (spreads) {
      cuda::each_warp(SpreadListed<Sum>{{lists.const_data_ptr<int>(), static_cast<int>(k)},
                                        weights.const_data_ptr<Sum>(), grad.const_data_ptr<Sum>(), channels, chunks,
                                        d_features.mutable_data_ptr<Sum>()},
                      queries * chunks, device.stream);
    }
#endif
    if (of_features && !spreads) {
      device.each(GatherListed<Sum>{inverted.view(k), weights.const_data_ptr<Sum>(), grad.const_data_ptr<Sum>(),
                                    channels, chunks, d_features.mutable_data_ptr<Sum>()},
                  references * chunks);
    }
    if (!pulls) return;
    const Tensor scales = at::empty_like(weights), sigma_rows = at::empty({queries}, features.options());
    device.each(
        PullListed<Real, Sum>{query_points.const_data_ptr<Real>(), reference_points.const_data_ptr<Real>(),
                              features.const_data_ptr<Sum>(), sigma.const_data_ptr<Sum>(),
                              {lists.const_data_ptr<int>(), static_cast<int>(k)}, weights.const_data_ptr<Sum>(),
                              grad.const_data_ptr<Sum>(), channels, scales.mutable_data_ptr<Sum>(),
                              d_query.mutable_data_ptr<Real>(), sigma_rows.mutable_data_ptr<Sum>()},
        queries);
    if (of_sigma) d_sigma = sigma_rows.sum();
    if (of_references) {
      device.each(
          PushListed<Real, Sum>{query_points.const_data_ptr<Real>(), reference_points.const_data_ptr<Real>(),
                                inverted.view(k), scales.const_data_ptr<Sum>(),
                                d_reference.mutable_data_ptr<Real>()},
          references);
    }
  });
  return {of_queries ? d_query : empty_if(false, query_points), d_reference, d_features, d_sigma};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pointproj, library) {
  library.def("native_build_cell_list(Tensor points, Tensor? offsets, SymInt clouds) -> (Tensor, Tensor, Tensor)");
  library.def(
      "native_search(Tensor query_points, Tensor? query_offsets, Tensor reference_points, SymInt clouds, "
      "Tensor[] cells, SymInt k) -> Tensor");
  library.def(
      "native_neighbor_sums(Tensor query_points, Tensor reference_points, Tensor features, Tensor sigma, "
      "Tensor neighbor_indices) -> (Tensor, Tensor)");
  library.def(
      "native_neighbor_sums_backward(Tensor grad_0, bool[4] needs, Tensor query_points, "
      "Tensor reference_points, Tensor features, Tensor sigma, Tensor neighbor_indices, Tensor output_0, "
      "Tensor output_1) -> (Tensor, Tensor, Tensor, Tensor)");
  POINTPROJ_REGISTER("native_build_cell_list", build_cells)
  POINTPROJ_REGISTER("native_search", search)
  POINTPROJ_REGISTER("native_neighbor_sums", aggregate_neighbors)
  POINTPROJ_REGISTER("native_neighbor_sums_backward", aggregate_neighbors_backward)
}

}  // namespace pointproj
