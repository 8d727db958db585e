// Tables of an index, as one tensor (words,) of 32-bit words: the sorted points, then some numbers like their
// coordinates, then integers.
#pragma once

#include "cell_list.h"
#include "gradients.h"
#include "hash_grid.h"
#include "torch.h"

namespace pointproj::POINTPROJ_DEVICE {

struct TableSizes {
  int64_t points;  // with what is read ahead
  int64_t reals, ints;
  int64_t words_per_real;

  TableSizes(const Tensor& points, int64_t reals, int64_t ints)
      : points(points.size(0) + (kOnGpu ? 0 : kReadAhead)), reals(reals), ints(ints),
        words_per_real(static_cast<int64_t>(points.element_size()) / 4) {}
  // Several tables may lie one behind the other: each begins at a multiple of 16 bytes.
  int64_t words() const { return ((4 * points + reals) * words_per_real + ints + 3) / 4 * 4; }
};

template <class Real>
struct Table {
  SortedPoints<Real> points;
  Real* reals;
  int* ints;

  Table(int* words, const TableSizes& sizes)
      : points{reinterpret_cast<Real*>(words), sizes.points}, reals(points.data + 4 * sizes.points),
        ints(reinterpret_cast<int*>(reals + sizes.reals)) {}
};

inline CellListSizes cell_list_sizes(const Cloud& cloud) {
  const int64_t rows = cloud.batch.rows;
  // Fine cells spare distances; for many points on a GPU the tables themselves are what takes time.
  return {rows, cloud.batch.clouds, !kOnGpu ? 2 : rows <= 1 << 18 ? 4 : 1};
}
inline TableSizes sizes_of_cell_list(const Cloud& cloud) {
  const CellListSizes sizes = cell_list_sizes(cloud);
  return {cloud.points, sizes.reals(), sizes.numbers()};
}
inline TableSizes sizes_of_hash_grid(const Cloud& cloud) {
  return {cloud.points, 1, HashGrid<float>::slots_of(cloud.batch.rows, cloud.batch.clouds) + 2};
}

template <class Real>
CellList<Real> view_cell_list(int* words, const Cloud& cloud) {
  const Table<Real> table(words, sizes_of_cell_list(cloud));
  return {cell_list_sizes(cloud), table.reals, table.ints, table.points};
}
template <class Real>
HashGrid<Real> view_hash_grid(int* words, const Cloud& cloud) {
  const Table<Real> table(words, sizes_of_hash_grid(cloud));
  return {table.reals, table.ints, table.points, cloud.batch};
}

// What is only read.
inline int* words_of(const Tensor& table) { return const_cast<int*>(data<const int>(table)); }

// A table that came in, where a GPU can read 16 bytes at a time: hooks of autograd may have brought it back elsewhere.
inline Tensor checked_table(const char* name, const Tensor& table, int64_t words, const Tensor& points) {
  check_like(name, table, {words}, ScalarType::Int, points);
  return reinterpret_cast<uintptr_t>(table.const_data_ptr()) % 16 == 0 ? table : torch::stable::clone(table);
}

// The largest radius of the searches: a number, or a tensor () that only the device knows.
struct LargestRadius {
  double number;
  OptionalTensor on_device;
};

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

Tensor make_cell_list(const Cloud& cloud, const Device& device);
// Of one set of points, or of two in one launch, one table behind the other. Points of a cell are in the order of their
// rows on a CPU, and where that is asked for; else in that of their arrival.
Tensor make_hash_grids(const std::vector<Cloud>& clouds, const Device& device, const LargestRadius& radius,
                       bool in_fixed_order);

// Rows of the k nearest (Q, k), and their distances if they are wanted.
void search(const Clouds& clouds, const OptionalTensor& cell_list, const Tensor& rows, const OptionalTensor& distances);
void check_k(const Clouds& clouds, int64_t k);

}  // namespace pointproj::POINTPROJ_DEVICE
