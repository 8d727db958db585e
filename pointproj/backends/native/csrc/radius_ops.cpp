// The torch operators of the aggregation within a radius: they check, allocate, and hand out tasks.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>

#include "torch_device.h"
#include "within.h"

namespace pointproj {

namespace {

// ---- tables

// A CPU would rather test some points more than look up more rows of cells.
int cells_per_radius(const Device& device) { return device.is_cuda ? 2 : 1; }

template <class Real>
Wrapped<Real> view_wrapped(const Batch& batch, at::TensorList tables) {
  return {const_cast<Real*>(tables[0].const_data_ptr<Real>()), const_cast<int*>(tables[1].const_data_ptr<int>()),
          view_points<Real>(tables[2]), batch};
}

void check_wrapped(const Tensor& points, const Batch& batch, at::TensorList tables) {
  TORCH_CHECK(tables.size() == 3, "cells must be the 3 tables of build_wrapped; got ", tables.size());
  check_like("cells[0]", tables[0], {}, points.scalar_type(), points);
  check_like("cells[1]", tables[1], {places_for(batch.rows, batch.clouds) + 2}, at::kInt, points);
  check_like("cells[2]", tables[2], sorted_points_shape(points), points.scalar_type(), points);
}

using Tables = std::array<Tensor, 3>;

Tables build_tables(const Device& device, const Tensor& points, const Batch& batch, double radius) {
  TORCH_CHECK(radius > 0 && std::isfinite(radius), "radius must be positive and finite; got ", radius);
  const int64_t places = places_for(batch.rows, batch.clouds);
  const auto on = points.options().dtype(at::kInt);
  Tables tables{at::empty({}, points.options()), at::empty({places + 2}, on),
                empty_sorted_points(points)};
  const Tensor place = at::empty({batch.rows, 2}, on);
  const Tensor scratch = at::empty({places + 1 + cuda::kMostBlocks}, on);
  for_positions(points, [&](auto real) {
    using Real = decltype(real);
    int* occupancy = scratch.mutable_data_ptr<int>();
    device.build(
        BuildWrapped<Real>{points.const_data_ptr<Real>(), view_wrapped<Real>(batch, tables),
                           static_cast<Real>(radius / cells_per_radius(device)), static_cast<int>(places), occupancy,
                           place.mutable_data_ptr<int>(), occupancy + places + 1},
        places + 1);
  });
  if (in_fixed_order(device)) sort_stably(points, place, tables[2]);
  return tables;
}

std::tuple<Tensor, Tensor, Tensor> build_wrapped(
    const Tensor& points, const OptionalTensor& offsets, int64_t clouds, double radius) {
  check_points("points", points);
  const Batch batch = batch_of(points, offsets, clouds);
  const Device device(points);
  const Tables tables = build_tables(device, points, batch, radius);
  return {tables[0], tables[1], tables[2]};
}

// ---- aggregation

// The largest x with sqrt(x) <= radius, rounded as the reference does; spares every pair a root.
template <class Real>
Real largest_square_within(Real radius) {
  Real square = radius * radius;
  while (std::sqrt(square) > radius) square = std::nextafter(square, Real(0));
  while (true) {
    const Real following = std::nextafter(square, kInfinity<Real>);
    if (!(std::sqrt(following) <= radius)) return square;
    square = following;
  }
}

// Both sets of points, sorted, and what tasks need of them.
struct Call {
  const Device& device;
  Batch queries, references;
  at::TensorList query_cells, reference_cells;
  const Tensor& sigma;
  double radius;
  int channels;

  template <class Sum>
  int padded() const {
    return (channels + kVector<Sum> - 1) / kVector<Sum> * kVector<Sum>;
  }
  template <class Real, class Sum>
  Within<Real, Sum> within(bool from_queries, bool in_chunks) const {
    const Batch &own = from_queries ? queries : references, &others = from_queries ? references : queries;
    const at::TensorList own_cells = from_queries ? query_cells : reference_cells;
    const at::TensorList other_cells = from_queries ? reference_cells : query_cells;
    const Real limit = static_cast<Real>(radius);
    return {view_points<Real>(own_cells[2]), own, view_wrapped<Real>(others, other_cells), limit,
            largest_square_within(limit), sigma.const_data_ptr<Sum>(), channels, padded<Sum>(),
            in_chunks ? device.chunks(channels, kVector<Sum>) : 1};
  }
  template <class Real, class Sum>
  Tensor sort_rows(const Tensor& values, at::TensorList cells) const {
    const Tensor sorted = at::empty({values.size(0), padded<Sum>()}, values.options());
    device.each(SortRows<Real, Sum>{view_points<Real>(cells[2]), values.const_data_ptr<Sum>(), channels,
                                    padded<Sum>(), sorted.mutable_data_ptr<Sum>()},
                values.size(0));
    return sorted;
  }
};

void check_call(const Tensor& query_points, const Tensor& reference_points, const Batch& references,
                at::TensorList cells, const Tensor& features, const Tensor& sigma, double radius) {
  check_pair(query_points, reference_points);
  check_wrapped(reference_points, references, cells);
  check_features(features, sigma, reference_points);
  TORCH_CHECK(radius > 0 && std::isfinite(radius), "radius must be positive and finite; got ", radius);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> aggregate_within(
    const Tensor& query_points, const OptionalTensor& query_offsets, const Tensor& reference_points,
    const OptionalTensor& reference_offsets, int64_t clouds, at::TensorList cells, const Tensor& features,
    const Tensor& sigma, double radius) {
  const Batch queries = batch_of(query_points, query_offsets, clouds);
  const Batch references = batch_of(reference_points, reference_offsets, clouds);
  check_call(query_points, reference_points, references, cells, features, sigma, radius);
  const Device device(query_points);
  const Tables query_cells = build_tables(device, query_points, queries, radius);
  const Call call{device, queries, references, query_cells, cells, sigma, radius,
                  static_cast<int>(features.size(1))};
  const Tensor aggregated = at::empty({query_points.size(0), features.size(1)}, features.options());
  const Tensor softmax = at::empty({query_points.size(0), 2}, features.options());
  for_dtypes(query_points, features, [&](auto real, auto sum) {
    using Real = decltype(real);
    using Sum = decltype(sum);
    const Tensor sorted = call.sort_rows<Real, Sum>(features, cells);
    const auto within = call.within<Real, Sum>(true, true);
    call.device.each(AggregateWithin<Real, Sum>{within, sorted.const_data_ptr<Sum>(),
                                                aggregated.mutable_data_ptr<Sum>(), softmax.mutable_data_ptr<Sum>()},
                     query_points.size(0) * within.chunks);
  });
  return {aggregated, softmax, query_cells[0], query_cells[1], query_cells[2]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> aggregate_within_backward(
    const Tensor& grad, std::array<bool, 4> needs, const Tensor& query_points, const OptionalTensor& query_offsets,
    const Tensor& reference_points, const OptionalTensor& reference_offsets, int64_t clouds, at::TensorList cells,
    const Tensor& features, const Tensor& sigma, double radius, const Tensor& aggregated, const Tensor& softmax,
    const Tensor& query_width, const Tensor& query_start, const Tensor& sorted_queries) {
  const Batch queries = batch_of(query_points, query_offsets, clouds);
  const Batch references = batch_of(reference_points, reference_offsets, clouds);
  check_call(query_points, reference_points, references, cells, features, sigma, radius);
  const Tables query_cells{query_width, query_start, sorted_queries};
  check_wrapped(query_points, queries, query_cells);
  const int64_t query_count = query_points.size(0), reference_count = reference_points.size(0);
  check_like("aggregated", aggregated, {query_count, features.size(1)}, features.scalar_type(), features);
  check_like("grad", grad, aggregated.sizes(), features.scalar_type(), features);
  check_like("softmax", softmax, {query_count, 2}, features.scalar_type(), features);
  const bool of_queries = needs[0], of_references = needs[1], of_features = needs[2], of_sigma = needs[3];
  const bool pulls = of_queries || of_references || of_sigma;
  const Device device(query_points);
  const Call call{device, queries, references, query_cells, cells, sigma, radius,
                  static_cast<int>(features.size(1))};
  const auto made = [](bool needed, const Tensor& like) {
    return at::empty(needed ? like.sizes() : at::IntArrayRef{0}, like.options());
  };
  Tensor d_query = made(pulls, query_points), d_reference = made(of_references, reference_points);
  Tensor d_features = made(of_features, features), d_sigma = made(false, sigma);
  for_dtypes(query_points, features, [&](auto real, auto sum) {
    using Real = decltype(real);
    using Sum = decltype(sum);
    const Tensor sorted_grad = call.sort_rows<Real, Sum>(grad, query_cells);
    const Sum* known = softmax.const_data_ptr<Sum>();
    if (of_features) {
      const auto within = call.within<Real, Sum>(false, true);
      call.device.each(GatherWithin<Real, Sum>{within, sorted_grad.const_data_ptr<Sum>(), known,
                                               d_features.mutable_data_ptr<Sum>()},
                       reference_count * within.chunks);
    }
    if (!pulls) return;
    const Tensor sorted_features = call.sort_rows<Real, Sum>(features, cells);
    const Tensor means = at::empty({query_count}, features.options()), sigma_rows = at::empty_like(means);
    call.device.each(
        PullWithin<Real, Sum>{call.within<Real, Sum>(true, false), sorted_features.const_data_ptr<Sum>(),
                              sorted_grad.const_data_ptr<Sum>(), aggregated.const_data_ptr<Sum>(), known,
                              means.mutable_data_ptr<Sum>(), d_query.mutable_data_ptr<Real>(),
                              sigma_rows.mutable_data_ptr<Sum>()},
        query_count);
    if (of_sigma) d_sigma = sigma_rows.sum();
    if (of_references) {
      call.device.each(
          PushWithin<Real, Sum>{call.within<Real, Sum>(false, false), sorted_features.const_data_ptr<Sum>(),
                                sorted_grad.const_data_ptr<Sum>(), known, means.const_data_ptr<Sum>(),
                                d_reference.mutable_data_ptr<Real>()},
          reference_count);
    }
  });
  return {of_queries ? d_query : made(false, query_points), d_reference, d_features, d_sigma};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pointproj, library) {
  library.def(
      "native_build_wrapped(Tensor points, Tensor? offsets, SymInt clouds, float radius) -> "
      "(Tensor, Tensor, Tensor)");
  library.def(
      "native_aggregate_within(Tensor query_points, Tensor? query_offsets, Tensor reference_points, "
      "Tensor? reference_offsets, SymInt clouds, Tensor[] cells, Tensor features, Tensor sigma, float radius) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "native_aggregate_within_backward(Tensor grad_0, bool[4] needs, Tensor query_points, Tensor? query_offsets, "
      "Tensor reference_points, Tensor? reference_offsets, SymInt clouds, Tensor[] cells, Tensor features, "
      "Tensor sigma, float radius, Tensor output_0, Tensor output_1, Tensor output_2, Tensor output_3, "
      "Tensor output_4) -> (Tensor, Tensor, Tensor, Tensor)");
  POINTPROJ_REGISTER("native_build_wrapped", build_wrapped)
  POINTPROJ_REGISTER("native_aggregate_within", aggregate_within)
  POINTPROJ_REGISTER("native_aggregate_within_backward", aggregate_within_backward)
}

}  // namespace pointproj
