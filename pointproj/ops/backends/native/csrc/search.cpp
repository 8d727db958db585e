// The torch operators that search the k nearest: they check, allocate, and choose kernels.
#include "search.h"

#include "tensors.h"

namespace pointproj {

namespace {

// So few queries leave a GPU idle unless a warp works on each: of short lists, of longer ones.
constexpr int kFewQueries = 1 << 14, kManyQueries = 1 << 17;
constexpr int kPostponedWarps = 1 << 12, kPostponedThreads = 1 << 18;

template <int kLength, class Real>
void search_by_thread(const Device& device, const Search<Real>& search) {
  const int queries = search.queries.rows;
  if (!device.is_cuda) {
    cpu::each(SearchByThread<Real, kLength, Levels::kBoth>{search}, queries);
  } else if (kLength == kShortestList && queries > kManyQueries) {
    device.each_on_gpu(SearchByThread<Real, kShortestList, Levels::kOne, true>{search}, queries);
  } else {
    device.each_on_gpu(SearchByThread<Real, kLength, Levels::kOne>{search}, queries);
  }
}

template <class Real>
void search_in_registers(const Device& device, const Search<Real>& search, const Postponed& again) {
  const int queries = search.queries.rows, k = search.nearest.k;
  const bool short_list = k <= kShortestList;
  if (device.is_cuda && queries <= (short_list ? kFewQueries : kManyQueries)) {
    if (short_list) {
      device.each_on_gpu(SearchByWarp<Real, WarpList<Real>>{search}, queries);
    } else {
      device.each_on_gpu(SearchByWarp<Real, WarpBlocks<Real, 1>>{search}, queries);
    }
  } else if (short_list) {
    search_by_thread<kShortestList>(device, search);
  } else if (k <= 16) {
    search_by_thread<16>(device, search);
  } else {
    search_by_thread<32>(device, search);
  }
  if (!device.is_cuda) return;
  // Of what was postponed, which may be much: single threads begin, and warps finish what takes them long.
  Search<Real> last = search;
  if (short_list && queries > kManyQueries) {
    const int threads = std::min(queries, kPostponedThreads);
    device.each_on_gpu(SearchPostponedByThread<Real>{search, again, threads}, threads);
    last.postponed = again;
  }
  const int warps = std::min(queries, kPostponedWarps);
  device.each_on_gpu(SearchPostponedByWarp<Real>{last, warps}, warps);
}

// What a search is to write; a tensor that is not wanted is undefined.
struct Results {
  Tensor distances, rows;
};

template <class Real>
Nearest<Real> view_results(const Results& results, int64_t k) {
  const bool is_long = results.rows.scalar_type() == at::kLong;
  return {static_cast<int>(k), is_long ? nullptr : data<int>(results.rows),
          is_long ? data<int64_t>(results.rows) : nullptr,
          results.distances.defined() ? data<Real>(results.distances) : nullptr};
}

void fill(const Results& results, const Tensor& query_points, const OptionalTensor& query_offsets,
          const Tensor& reference_points, int64_t clouds, TensorList cell_list, int64_t k) {
  check_pair(query_points, reference_points);
  const Batch queries = batch_of(query_points, query_offsets, clouds);
  TORCH_CHECK(k >= 1 && k <= reference_points.size(0), "k must be from 1 to the number of reference points, ",
              reference_points.size(0), "; got ", k);
  check_cell_list(cell_list, reference_points, clouds);
  if (queries.rows == 0) return;
  const Device device(query_points);
  const bool in_memory = k > kLongestList, postpones = device.is_cuda && !in_memory;
  const auto in_heaps = [&](const Tensor& result, at::ScalarType dtype) {
    if (!in_memory || (result.defined() && result.scalar_type() == dtype)) return result;
    return at::empty({queries.rows, k}, query_points.options().dtype(dtype));
  };
  const Tensor heap = in_heaps(results.distances, query_points.scalar_type());
  const Tensor heap_rows = in_heaps(results.rows, at::kInt);
  // Queries that the first kernel postpones, and the second; how many these are.
  const Tensor postponed = postpones ? empty_ints({2 * static_cast<int64_t>(queries.rows) + 2}, query_points) : Tensor();
  int* const first = postpones ? data<int>(postponed) : nullptr;
  int* const again = first + (postpones ? queries.rows : 0);
  int* const counts = again + (postpones ? queries.rows : 0);
  if (postpones) device.clear({{{counts, 2}}});
  const bool itself = query_points.const_data_ptr() == reference_points.const_data_ptr() &&
                      query_points.size(0) == reference_points.size(0);
  for_positions(query_points, [&](auto real) {
    using Real = decltype(real);
    const Search<Real> search{data<const Real>(query_points),
                              queries,
                              view_cell_list<Real>(cell_list, reference_points, clouds),
                              itself,
                              view_results<Real>(results, k),
                              {in_memory ? data<Real>(heap) : nullptr, in_memory ? data<int>(heap_rows) : nullptr},
                              {first, counts}};
    if (in_memory) return device.each(SearchInMemory<Real>{search}, queries.rows);
    search_in_registers(device, search, Postponed{again, counts + 1});
  });
}

Tensor search(const Tensor& query_points, const OptionalTensor& query_offsets, const Tensor& reference_points,
              int64_t clouds, TensorList cell_list, int64_t k) {
  const Tensor rows = empty_ints({query_points.size(0), k}, query_points);
  fill({Tensor(), rows}, query_points, query_offsets, reference_points, clouds, cell_list, k);
  return rows;
}

std::tuple<Tensor, Tensor> search_with_distances(
    const Tensor& query_points, const OptionalTensor& query_offsets, const Tensor& reference_points, int64_t clouds,
    TensorList cell_list, int64_t k, bool long_rows) {
  const std::array<int64_t, 2> shape = {query_points.size(0), k};
  const Tensor distances = at::empty(shape, query_points.options());
  const Tensor rows = at::empty(shape, query_points.options().dtype(long_rows ? at::kLong : at::kInt));
  fill({distances, rows}, query_points, query_offsets, reference_points, clouds, cell_list, k);
  return {distances, rows};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pointproj, library) {
  const std::string arguments =
      "(Tensor query_points, Tensor? query_offsets, Tensor reference_points, SymInt clouds, Tensor[] cell_list, "
      "SymInt k";
  define(library, "native_search" + arguments + ") -> Tensor", TORCH_FN(search));
  define(library, "native_search_with_distances" + arguments + ", bool long_rows) -> (Tensor, Tensor)",
         TORCH_FN(search_with_distances));
}

}  // namespace pointproj
