// The torch operators that build an index: the cell list and the hash grid.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/argsort.h>

#include "cell_list_build.h"
#include "tensors.h"

namespace pointproj {

namespace {

// Ranks by row, where atomics give them in the order of arrival. An index is constant to autograd, which would record
// these operators.
void sort_stably(const Tensor& points, const Tensor& place, const Tensor& sorted) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor order = at::argsort(place.select(1, 0), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  sorted.slice(1, 0, 3).copy_(points.index_select(0, order));
  const auto row = points.scalar_type() == at::kFloat ? at::kInt : at::kLong;
  sorted.select(1, 3).copy_(order.to(row).view(points.scalar_type()));
}

std::tuple<Tensor, Tensor, Tensor> build_cell_list(
    const Tensor& points, const OptionalTensor& offsets, int64_t clouds) {
  check_points("points", points);
  const Batch batch = batch_of(points, offsets, clouds);
  const Device device(points);
  const CellListSizes sizes = cell_list_sizes(points, clouds);
  const int64_t slots = sizes.subcells() + 1, dense = sizes.dense_cells();
  TORCH_CHECK(slots + 1 <= kLargestInt, "too many points for 32-bit cell numbers: ", points.size(0));
  const Tables tables = {at::empty({sizes.reals()}, points.options()), empty_ints({sizes.numbers()}, points),
                         empty_sorted_points(points)};
  const SortBuffers buffers(points.size(0), slots, points);
  const Tensor scratch = empty_ints({slots + sizes.cells() + 7 * dense + 1}, points);
  int* next = data<int>(scratch);
  const auto take = [&](int64_t count) { return (next += count) - count; };
  for_positions(points, [&](auto real) {
    using Real = decltype(real);
    const int parts = BuildCellList<Real>::parts_of(sizes.rows, clouds);
    const Tensor boxes = at::empty({clouds, parts, 6}, points.options());
    device.build(BuildCellList<Real>{data<const Real>(points), batch, sizes,
                                     view_cell_list<Real>(tables, points, clouds), buffers.view(),
                                     reinterpret_cast<Box<Real>*>(data<Real>(boxes)), parts, take(slots),
                                     take(sizes.cells()), take(6 * dense), take(dense), take(1)},
                 slots);
  });
  if (device.is_cuda && device.in_fixed_order) sort_stably(points, buffers.place, tables[2]);
  return {tables[0], tables[1], tables[2]};
}

}  // namespace

namespace {

constexpr int64_t kSparse = 8;  // times as many points in all
constexpr int64_t kSampled = 1 << 18;  // points at most of which a sample says how dense they are

// Narrow cells spare tests of points and cost lookups of rows of cells, which a CPU would rather do without. So would
// a GPU where points have few neighbours: it finds out, or points are few next to those that are looked from.
int cells_along_radius(const Device& device, int sides, int64_t rows, int64_t all_rows) {
  if (!device.is_cuda) return 1;
  if (sides == 2 && all_rows <= kSampled) return 0;
  return rows * kSparse > all_rows ? 2 : 1;
}

}  // namespace

template <size_t kCount>
std::array<Tables, kCount> make_hash_grids(
    const std::array<Cloud, kCount>& clouds, const LargestRadius& radius, bool in_fixed_order) {
  const Tensor& like = clouds[0].points;
  const Device device(like);
  std::array<Tables, kCount> made;
  int64_t slots = 0, rows = 0;
  for (size_t i = 0; i < kCount; ++i) {
    const auto& [points, batch] = clouds[i];
    const int64_t own = HashGrid<float>::slots_of(batch.rows, batch.clouds);
    made[i] = {at::empty({}, like.options()), empty_ints({own + 2}, like), empty_sorted_points(points)};
    slots += own + 1;
    rows += batch.rows;
  }
  TORCH_CHECK(slots <= kLargestInt, "too many points for 32-bit cell numbers: ", rows);
  const SortBuffers buffers(rows, slots, like);
  for_positions(like, [&](auto real) {
    using Real = decltype(real);
    BuildHashGrids<Real> task{};
    for (size_t i = 0; i < kCount; ++i) {
      task.sides[i] = {data<const Real>(clouds[i].points), view_hash_grid<Real>(made[i], clouds[i].batch),
                       cells_along_radius(device, kCount, clouds[i].batch.rows, rows)};
    }
    task.count = kCount;
    task.radius = static_cast<Real>(radius.number);
    task.largest = radius.on_device ? data<const Real>(*radius.on_device) : nullptr;
    task.sort = buffers.view();
    device.build(task, slots);
  });
  if (device.is_cuda && in_fixed_order) {
    int64_t first = 0;
    for (size_t i = 0; i < kCount; ++i) {
      const int64_t size = clouds[i].batch.rows;
      sort_stably(clouds[i].points, buffers.place.slice(0, first, first + size), made[i][2]);
      first += size;
    }
  }
  return made;
}

template std::array<Tables, 1> make_hash_grids(const std::array<Cloud, 1>&, const LargestRadius&, bool);
template std::array<Tables, 2> make_hash_grids(const std::array<Cloud, 2>&, const LargestRadius&, bool);

namespace {

bool in_fixed_order() { return at::globalContext().deterministicAlgorithms(); }

std::tuple<Tensor, Tensor, Tensor> build_hash_grid(
    const Tensor& points, const OptionalTensor& offsets, int64_t clouds, double radius,
    const OptionalTensor& largest_radius) {
  check_points("points", points);
  if (largest_radius) {
    check_like("largest_radius", *largest_radius, {}, points.scalar_type(), points);
  } else {
    check_radius(radius);
  }
  const Cloud cloud{points, batch_of(points, offsets, clouds)};
  const auto [made] = make_hash_grids<1>({{cloud}}, {radius, largest_radius}, in_fixed_order());
  return {made[0], made[1], made[2]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> build_hash_grids(
    const Tensor& query_points, const OptionalTensor& query_offsets, const Tensor& reference_points,
    const OptionalTensor& reference_offsets, int64_t clouds, double radius) {
  check_pair(query_points, reference_points);
  check_radius(radius);
  const Cloud queries{query_points, batch_of(query_points, query_offsets, clouds)};
  const Cloud references{reference_points, batch_of(reference_points, reference_offsets, clouds)};
  const auto [q, r] = make_hash_grids<2>({{queries, references}}, {radius, std::nullopt}, in_fixed_order());
  return {q[0], q[1], q[2], r[0], r[1], r[2]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pointproj, library) {
  define(library, "native_build_cell_list(Tensor points, Tensor? offsets, SymInt clouds) -> (Tensor, Tensor, Tensor)",
         TORCH_FN(build_cell_list));
  define(library,
         "native_build_hash_grid(Tensor points, Tensor? offsets, SymInt clouds, float radius, Tensor? "
         "largest_radius) -> (Tensor, Tensor, Tensor)",
         TORCH_FN(build_hash_grid));
  define(library,
         "native_build_hash_grids(Tensor query_points, Tensor? query_offsets, Tensor reference_points, "
         "Tensor? reference_offsets, SymInt clouds, float radius) -> "
         "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
         TORCH_FN(build_hash_grids));
}

}  // namespace pointproj
