// Building an index: the cell list and the hash grid.
#include "index.h"

#include <algorithm>

#include "cell_list_build.h"

namespace pointproj::POINTPROJ_DEVICE {
namespace {

constexpr int64_t kSparse = 8;
constexpr int64_t kSampled = 1 << 18;  // points, at most, of which a GPU takes a sample

// Cells along the radius; 0 if the GPU is to find out. Narrow cells spare tests of points, but cost lookups of rows of
// cells. They pay on a GPU, unless points have few neighbours: of few points a sample tells, and of many those are
// taken to have few that are at most 1 / kSparse of all.
int cells_along_radius(size_t sets, int64_t rows, int64_t all_rows) {
  if (!kOnGpu) return 1;
  if (sets == 2 && all_rows <= kSampled) return 0;
  return rows * kSparse > all_rows ? 2 : 1;
}

// Clears what a build leaves out of a CPU's table: points that are read ahead, and the words before the table's end.
template <class Real>
void clear_rest(const SortedPoints<Real>& points, int rows, int* end) {
  if (kOnGpu) return;
  for (int column = 0; column < 4; ++column) {
    std::fill_n(points.data + column * points.stride + rows, kReadAhead, Real(0));
  }
  std::fill_n(end - 4, 4, 0);
}

// Sorts points once more, those of a cell by their rows: atomics have ranked them as threads came.
template <class Real>
void sort_stably(const PointSet& set, const Device& device, const SortedPoints<Real>& sorted,
                 const SortBuffers& buffers, int64_t first) {
  const Tensor order = buffers.stable_order(first, set.batch.rows);
  device.each(ReorderPoints<Real>{data<const Real>(set.points), data<const int64_t>(order), sorted}, set.batch.rows);
}

struct IndexArguments {
  Tensor points;
  OptionalTensor offsets;
  int64_t clouds;
  std::optional<double> radius;
  OptionalTensor largest_radius;
  bool deterministic;
  POINTPROJ_FIELDS(points, offsets, clouds, radius, largest_radius, deterministic)
};

Tensor build_index(const IndexArguments& given) {
  const auto& [points, offsets, clouds, radius, largest_radius, deterministic] = given;
  const PointSet set("points", points, offsets, clouds);
  const Device device(points);
  if (largest_radius) {
    check_like("largest_radius", *largest_radius, {}, points.scalar_type(), points);
  } else if (radius) {
    check_radius(*radius);
  } else {
    return make_cell_list(set, device);
  }
  return make_hash_grids({set}, device, {radius.value_or(0), largest_radius}, deterministic);
}

const Operators registered(__FILE__, {operator_of<build_index>("native_build_index")});

#if !defined(__CUDACC__)
// A size that is written in Python instead of computed: Python needs it also where the number of rows is a symbol.
struct Formula {
  std::string text;

  Formula(int64_t number) : text(std::to_string(number)) {}
  explicit Formula(std::string text) : text("(" + text + ")") {}
};
Formula operator+(const Formula& a, const Formula& b) { return Formula(a.text + " + " + b.text); }
Formula operator*(const Formula& a, const Formula& b) { return Formula(a.text + " * " + b.text); }
Formula operator/(const Formula& a, const Formula& b) { return Formula(a.text + " // " + b.text); }
Formula lesser(const Formula& a, const Formula& b) { return Formula(joined("sym_min(", a.text, ", ", b.text, ")")); }
Formula greater(const Formula& a, const Formula& b) { return Formula(joined("sym_max(", a.text, ", ", b.text, ")")); }

struct TableArguments {
  bool of_radius, on_gpu;
  POINTPROJ_FIELDS(of_radius, on_gpu)
};

// Words of a table, as a formula of `rows`, `clouds` and `words_per_real`, the 32-bit words of a coordinate.
std::string table_words(const TableArguments& given) {
  const IndexSizes<Formula> sizes{Formula("rows"), Formula("clouds"), Formula("words_per_real"), given.on_gpu};
  return (given.of_radius ? sizes.hash_grid() : sizes.cell_list()).words().text;
}

const Operators sizes(__FILE__, {operator_of<table_words>("native_table_words")}, kWithoutTensors);
#endif

}  // namespace

Tensor make_cell_list(const PointSet& set, const Device& device, const Build& build) {
  const auto& [points, batch] = set;
  const CellListSizes sizes = sizes_of(set).cells();
  const int64_t slots = sizes.subcells() + 1, dense = sizes.dense_cells();
  POINTPROJ_CHECK(slots + 1 <= kLargestInt, "too many points for 32-bit cell numbers: ", batch.rows);
  const Tensor table = empty_ints({sizes_of(set).cell_list().words()}, points);
  const int parts = BuildCellList<float>::parts_of(batch.rows, batch.clouds);
  const int64_t boxes = 6 * int64_t(batch.clouds) * parts * (points.element_size() / 4);
  const SortBuffers buffers(batch.rows, slots, points, (boxes + slots + sizes.cells() + 7 * dense + 3) / 2 * 2);
  int* next = data<int>(buffers.words);
  const auto take = [&](int64_t count) { return (next += count) - count; };
  for_positions(points, [&](auto real) {
    using Real = decltype(real);
    const CellList<Real> cells = view_cell_list<Real>(data<int>(table), set);
    clear_rest(cells.points, batch.rows, data<int>(table) + table.numel());
    device.build(BuildCellList<Real>{data<const Real>(points), batch, sizes, cells, buffers.view(),
                                     reinterpret_cast<Box<Real>*>(take(boxes)), parts, take(slots),
                                     take(sizes.cells()), take(6 * dense), take(dense), take(1), take(1), build},
                 slots);
  });
  return table;
}

Tensor make_hash_grids(const std::vector<PointSet>& sets, const Device& device, const LargestRadius& radius,
                       bool deterministic, const Build& build) {
  const Tensor& like = sets[0].points;
  int64_t words = 0, slots = 0, rows = 0;
  for (const PointSet& set : sets) {
    words += sizes_of(set).hash_grid().words();
    slots += HashGrid<float>::slots_of(set.batch) + 1;
    rows += set.batch.rows;
  }
  POINTPROJ_CHECK(slots <= kLargestInt, "too many points for 32-bit cell numbers: ", rows);
  const Tensor tables = empty_ints({words}, like);
  const SortBuffers buffers(rows, slots, like);
  for_positions(like, [&](auto real) {
    using Real = decltype(real);
    BuildHashGrids<Real> task{};
    int* next = data<int>(tables);
    for (const PointSet& set : sets) {
      const HashGrid<Real> grid = view_hash_grid<Real>(next, set);
      next += sizes_of(set).hash_grid().words();
      clear_rest(grid.points, set.batch.rows, next);
      if (kOnGpu && deterministic) device.clear(next - 4, 4 * sizeof(int));  // the words before the table's end
      task.sides[task.count++] = {data<const Real>(set.points), grid,
                                  cells_along_radius(sets.size(), set.batch.rows, rows)};
    }
    task.radius = static_cast<Real>(radius.number);
    task.largest = data<const Real>(radius.on_device);
    task.build = build;
    task.sort = buffers.view();
    device.build(task, slots);
    if (!kOnGpu || !deterministic) return;
    int64_t first = 0;
    for (size_t i = 0; i < sets.size(); first += sets[i++].batch.rows) {
      sort_stably(sets[i], device, task.sides[i].grid.points, buffers, first);
    }
  });
  return tables;
}

}  // namespace pointproj::POINTPROJ_DEVICE
