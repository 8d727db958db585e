// Building an index: the cell list and the hash grid.
#include "index.h"

#include <algorithm>

#include "cell_list_build.h"

namespace pointproj::POINTPROJ_DEVICE {

namespace {

constexpr int64_t kSparse = 8;         // times as many points in all
constexpr int64_t kSampled = 1 << 18;  // points at most of which a sample says how dense they are

// Narrow cells spare tests of points and cost lookups of rows of cells, which a CPU would rather do without. So would
// a GPU where points have few neighbours: it finds out, or points are few next to those that are looked from.
int cells_along_radius(size_t sides, int64_t rows, int64_t all_rows) {
  if (!kOnGpu) return 1;
  if (sides == 2 && all_rows <= kSampled) return 0;
  return rows * kSparse > all_rows ? 2 : 1;
}

// What a build leaves out of a CPU's table: points that are read ahead, and up to where the table ends.
template <class Real>
void clear_rest(const SortedPoints<Real>& points, int rows, int* end) {
  if (kOnGpu) return;
  for (int column = 0; column < 4; ++column) {
    std::fill_n(points.data + column * points.stride + rows, kReadAhead, Real(0));
  }
  std::fill_n(end - 4, 4, 0);
}

// Once more in the order of their rows, where atomics gave them ranks in that of their arrival.
template <class Real>
void sort_stably(const Cloud& cloud, const Device& device, const SortedPoints<Real>& sorted,
                 const SortBuffers& buffers, int64_t first) {
  const Tensor order = buffers.stable_order(first, cloud.batch.rows);
  device.each(PutInOrder<Real>{data<const Real>(cloud.points), data<const int64_t>(order), sorted},
                     cloud.batch.rows);
}

}  // namespace

Tensor make_cell_list(const Cloud& cloud, const Device& device) {
  const auto& [points, batch] = cloud;
  const CellListSizes sizes = cell_list_sizes(cloud);
  const int64_t slots = sizes.subcells() + 1, dense = sizes.dense_cells();
  POINTPROJ_CHECK(slots + 1 <= kLargestInt, "too many points for 32-bit cell numbers: ", batch.rows);
  const Tensor table = empty_ints({sizes_of_cell_list(cloud).words()}, points);
  const SortBuffers buffers(batch.rows, slots, points);
  const Tensor scratch = empty_ints({slots + sizes.cells() + 7 * dense + 1}, points);
  int* next = data<int>(scratch);
  const auto take = [&](int64_t count) { return (next += count) - count; };
  for_positions(points, [&](auto real) {
    using Real = decltype(real);
    const CellList<Real> cells = view_cell_list<Real>(data<int>(table), cloud);
    const int parts = BuildCellList<Real>::parts_of(batch.rows, batch.clouds);
    const Tensor boxes = empty({int64_t(batch.clouds) * parts, 6}, points);
    clear_rest(cells.points, batch.rows, data<int>(table) + table.numel());
    device.build(BuildCellList<Real>{data<const Real>(points), batch, sizes, cells, buffers.view(),
                                     reinterpret_cast<Box<Real>*>(data<Real>(boxes)), parts, take(slots),
                                     take(sizes.cells()), take(6 * dense), take(dense), take(1)},
                 slots);
  });
  return table;
}

Tensor make_hash_grids(const std::vector<Cloud>& clouds, const Device& device, const LargestRadius& radius,
                       bool in_fixed_order) {
  const Tensor& like = clouds[0].points;
  int64_t words = 0, slots = 0, rows = 0;
  for (const Cloud& cloud : clouds) {
    words += sizes_of_hash_grid(cloud).words();
    slots += HashGrid<float>::slots_of(cloud.batch.rows, cloud.batch.clouds) + 1;
    rows += cloud.batch.rows;
  }
  POINTPROJ_CHECK(slots <= kLargestInt, "too many points for 32-bit cell numbers: ", rows);
  const Tensor tables = empty_ints({words}, like);
  const SortBuffers buffers(rows, slots, like);
  for_positions(like, [&](auto real) {
    using Real = decltype(real);
    BuildHashGrids<Real> task{};
    int* next = data<int>(tables);
    for (const Cloud& cloud : clouds) {
      const HashGrid<Real> grid = view_hash_grid<Real>(next, cloud);
      next += sizes_of_hash_grid(cloud).words();
      clear_rest(grid.points, cloud.batch.rows, next);
      task.sides[task.count++] = {data<const Real>(cloud.points), grid,
                                  cells_along_radius(clouds.size(), cloud.batch.rows, rows)};
    }
    task.radius = static_cast<Real>(radius.number);
    task.largest = data<const Real>(radius.on_device);
    task.sort = buffers.view();
    device.build(task, slots);
    if (!kOnGpu || !in_fixed_order) return;
    int64_t first = 0;
    for (size_t i = 0; i < clouds.size(); first += clouds[i++].batch.rows) {
      sort_stably(clouds[i], device, task.sides[i].grid.points, buffers, first);
    }
  });
  return tables;
}

namespace {

Tensor build_index(const Tensor& points, const OptionalTensor& offsets, int64_t clouds, std::optional<double> radius,
                   const OptionalTensor& largest_radius, bool in_fixed_order) {
  const Cloud cloud("points", points, offsets, clouds);
  const Device device(points);
  if (largest_radius) {
    check_like("largest_radius", *largest_radius, {}, points.scalar_type(), points);
  } else if (radius) {
    check_radius(*radius);
  } else {
    return make_cell_list(cloud, device);
  }
  return make_hash_grids({cloud}, device, {radius.value_or(0), largest_radius}, in_fixed_order);
}

const Operators registered(
    __FILE__,
    {{"native_build_index",
      "(Tensor points, Tensor? offsets, SymInt clouds, float? radius, Tensor? largest_radius, bool deterministic) -> "
      "Tensor",
      TORCH_BOX(&build_index)}});

}  // namespace

}  // namespace pointproj::POINTPROJ_DEVICE
