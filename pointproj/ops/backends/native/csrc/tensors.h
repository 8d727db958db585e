// What the torch operators share: the device that tensors are on, checks, and tables as the kernels see them.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#ifdef POINTPROJ_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <array>
#include <optional>

#include "cell_list.h"
#include "hash_grid.h"
#include "launch.h"

namespace pointproj {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kLargestInt = 0x7fffffff;

// ---- registration

// An operator that has a gradient registers with autograd too; all others make what is constant to it.
enum class Gradient { kNone, kOwn };

template <class Function>
void define(torch::Library& library, const std::string& schema, Function function,
            Gradient gradient = Gradient::kNone) {
  const std::string name = schema.substr(0, schema.find('('));
  library.def(schema.c_str());
  library.impl(name.c_str(), c10::DispatchKey::CPU, function);
#ifdef POINTPROJ_CUDA
  library.impl(name.c_str(), c10::DispatchKey::CUDA, function);
#endif
  if (gradient == Gradient::kOwn) return;
  library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough()));
}

// ---- where

struct Device {
  bool is_cuda;
  bool in_fixed_order;  // results may not depend on the order in which threads come
#ifdef POINTPROJ_CUDA
  std::optional<c10::cuda::CUDAGuard> guard;
#endif
  void* stream = nullptr;

  explicit Device(const Tensor& tensor)
      : is_cuda(tensor.is_cuda()), in_fixed_order(!is_cuda || at::globalContext().deterministicAlgorithms()) {
    TORCH_CHECK(is_cuda || tensor.is_cpu(), "native: expected tensors on cpu or cuda; got ", tensor.device());
#ifdef POINTPROJ_CUDA
    if (is_cuda) {
      guard.emplace(tensor.device());
      stream = c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
    }
#else
    TORCH_CHECK(!is_cuda, "native: built without CUDA; run `python -m pointproj build-native` where a GPU is");
#endif
  }

  template <class Task>
  void build(const Task& task, [[maybe_unused]] int64_t largest_loop) const {
#ifdef POINTPROJ_CUDA
    if (is_cuda) return cuda::build(task, largest_loop, stream);
#endif
    cpu::build(task);
  }
  template <class Task>
  void each(const Task& task, int64_t items) const {
    is_cuda ? each_on_gpu(task, items) : cpu::each(task, items);
  }
  // For tasks that a CPU does not have.
  template <class Task>
  void each_on_gpu([[maybe_unused]] const Task& task, [[maybe_unused]] int64_t items) const {
#ifdef POINTPROJ_CUDA
    cuda::each(task, items, stream);
#endif
  }
  void clear(const SetToZero& task) const { each_on_gpu(task, task.threads()); }
};

template <class Body>
auto for_positions(const Tensor& points, Body body) {
  return points.scalar_type() == at::kFloat ? body(float{}) : body(double{});
}

template <class Body>
auto for_dtypes(const Tensor& points, const Tensor& features, Body body) {
  if (features.scalar_type() == at::kFloat) return body(float{}, float{});
  return points.scalar_type() == at::kFloat ? body(float{}, double{}) : body(double{}, double{});
}

// ---- tensors

inline Tensor empty_ints(at::IntArrayRef shape, const Tensor& like) {
  return at::empty(shape, like.options().dtype(at::kInt));
}

inline Tensor empty_longs(at::IntArrayRef shape, const Tensor& like) {
  return at::empty(shape, like.options().dtype(at::kLong));
}

// The elements, to be read if T is const.
template <class T>
T* data(const Tensor& tensor) {
  if constexpr (std::is_const_v<T>) {
    return tensor.const_data_ptr<std::remove_const_t<T>>();
  } else {
    return tensor.mutable_data_ptr<T>();
  }
}

template <class T>
Matrix<T> matrix(const Tensor& tensor) {
  return {data<T>(tensor), static_cast<int>(tensor.size(1))};
}

// What a counting sort writes besides its results.
struct SortBuffers {
  int rows, slots;
  Tensor occupancy, place;

  SortBuffers(int64_t rows, int64_t slots, const Tensor& like)
      : rows(static_cast<int>(rows)), slots(static_cast<int>(slots)),
        occupancy(empty_ints({slots + cuda::kMostBlocks}, like)), place(empty_ints({rows, 2}, like)) {}
  CountingSort view() const {
    return {rows, slots, data<int>(occupancy), data<int>(place), data<int>(occupancy) + slots};
  }
};

// ---- checks

inline void check_points(const char* name, const Tensor& points) {
  TORCH_CHECK(points.dim() == 2 && points.size(1) == 3, name, " must have shape (n, 3); got ", points.sizes());
  TORCH_CHECK(points.scalar_type() == at::kFloat || points.scalar_type() == at::kDouble, name,
              " must be float32 or float64; got ", points.scalar_type());
  TORCH_CHECK(points.is_contiguous(), name, " must be contiguous");
  TORCH_CHECK(points.size(0) <= kLargestInt / 8, name, " may have at most ", kLargestInt / 8, " rows; got ",
              points.size(0));
}

inline void check_like(
    const std::string& name, const Tensor& tensor, at::IntArrayRef shape, at::ScalarType dtype, const Tensor& on) {
  TORCH_CHECK(tensor.sizes() == shape, name, " must have shape ", shape, "; got ", tensor.sizes());
  TORCH_CHECK(tensor.scalar_type() == dtype, name, " must be ", dtype, "; got ", tensor.scalar_type());
  TORCH_CHECK(tensor.device() == on.device(), name, " must be on ", on.device(), "; got ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_pair(const Tensor& query_points, const Tensor& reference_points) {
  check_points("query_points", query_points);
  check_points("reference_points", reference_points);
  check_like("reference_points", reference_points, reference_points.sizes(), query_points.scalar_type(),
             query_points);
}

inline void check_radius(double radius) {
  TORCH_CHECK(radius > 0 && std::isfinite(radius), "radius must be positive and finite; got ", radius);
}

inline Batch batch_of(const Tensor& points, const OptionalTensor& offsets, int64_t clouds) {
  TORCH_CHECK(clouds >= 1 && clouds <= kLargestInt, "clouds must be positive; got ", clouds);
  if (offsets) {
    check_like("offsets", *offsets, {clouds + 1}, at::kInt, points);
  } else {
    TORCH_CHECK(points.size(0) % clouds == 0, "without offsets all clouds are of equal size; got ", points.size(0),
                " points in ", clouds, " clouds");
  }
  return {offsets ? data<const int>(*offsets) : nullptr, static_cast<int>(points.size(0)), static_cast<int>(clouds)};
}

// ---- tables: of each kind three tensors, the last one with the sorted points

using Tables = std::array<Tensor, 3>;

struct Cloud {
  const Tensor& points;
  Batch batch;
};

// The largest of the searches: a number, or a tensor () that only the device knows.
struct LargestRadius {
  double number;
  OptionalTensor on_device;
};

// Hash grids of one set of points, or of two, built in one launch. Points of a cell are in the order of their rows on a
// CPU, and where that is asked for; else in that of their arrival.
template <size_t kCount>
std::array<Tables, kCount> make_hash_grids(
    const std::array<Cloud, kCount>& clouds, const LargestRadius& radius, bool in_fixed_order);

inline std::array<int64_t, 2> sorted_points_shape(const Tensor& points) {
  const int64_t rows = points.size(0);
  if (points.is_cuda()) return {rows, 4};
  return {4, rows + kReadAhead};
}

inline Tensor empty_sorted_points(const Tensor& points) {
  const Tensor sorted = at::empty(sorted_points_shape(points), points.options());
  if (!points.is_cuda()) sorted.slice(1, points.size(0)).zero_();
  return sorted;
}

template <class Real>
SortedPoints<Real> view_sorted_points(const Tensor& sorted) {
  return {const_cast<Real*>(data<const Real>(sorted)), sorted.size(1)};
}

inline void check_tables(const std::string& name, TensorList tables, at::IntArrayRef reals, int64_t numbers,
                         const Tensor& points, const char* builder) {
  TORCH_CHECK(tables.size() == 3, name, " must be the 3 tables of ", builder, "; got ", tables.size());
  check_like(name + "[0]", tables[0], reals, points.scalar_type(), points);
  check_like(name + "[1]", tables[1], {numbers}, at::kInt, points);
  check_like(name + "[2]", tables[2], sorted_points_shape(points), points.scalar_type(), points);
}

inline CellListSizes cell_list_sizes(const Tensor& points, int64_t clouds) {
  const int64_t rows = points.size(0);
  // Fine cells spare distances; for many points on a GPU the tables themselves are what takes time.
  return {rows, clouds, !points.is_cuda() ? 2 : rows <= 1 << 18 ? 4 : 1};
}

inline void check_cell_list(TensorList tables, const Tensor& points, int64_t clouds) {
  const CellListSizes sizes = cell_list_sizes(points, clouds);
  check_tables("cell_list", tables, {sizes.reals()}, sizes.numbers(), points, "build_cell_list");
}

inline void check_hash_grid(const char* name, TensorList tables, const Tensor& points, const Batch& batch) {
  const int64_t slots = HashGrid<float>::slots_of(batch.rows, batch.clouds);
  check_tables(name, tables, {}, slots + 2, points, "build_hash_grid");
}

template <class Real>
CellList<Real> view_cell_list(TensorList tables, const Tensor& points, int64_t clouds) {
  return {cell_list_sizes(points, clouds), const_cast<Real*>(data<const Real>(tables[0])),
          const_cast<int*>(data<const int>(tables[1])), view_sorted_points<Real>(tables[2])};
}

template <class Real>
HashGrid<Real> view_hash_grid(TensorList tables, const Batch& batch) {
  return {const_cast<Real*>(data<const Real>(tables[0])), const_cast<int*>(data<const int>(tables[1])),
          view_sorted_points<Real>(tables[2]), batch};
}

}  // namespace pointproj
