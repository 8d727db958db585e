// The table of an index, a tensor (words,) of 32-bit words: the sorted points, then numbers in the dtype of their
// coordinates, then integers.
#pragma once

#include "cell_list.h"
#include "gradients.h"
#include "hash_grid.h"
#include "listed_rows.h"
#include "torch.h"

namespace pointproj::POINTPROJ_DEVICE {

template <class Number>
struct TableSizes {
  Number points;  // with what is read ahead
  Number reals, ints, words_per_real;

  // Several tables may lie one behind the other: each begins at a multiple of 16 bytes.
  Number words() const { return ((4 * points + reals) * words_per_real + ints + 3) / 4 * 4; }
};

template <class Number>
struct IndexSizes {
  Number rows, clouds, words_per_real;
  bool on_gpu;

  TableSizes<Number> cell_list() const {
    const Number cells = density().bound(rows) / 2 + clouds, dense = CellListSizes<Number>::dense_cells_of(rows);
    return table(12 * clouds + 6 * dense, 4 * clouds + 3 * cells + rows + dense + 3);
  }
  TableSizes<Number> hash_grid() const { return table(1, slots_per_point().bound(rows) + clouds + 3); }
  CellListSizes<Number> cells() const { return {rows, clouds, density().at(rows)}; }

 private:
  // Cells for every two points. Fine ones spare distances; for many points on a GPU, it is the tables that take time.
  PerRow density() const { return on_gpu ? PerRow{4, 1, 1 << 18} : PerRow{2, 2, 0}; }
  TableSizes<Number> table(const Number& reals, const Number& ints) const {
    return {rows + (on_gpu ? 0 : kReadAhead), reals, ints, words_per_real};
  }
};

inline IndexSizes<int64_t> sizes_of(const PointSet& set) {
  return {set.batch.rows, set.batch.clouds, static_cast<int64_t>(set.points.element_size()) / 4, kOnGpu};
}

template <class Real>
struct Table {
  SortedPoints<Real> points;
  Real* reals;
  int* ints;

  Table(int* words, const TableSizes<int64_t>& sizes)
      : points{reinterpret_cast<Real*>(words), sizes.points}, reals(points.data + 4 * sizes.points),
        ints(reinterpret_cast<int*>(reals + sizes.reals)) {}
};

template <class Real>
CellList<Real> view_cell_list(int* words, const PointSet& set) {
  const Table<Real> table(words, sizes_of(set).cell_list());
  return {sizes_of(set).cells(), table.reals, table.ints, table.points};
}
template <class Real>
HashGrid<Real> view_hash_grid(int* words, const PointSet& set) {
  const Table<Real> table(words, sizes_of(set).hash_grid());
  return {table.reals, table.ints, table.ints + 1, table.points, set.batch};
}

// The words of a table that is only read.
inline int* words_of(const Tensor& table) { return const_cast<int*>(data<const int>(table)); }

// A table that a call was given, at an address from which a GPU reads 16 bytes at a time: hooks of autograd may have
// copied it to another.
inline Tensor checked_table(const char* name, const Tensor& table, int64_t words, const Tensor& points) {
  check_like(name, table, {words}, ScalarType::Int, points);
  return reinterpret_cast<uintptr_t>(table.const_data_ptr()) % 16 == 0 ? table : torch::stable::clone(table);
}

// The largest radius of the searches: a number, or a tensor () that only the device knows.
struct LargestRadius {
  double number;
  OptionalTensor on_device;
};

// Rows (Q, k), or (pairs,) with row_splits (Q + 1,), both int64 and on the device of `like`.
inline ListedRows checked_lists(const Tensor& rows, const OptionalTensor& row_splits, int64_t references,
                                const Tensor& like) {
  const int64_t queries = row_splits ? row_splits->numel() - 1 : rows.size(0), k = row_splits ? 0 : rows.size(1);
  if (row_splits) check_like("row_splits", *row_splits, {queries + 1}, ScalarType::Long, like);
  const auto check_rows = [&](Shape shape) { check_like("rows", rows, shape, ScalarType::Long, like); };
  row_splits ? check_rows({rows.numel()}) : check_rows({queries, k});
  for (const int64_t size : {queries, references}) {
    POINTPROJ_CHECK(size <= kLargestInt - 2, "there may be at most ", kLargestInt - 2,
                    " queries and reference points; got ", size);
  }
  return {data<const int64_t>(rows), data<const int64_t>(row_splits), k, rows.numel(), static_cast<int>(queries),
          static_cast<int>(references)};
}

// Which pairs contain each reference point, in the order of the pairs.
struct InvertedRows {
  Tensor start, pairs;  // see InvertRows

  template <class Rows>
  InvertedRows(const Device& device, const Rows& row_of, int64_t count, int64_t references, const Tensor& like)
      : start(empty_ints({references + 2}, like)), pairs(empty_ints({count}, like)) {
    POINTPROJ_CHECK(count <= kLargestInt, "gradients of more than ", kLargestInt,
                    " pairs of neighbours are not supported; got ", count, ": split the queries");
    const SortBuffers buffers(count, references + 1, like);
    device.build(InvertRows<Rows>{row_of, data<int>(start), data<int>(pairs), buffers.view()},
                 greater(count, references + 1));
    if (kOnGpu) pairs = torch::stable::to(buffers.stable_order(0, count), ScalarType::Int);
  }
};

Tensor make_cell_list(const PointSet& set, const Device& device, const Build& build = {});
// Grids of one set of points, or of two in one launch, one table behind the other. On a CPU, and if `deterministic`,
// points of a cell are in the order of their rows; else in the order in which a GPU's threads come.
Tensor make_hash_grids(const std::vector<PointSet>& sets, const Device& device, const LargestRadius& radius,
                       bool deterministic, const Build& build = {});

// Writes rows of the k nearest (Q, k), and their distances if there is a tensor for them.
void search(const PointSets& sets, const OptionalTensor& cell_list, const Tensor& rows,
            const OptionalTensor& distances, double max_radius = kInfinity<double>);
void check_k(const PointSets& sets, int64_t k);

}  // namespace pointproj::POINTPROJ_DEVICE
