// The torch operator that searches the k nearest: it checks, allocates, and chooses kernels.
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
  const int queries = search.queries.rows, k = search.rows.columns;
  const bool short_list = k <= kShortestList;
  if (device.is_cuda && queries <= (short_list ? kFewQueries : kManyQueries)) {
    device.each_on_gpu(SearchByWarp<Real>{search}, queries);
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

Tensor search(const Tensor& query_points, const OptionalTensor& query_offsets, const Tensor& reference_points,
              int64_t clouds, TensorList cell_list, int64_t k) {
  check_pair(query_points, reference_points);
  const Batch queries = batch_of(query_points, query_offsets, clouds);
  TORCH_CHECK(k >= 1 && k <= reference_points.size(0), "k must be from 1 to the number of reference points, ",
              reference_points.size(0), "; got ", k);
  check_cell_list(cell_list, reference_points, clouds);
  const Device device(query_points);
  const bool in_memory = k > kLongestList, postpones = device.is_cuda && !in_memory;
  const Tensor rows = empty_ints({queries.rows, k}, query_points);
  if (queries.rows == 0) return rows;
  const Tensor heap = at::empty({in_memory ? queries.rows * k : 0}, query_points.options());
  // Queries that the first kernel postpones, and the second; how many these are.
  const Tensor postponed = empty_ints({postpones ? 2 * static_cast<int64_t>(queries.rows) + 2 : 0}, query_points);
  int* const first = data<int>(postponed);
  int* const again = first + queries.rows;
  int* const counts = again + queries.rows;
  if (postpones) device.clear(counts, 2);
  const bool itself = query_points.const_data_ptr() == reference_points.const_data_ptr() &&
                      query_points.size(0) == reference_points.size(0);
  for_positions(query_points, [&](auto real) {
    using Real = decltype(real);
    const Search<Real> search{data<const Real>(query_points),
                              queries,
                              view_cell_list<Real>(cell_list, reference_points, clouds),
                              itself,
                              matrix<int>(rows),
                              data<Real>(heap),
                              {first, counts}};
    if (in_memory) return device.each(SearchInMemory<Real>{search}, queries.rows);
    search_in_registers(device, search, Postponed{again, counts + 1});
  });
  return rows;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pointproj, library) {
  define(library,
         "native_search(Tensor query_points, Tensor? query_offsets, Tensor reference_points, SymInt clouds, "
         "Tensor[] cell_list, SymInt k) -> Tensor",
         TORCH_FN(search));
}

}  // namespace pointproj
