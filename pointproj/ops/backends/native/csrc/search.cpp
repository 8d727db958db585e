// The search of the k nearest: which kernels run, one after another.
#include "search.h"

#include "index.h"
#include "operators.h"

namespace pointproj {

namespace {

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
    search_by_thread<kLongestList>(device, search);
  }
  if (!device.is_cuda) return;
  // Of what was postponed, which may be much: single threads begin, and warps finish what takes them long.
  Search<Real> last = search;
  if (short_list && queries > kManyQueries) {
    const int threads = lesser(queries, kPostponedThreads);
    device.each_on_gpu(SearchPostponedByThread<Real>{search, again, threads}, threads);
    last.postponed = again;
  }
  const int warps = lesser(queries, kPostponedWarps);
  device.each_on_gpu(SearchPostponedByWarp<Real>{last, warps}, warps);
}

template <class Real>
Nearest<Real> view_results(const Tensor& rows, Real* distances) {
  const bool is_long = rows.scalar_type() == ScalarType::Long;
  return {static_cast<int>(rows.size(1)), is_long ? nullptr : data<int>(rows), is_long ? data<int64_t>(rows) : nullptr,
          distances};
}

}  // namespace

void check_k(const Clouds& clouds, int64_t k) {
  const int most = clouds.references.batch.rows;
  POINTPROJ_CHECK(k >= 1 && k <= most, "k must be from 1 to the number of reference points, ", most, "; got ", k);
}

void search(const Clouds& clouds, const OptionalTensor& given, const Tensor& rows, const OptionalTensor& distances) {
  const auto& [queries, references, device] = clouds;
  const int64_t count = queries.batch.rows, k = rows.size(1);
  if (given) check_table("cell_list", *given, sizes_of_cell_list(references), references.points);
  if (count == 0) return;
  const Tensor table = given ? *given : make_cell_list(references, device, false);
  const bool in_memory = k > kLongestList, postpones = device.is_cuda && !in_memory;
  // Heaps lie where the results go, if these are of their dtype.
  OptionalTensor heap = distances, heap_rows = rows;
  if (in_memory && !distances) heap = empty({count, k}, queries.points);
  if (in_memory && rows.scalar_type() != ScalarType::Int) heap_rows = empty_ints({count, k}, rows);
  // Queries that the first kernel postpones, and the second; how many these are.
  const Tensor postponed = empty_ints({postpones ? 2 * count + 2 : 0}, rows);
  int* const first = data<int>(postponed);
  int *const again = first + count, *const counts = again + count;
  if (postpones) device.clear({{{counts, 2}}});
  for_positions(queries.points, [&](auto real) {
    using Real = decltype(real);
    const Search<Real> search{data<const Real>(queries.points),
                              queries.batch,
                              view_cell_list<Real>(words_of(table), references),
                              clouds.itself(),
                              view_results<Real>(rows, data<Real>(distances)),
                              {in_memory ? data<Real>(heap) : nullptr, in_memory ? data<int>(heap_rows) : nullptr},
                              {first, counts}};
    if (in_memory) return device.each(SearchInMemory<Real>{search}, count);
    search_in_registers(device, search, Postponed{again, counts + 1});
  });
}

std::tuple<Tensor, Tensor> knn(POINTPROJ_POINTS, const OptionalTensor& cell_list, int64_t k, bool long_rows) {
  const Clouds clouds(query_points, query_offsets, reference_points, reference_offsets, count);
  check_k(clouds, k);
  const Tensor distances = empty({query_points.size(0), k}, query_points);
  const Tensor rows = empty(distances.sizes(), long_rows ? ScalarType::Long : ScalarType::Int, query_points);
  search(clouds, cell_list, rows, distances);
  return {distances, rows};
}

}  // namespace pointproj
