// The search of the k nearest: which kernels run, one after another.
#include "search.h"
#include "index.h"

namespace pointproj::POINTPROJ_DEVICE {
namespace {

constexpr int kPostponedWarps = 3 << 10, kPostponedThreads = 1 << 18;

template <class Real>
void search_on_gpu(const Device& device, const Knn<Real, Levels::kOne>& search, const Postponed& again) {
  using Search = Knn<Real, Levels::kOne>;
  using InFull = Knn<Real, Levels::kBoth>;
  const int queries = search.queries.rows, k = search.nearest.k;
  const bool many_short = k <= kShortestList && queries > kManyQueries;
  if (many_short) {
    using List = SortedList<Real, kShortestList>;
    device.each(SearchEach<Search, List, 8>{search}, queries);
    // Many queries may be postponed: single threads begin with them, and warps take those that need a thread too long.
    const auto postponed = with_levels<Levels::kEach>(search, search.postponed);
    device.each(SearchPostponed<Knn<Real, Levels::kEach>, List>{postponed, again}, lesser(queries, kPostponedThreads));
  } else {
    with_list<Real>(k, queries, [&](auto list) {
      device.each(SearchEach<Search, typename decltype(list)::type>{search}, queries);
    });
  }
  const int warps = lesser(queries, kPostponedWarps);
  const InFull left = with_levels<Levels::kBoth>(search, many_short ? again : search.postponed);
  with_warp_list<Real>(k, [&](auto list) {
    device.each(SearchPostponed<InFull, typename decltype(list)::type>{left, again}, warps);
  });
}

struct KnnArguments {
  Clouds points;
  OptionalTensor cell_list;
  double max_radius;
  int64_t k;
  bool long_rows;
  POINTPROJ_FIELDS(points, cell_list, max_radius, k, long_rows)
};

Tensors<2> knn(const KnnArguments& given) {
  const PointSets sets(given.points);
  check_k(sets, given.k);
  const Tensor& query_points = given.points.query_points;
  const Tensor distances = empty({query_points.size(0), given.k}, query_points);
  const Tensor rows = empty(distances.sizes(), given.long_rows ? ScalarType::Long : ScalarType::Int, query_points);
  search(sets, given.cell_list, rows, distances, given.max_radius);
  return {distances, rows};
}

const Operators registered(__FILE__, {operator_of<knn>("native_knn")});

}  // namespace

void check_k(const PointSets& sets, int64_t k) {
  const int most = sets.references.batch.rows;
  POINTPROJ_CHECK(k >= 1 && (k <= most || sets.queries.batch.rows == 0),
                  "k must be from 1 to the number of reference points, ", most, "; got ", k);
}

void search(const PointSets& sets, const OptionalTensor& given, const Tensor& rows, const OptionalTensor& distances,
            double max_radius) {
  const auto& [queries, references, device] = sets;
  const int64_t count = queries.batch.rows, k = rows.size(1);
  if (count == 0) return;
  const int64_t words = sizes_of(references).cell_list().words();
  const bool in_memory = k > kLongestList, postpones = kOnGpu && !in_memory;
  const bool is_long = rows.scalar_type() == ScalarType::Long;
  // Heaps are made in the results, where these have their dtype.
  OptionalTensor heap = distances, heap_rows, postponed;
  if (in_memory && !distances) heap = empty({count, k}, queries.points);
  if (in_memory) heap_rows = is_long ? empty_ints({count, k}, rows) : rows;
  // Queries that the first kernel postpones, then those that the second does; then the count of each.
  if (postpones) postponed = empty_ints({2 * count + 2}, rows);
  int* const first = data<int>(postponed);
  int *const again = first + count, *const counts = postpones ? again + count : nullptr;
  if (given && counts) device.clear(counts, 2 * sizeof(int));
  const Tensor table = given ? checked_table("cell_list", *given, words, references.points)
                             : make_cell_list(references, device, {counts});
  for_positions(queries.points, [&](auto real) {
    using Real = decltype(real);
    const Real radius = static_cast<Real>(max_radius);
    const Knn<Real, Levels::kOne> search{data<const Real>(queries.points), data<const Real>(references.points),
                                         queries.batch, view_cell_list<Real>(words_of(table), references),
                                         sets.itself(),
                                         {nullptr, radius, largest_square_within(radius)},
                                         {static_cast<int>(k), is_long ? nullptr : data<int>(rows),
                                          is_long ? data<int64_t>(rows) : nullptr, data<Real>(distances), nullptr},
                                         {data<Real>(heap), data<int>(heap_rows)}, {first, counts}};
    const auto in_full = with_levels<Levels::kBoth>(search, {});
    if (in_memory) return device.each(SearchEach<Knn<Real, Levels::kBoth>, Heap<Real>>{in_full}, count);
    if constexpr (kOnGpu) {
      search_on_gpu(device, search, Postponed{again, counts + 1});
    } else {
      with_length(k, [&](auto length) {
        device.each(SearchEach<Knn<Real, Levels::kBoth>, SortedList<Real, length>>{in_full}, count);
      });
    }
  });
}

}  // namespace pointproj::POINTPROJ_DEVICE
