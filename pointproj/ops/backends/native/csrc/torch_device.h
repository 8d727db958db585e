// What the torch operators share: the device that tensors are on, checks, tables.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#ifdef POINTPROJ_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <array>
#include <optional>

#include "launch.h"
#include "common.h"

namespace pointproj {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kLargestInt = 0x7fffffff;

#ifdef POINTPROJ_CUDA
#define POINTPROJ_REGISTER(name, function)                       \
  library.impl(name, c10::DispatchKey::CPU, TORCH_FN(function)); \
  library.impl(name, c10::DispatchKey::CUDA, TORCH_FN(function));
#else
#define POINTPROJ_REGISTER(name, function) library.impl(name, c10::DispatchKey::CPU, TORCH_FN(function));
#endif

// ---- where

struct Device {
  bool is_cuda;
#ifdef POINTPROJ_CUDA
  std::optional<c10::cuda::CUDAGuard> guard;
#endif
  void* stream = nullptr;

  explicit Device(const Tensor& tensor) : is_cuda(tensor.is_cuda()) {
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
  // A warp of a GPU for each item, a thread of a CPU.
  template <class Task>
  void each(const Task& task, int64_t items) const {
#ifdef POINTPROJ_CUDA
    if (is_cuda) return cuda::each_warp(task, items, stream);
#endif
    cpu::each(task, items);
  }
  // Searches that it takes to hold all channels, so many in the lanes of one.
  int chunks(int64_t channels) const {
    return is_cuda ? static_cast<int>((channels + kChannelsAtOnce - 1) / kChannelsAtOnce) : 1;
  }
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

// ---- checks

inline void check_points(const char* name, const Tensor& points) {
  TORCH_CHECK(points.dim() == 2 && points.size(1) == 3, name, " must have shape (n, 3); got ", points.sizes());
  TORCH_CHECK(points.scalar_type() == at::kFloat || points.scalar_type() == at::kDouble, name,
              " must be float32 or float64; got ", points.scalar_type());
  TORCH_CHECK(points.is_contiguous(), name, " must be contiguous");
  TORCH_CHECK(points.size(0) <= kLargestInt / 8, name, " may have at most ", kLargestInt / 8, " rows; got ",
              points.size(0));
}

inline void check_like(const char* name, const Tensor& tensor, at::IntArrayRef shape, at::ScalarType dtype, const Tensor& on) {
  TORCH_CHECK(tensor.sizes() == shape, name, " must have shape ", shape, "; got ", tensor.sizes());
  TORCH_CHECK(tensor.scalar_type() == dtype, name, " must be ", dtype, "; got ", tensor.scalar_type());
  TORCH_CHECK(tensor.device() == on.device(), name, " must be on ", on.device(), "; got ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

inline Batch batch_of(const Tensor& points, const OptionalTensor& offsets, int64_t clouds) {
  TORCH_CHECK(clouds >= 1 && clouds <= kLargestInt, "clouds must be positive; got ", clouds);
  if (offsets) {
    check_like("offsets", *offsets, {clouds + 1}, at::kInt, points);
  } else {
    TORCH_CHECK(points.size(0) % clouds == 0, "without offsets all clouds are of equal size; got ", points.size(0),
                " points in ", clouds, " clouds");
  }
  return {offsets ? offsets->const_data_ptr<int>() : nullptr, static_cast<int>(points.size(0)),
          static_cast<int>(clouds)};
}

inline void check_features(const Tensor& features, const Tensor& sigma, const Tensor& points) {
  TORCH_CHECK(features.dim() == 2 && features.size(1) >= 1, "features must have shape (n, channels); got ",
              features.sizes());
  TORCH_CHECK(features.scalar_type() == at::kDouble ||
                  (features.scalar_type() == at::kFloat && points.scalar_type() == at::kFloat),
              "features must be float32 or float64, and as wide as the points; got ", features.scalar_type());
  TORCH_CHECK(features.size(1) <= 1 << 20, "features may have at most ", 1 << 20, " channels; got ",
              features.size(1));
  check_like("features", features, {points.size(0), features.size(1)}, features.scalar_type(), points);
  check_like("sigma", sigma, {}, features.scalar_type(), points);
}

inline void check_pair(const Tensor& query_points, const Tensor& reference_points) {
  check_points("query_points", query_points);
  check_points("reference_points", reference_points);
  check_like("reference_points", reference_points, reference_points.sizes(), query_points.scalar_type(),
             query_points);
}

// ---- tables

inline std::array<int64_t, 2> sorted_points_shape(const Tensor& points) {
  const int64_t rows = points.size(0);
  return points.is_cuda() ? std::array<int64_t, 2>{rows, 4} : std::array<int64_t, 2>{4, rows + kReadAhead};
}

inline Tensor empty_sorted_points(const Tensor& points) {
  Tensor sorted = at::empty(sorted_points_shape(points), points.options());
  if (sorted.is_cpu()) sorted.slice(1, points.size(0)).zero_();
  return sorted;
}

template <class Real>
Points<Real> view_points(const Tensor& sorted) {
  const bool rows = sorted.is_cuda();
  const int64_t stride = rows ? 0 : sorted.size(1);
  const int64_t count = rows ? sorted.size(0) : sorted.size(1) - kReadAhead;
  return {const_cast<Real*>(sorted.const_data_ptr<Real>()), stride, static_cast<int>(count)};
}

inline Tensor ints(int64_t count, const Tensor& like) { return at::empty({count}, like.options().dtype(at::kInt)); }

inline Tensor empty_if(bool needed, const Tensor& like) {
  return at::empty(needed ? like.sizes() : at::IntArrayRef{0}, like.options());
}

inline bool in_fixed_order(const Device& device) {
  return device.is_cuda && at::globalContext().deterministicAlgorithms();
}

// Ranks by row, where atomics give them in the order of arrival.
inline void sort_stably(const Tensor& points, const Tensor& place, Tensor& sorted) {
  const Tensor order = at::argsort(place.select(1, 0), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  sorted.slice(1, 0, 3).copy_(points.index_select(0, order));
  const auto bits = points.scalar_type() == at::kFloat ? at::kInt : at::kLong;
  sorted.select(1, 3).copy_(order.to(bits).view(points.scalar_type()));
}

}  // namespace pointproj
