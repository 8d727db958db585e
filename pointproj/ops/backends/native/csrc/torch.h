// Tensors and checks, with only torch's stable ABI: one library serves every torch from 2.10 on.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <new>
#include <stdexcept>

#include "operator.h"
#ifdef __CUDACC__
#include "cuda.cuh"
#else
#include "cpu.h"
#endif

namespace pointproj::POINTPROJ_DEVICE {

using torch::headeronly::ScalarType;
using Shape = torch::headeronly::IntHeaderOnlyArrayRef;

constexpr int64_t kLargestInt = 0x7fffffff;

template <class Body>
auto for_positions(const Tensor& points, Body body) {
  return points.scalar_type() == ScalarType::Float ? body(float{}) : body(double{});
}

template <class Body>
auto for_dtypes(const Tensor& points, const Tensor& features, Body body) {
  if (features.scalar_type() == ScalarType::Float) return body(float{}, float{});
  return points.scalar_type() == ScalarType::Float ? body(float{}, double{}) : body(double{}, double{});
}

// ---- tensors

struct NotEnoughMemory : std::bad_alloc {
  std::string message;

  explicit NotEnoughMemory(int64_t elements)
      : message("native: not enough memory for a tensor of " + std::to_string(elements) + " elements") {}
  const char* what() const noexcept override { return message.c_str(); }
};

// By the C shim: through torch's dispatcher it takes several times as long.
inline Tensor empty(Shape shape, ScalarType dtype, const Tensor& like) {
  std::array<int64_t, 2> strides;
  int64_t elements = 1;
  for (size_t i = shape.size(); i-- > 0; elements *= shape[i]) strides[i] = elements;
  int32_t type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made;
  const auto failed = aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(), code,
                                               type, like.get_device_index(), &made);
  if (failed) throw NotEnoughMemory(elements);
  return Tensor(made);
}

inline Tensor empty(Shape shape, const Tensor& like) { return empty(shape, like.scalar_type(), like); }
inline Tensor empty_ints(Shape shape, const Tensor& like) { return empty(shape, ScalarType::Int, like); }
inline Tensor empty_longs(Shape shape, const Tensor& like) { return empty(shape, ScalarType::Long, like); }

// Calls an operator of torch for which the stable ABI has no function.
template <class... Arguments>
Tensor call(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The elements; T is const where they are only read.
template <class T>
T* data(const Tensor& tensor) {
  if constexpr (std::is_const_v<T>) {
    return tensor.const_data_ptr<std::remove_const_t<T>>();
  } else {
    return tensor.mutable_data_ptr<T>();
  }
}

template <class T>
T* data(const OptionalTensor& tensor) { return tensor ? data<T>(*tensor) : nullptr; }

template <class T>
Matrix<T> matrix(const Tensor& tensor) { return {data<T>(tensor), static_cast<int>(tensor.size(1))}; }

inline void clear(const Device& device, const Tensor& tensor) {
  device.clear(tensor.mutable_data_ptr(), tensor.numel() * static_cast<int64_t>(tensor.element_size()));
}

// What a counting sort writes besides its results, behind an even number of other words that its caller needs: all in
// one tensor, since to make one takes many steps.
struct SortBuffers {
  int rows, slots;
  int64_t others;
  Tensor words;

  SortBuffers(int64_t rows, int64_t slots, const Tensor& like, int64_t others = 0)
      : rows(static_cast<int>(rows)), slots(static_cast<int>(slots)), others(others),
        words(empty_ints({others + 2 * rows + slots + kPartialSums}, like)) {}
  CountingSort view() const {
    int *const place = data<int>(words) + others, *const occupancy = place + 2 * int64_t(rows);
    return {rows, slots, occupancy, place, occupancy + slots};
  }
  // Some of the rows as int64, by slot, then by row. On a GPU, the ranks in a slot depend on the order of threads.
  Tensor stable_order(int64_t first, int64_t count) const {
    const Tensor pairs = torch::stable::narrow(const_cast<Tensor&>(words), 0, others + 2 * first, 2 * count);
    const Tensor slot = torch::stable::select(torch::stable::view(pairs, {count, 2}), 1, 0);
    return call("aten::argsort", "stable", slot, /*stable=*/true, /*dim=*/int64_t(0), /*descending=*/false);
  }
};

// ---- checks

template <class... Parts>
std::string joined(const Parts&... parts) {
  std::ostringstream made;
  ((made << parts), ...);
  return made.str();
}
#define POINTPROJ_CHECK(holds, ...) \
  if (!(holds)) throw std::runtime_error(joined(__VA_ARGS__))

inline std::string text(Shape shape) {
  std::string made;
  for (const int64_t size : shape) made += (made.empty() ? "" : ", ") + std::to_string(size);
  return "[" + made + "]";
}

inline std::string device_of(const Tensor& tensor) {
  return tensor.is_cpu() ? "cpu" : "cuda:" + std::to_string(tensor.get_device_index());
}

inline void check_like(const std::string& name, const Tensor& tensor, Shape shape, ScalarType dtype, const Tensor& on) {
  POINTPROJ_CHECK(tensor.sizes().equals(shape), name, " must have shape ", text(shape), "; got ", text(tensor.sizes()));
  POINTPROJ_CHECK(tensor.scalar_type() == dtype, name, " must be ", dtype, "; got ", tensor.scalar_type());
  POINTPROJ_CHECK(tensor.is_cuda() == on.is_cuda() && tensor.get_device_index() == on.get_device_index(), name,
                  " must be on ", device_of(on), "; got ", device_of(tensor));
  POINTPROJ_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_points(const std::string& name, const Tensor& points) {
  POINTPROJ_CHECK(points.dim() == 2 && points.size(1) == 3, name, " must have shape (n, 3); got ",
                  text(points.sizes()));
  POINTPROJ_CHECK(points.scalar_type() == ScalarType::Float || points.scalar_type() == ScalarType::Double, name,
                  " must be float32 or float64; got ", points.scalar_type());
  POINTPROJ_CHECK(points.is_contiguous(), name, " must be contiguous");
  POINTPROJ_CHECK(points.is_cuda() == kOnGpu, name, " must be on the device of the others; got ", device_of(points));
  POINTPROJ_CHECK(points.size(0) <= kLargestInt / 8, name, " may have at most ", kLargestInt / 8, " rows; got ",
                  points.size(0));
}

inline void check_radius(double radius) {
  POINTPROJ_CHECK(radius > 0 && std::isfinite(radius), "radius must be positive and finite; got ", radius);
}

// ---- points

// The points of a call: pointproj.ops.specification.clouds.Clouds.
struct Clouds {
  Tensor query_points;
  OptionalTensor query_offsets;
  Tensor reference_points;
  OptionalTensor reference_offsets;
  int64_t clouds;
  POINTPROJ_FIELDS(query_points, query_offsets, reference_points, reference_offsets, clouds)
};

// Points of one or several clouds, and where each cloud begins.
struct PointSet {
  const Tensor& points;
  Batch batch;

  PointSet(const char* name, const Tensor& points, const OptionalTensor& offsets, int64_t clouds) : points(points) {
    check_points(name, points);
    POINTPROJ_CHECK(clouds >= 1 && clouds <= kLargestInt, "clouds must be positive; got ", clouds);
    if (offsets) {
      check_like("offsets", *offsets, {clouds + 1}, ScalarType::Int, points);
    } else {
      POINTPROJ_CHECK(points.size(0) % clouds == 0, "without offsets all clouds are of equal size; got ",
                      points.size(0), " points in ", clouds, " clouds");
    }
    batch = {data<const int>(offsets), static_cast<int>(points.size(0)), static_cast<int>(clouds)};
  }
};

// Queries and the points that they search, checked. It refers to the tensors of `given`.
struct PointSets {
  PointSet queries, references;
  Device device;

  explicit PointSets(const Clouds& given)
      : queries("query_points", given.query_points, given.query_offsets, given.clouds),
        references("reference_points", given.reference_points, given.reference_offsets, given.clouds),
        device(given.query_points) {
    check_like("reference_points", given.reference_points, given.reference_points.sizes(),
               given.query_points.scalar_type(), given.query_points);
  }
  // Whether points search among themselves.
  bool itself() const {
    return queries.points.const_data_ptr() == references.points.const_data_ptr() &&
           queries.batch.rows == references.batch.rows;
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
