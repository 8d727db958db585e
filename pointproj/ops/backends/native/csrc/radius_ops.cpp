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

void check_wrapped(const char* name, const Tensor& points, const Batch& batch, at::TensorList tables) {
  TORCH_CHECK(tables.size() == 3, name, " must be the 3 tables of build_hash_grid; got ", tables.size());
  check_like(name, tables[0], {batch.clouds}, points.scalar_type(), points);
  check_like(name, tables[1], {places_for(batch.rows, batch.clouds) + 2}, at::kInt, points);
  check_like(name, tables[2], sorted_points_shape(points), points.scalar_type(), points);
}

using Tables = std::array<Tensor, 3>;

struct Cloud {
  const Tensor& points;
  Batch batch;
};

// Tables of one set of points, or of two, built in one launch.
template <size_t kCount>
std::array<Tables, kCount> build_tables(
    const std::array<Cloud, kCount>& clouds, const OptionalTensor& radii, double radius) {
  const Tensor& like = clouds[0].points;
  const Device device(like);
  const auto on = like.options().dtype(at::kInt);
  std::array<Tables, kCount> made;
  int64_t slots = 0, rows = 0;
  for (size_t i = 0; i < kCount; ++i) {
    const int64_t places = places_for(clouds[i].batch.rows, clouds[i].batch.clouds);
    made[i] = {at::empty({clouds[i].batch.clouds}, like.options()), at::empty({places + 2}, on), empty_sorted_points(clouds[i].points)};
    slots += places + 1;
    rows += clouds[i].batch.rows;
  }
  TORCH_CHECK(slots <= kLargestInt, "too many points for 32-bit cell numbers: ", rows);
  const Tensor place = at::empty({rows, 2}, on);
  const Tensor scratch = at::empty({slots + cuda::kMostBlocks}, on);
  for_positions(like, [&](auto real) {
    using Real = decltype(real);
    BuildWrapped<Real> task{};
    task.count = kCount;
    task.radii = radii ? radii->const_data_ptr<Real>() : nullptr;
    task.radius = static_cast<Real>(radius);
    task.cells_per_radius = cells_per_radius(device);
    task.occupancy = scratch.mutable_data_ptr<int>();
    task.place = place.mutable_data_ptr<int>();
    task.partial = task.occupancy + slots;
    for (size_t i = 0; i < kCount; ++i) {
      const Batch& batch = clouds[i].batch;
      task.sides[i] = {clouds[i].points.template const_data_ptr<Real>(), view_wrapped<Real>(batch, made[i]),
                       static_cast<int>(places_for(batch.rows, batch.clouds))};
    }
    device.build(task, slots);
  });
  if (in_fixed_order(device)) {
    int64_t first = 0;
    for (size_t i = 0; i < kCount; ++i) {
      const int64_t size = clouds[i].batch.rows;
      sort_stably(clouds[i].points, place.slice(0, first, first + size), made[i][2]);
      first += size;
    }
  }
  return made;
}

std::tuple<Tensor, Tensor, Tensor> build_wrapped(
    const Tensor& points, const OptionalTensor& offsets, int64_t clouds, const Tensor& radii) {
  check_points("points", points);
  const Batch batch = batch_of(points, offsets, clouds);
  check_like("radii", radii, {clouds}, points.scalar_type(), points);
  const auto [tables] = build_tables<1>({{{points, batch}}}, radii, 0);
  return {tables[0], tables[1], tables[2]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> build_wrapped_pair(
    const Tensor& query_points, const OptionalTensor& query_offsets, const Tensor& reference_points,
    const OptionalTensor& reference_offsets, int64_t clouds, double radius) {
  check_pair(query_points, reference_points);
  TORCH_CHECK(radius > 0 && std::isfinite(radius), "radius must be positive and finite; got ", radius);
  const Batch queries = batch_of(query_points, query_offsets, clouds);
  const Batch references = batch_of(reference_points, reference_offsets, clouds);
  const auto [q, r] = build_tables<2>({{{query_points, queries}, {reference_points, references}}}, {}, radius);
  return {q[0], q[1], q[2], r[0], r[1], r[2]};
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
            in_chunks ? device.chunks(channels) : 1};
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

// What forward and backward are called with.
struct Inputs {
  const Tensor& query_points;
  const OptionalTensor& query_offsets;
  const Tensor& reference_points;
  const OptionalTensor& reference_offsets;
  int64_t clouds;
  at::TensorList query_cells, reference_cells;
  const Tensor& features;
  const Tensor& sigma;
  double radius;

  Call check(const Device& device) const {
    check_pair(query_points, reference_points);
    const Batch queries = batch_of(query_points, query_offsets, clouds);
    const Batch references = batch_of(reference_points, reference_offsets, clouds);
    check_wrapped("query_cells", query_points, queries, query_cells);
    check_wrapped("reference_cells", reference_points, references, reference_cells);
    check_features(features, sigma, reference_points);
    TORCH_CHECK(radius > 0 && std::isfinite(radius), "radius must be positive and finite; got ", radius);
    return {device, queries, references, query_cells, reference_cells, sigma, radius,
            static_cast<int>(features.size(1))};
  }
};

std::tuple<Tensor, Tensor> aggregate_within(
    const Tensor& query_points, const OptionalTensor& query_offsets, const Tensor& reference_points,
    const OptionalTensor& reference_offsets, int64_t clouds, at::TensorList query_cells,
    at::TensorList reference_cells, const Tensor& features, const Tensor& sigma, double radius) {
  const Device device(query_points);
  const Call call = Inputs{query_points,    query_offsets, reference_points, reference_offsets, clouds, query_cells,
                           reference_cells, features,      sigma,            radius}
                        .check(device);
  const Tensor aggregated = at::empty({query_points.size(0), features.size(1)}, features.options());
  const Tensor softmax = at::empty({query_points.size(0), 2}, features.options());
  for_dtypes(query_points, features, [&](auto real, auto sum) {
    using Real = decltype(real);
    using Sum = decltype(sum);
    const Tensor sorted = call.sort_rows<Real, Sum>(features, reference_cells);
    const auto within = call.within<Real, Sum>(true, true);
    device.each(AggregateWithin<Real, Sum>{within, sorted.const_data_ptr<Sum>(), aggregated.mutable_data_ptr<Sum>(),
                                           softmax.mutable_data_ptr<Sum>()},
                query_points.size(0) * within.chunks);
  });
  return {aggregated, softmax};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> aggregate_within_backward(
    const Tensor& grad, std::array<bool, 4> needs, const Tensor& query_points, const OptionalTensor& query_offsets,
    const Tensor& reference_points, const OptionalTensor& reference_offsets, int64_t clouds,
    at::TensorList query_cells, at::TensorList reference_cells, const Tensor& features, const Tensor& sigma,
    double radius, const Tensor& aggregated, const Tensor& softmax) {
  const Device device(query_points);
  const Call call = Inputs{query_points,    query_offsets, reference_points, reference_offsets, clouds, query_cells,
                           reference_cells, features,      sigma,            radius}
                        .check(device);
  const int64_t queries = query_points.size(0), references = reference_points.size(0);
  check_like("aggregated", aggregated, {queries, features.size(1)}, features.scalar_type(), features);
  check_like("grad", grad, aggregated.sizes(), features.scalar_type(), features);
  check_like("softmax", softmax, {queries, 2}, features.scalar_type(), features);
  const bool of_queries = needs[0], of_references = needs[1], of_features = needs[2], of_sigma = needs[3];
  const bool pulls = of_queries || of_references || of_sigma;
  Tensor d_query = empty_if(pulls, query_points), d_reference = empty_if(of_references, reference_points);
  Tensor d_features = empty_if(of_features, features), d_sigma = empty_if(false, sigma);
  for_dtypes(query_points, features, [&](auto real, auto sum) {
    using Real = decltype(real);
    using Sum = decltype(sum);
    const Tensor sorted_grad = call.sort_rows<Real, Sum>(grad, query_cells);
    const Sum* known = softmax.const_data_ptr<Sum>();
    if (of_features) {
      const auto within = call.within<Real, Sum>(false, true);
      device.each(GatherWithin<Real, Sum>{within, sorted_grad.const_data_ptr<Sum>(), known,
                                          d_features.mutable_data_ptr<Sum>()},
                  references * within.chunks);
    }
    if (!pulls) return;
    const Tensor sorted_features = call.sort_rows<Real, Sum>(features, reference_cells);
    const Tensor means = at::empty({queries}, features.options()), sigma_rows = at::empty_like(means);
    device.each(PullWithin<Real, Sum>{call.within<Real, Sum>(true, false), sorted_features.const_data_ptr<Sum>(),
                                      sorted_grad.const_data_ptr<Sum>(), aggregated.const_data_ptr<Sum>(), known,
                                      means.mutable_data_ptr<Sum>(), d_query.mutable_data_ptr<Real>(),
                                      sigma_rows.mutable_data_ptr<Sum>()},
                queries);
    if (of_sigma) d_sigma = sigma_rows.sum();
    if (of_references) {
      device.each(PushWithin<Real, Sum>{call.within<Real, Sum>(false, false), sorted_features.const_data_ptr<Sum>(),
                                        sorted_grad.const_data_ptr<Sum>(), known, means.const_data_ptr<Sum>(),
                                        d_reference.mutable_data_ptr<Real>()},
                  references);
    }
  });
  return {of_queries ? d_query : empty_if(false, query_points), d_reference, d_features, d_sigma};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pointproj, library) {
  library.def(
      "native_build_hash_grid(Tensor points, Tensor? offsets, SymInt clouds, Tensor radii) -> "
      "(Tensor, Tensor, Tensor)");
  library.def(
      "native_build_hash_grids(Tensor query_points, Tensor? query_offsets, Tensor reference_points, "
      "Tensor? reference_offsets, SymInt clouds, float radius) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "native_radius_sums(Tensor query_points, Tensor? query_offsets, Tensor reference_points, "
      "Tensor? reference_offsets, SymInt clouds, Tensor[] query_cells, Tensor[] reference_cells, Tensor features, "
      "Tensor sigma, float radius) -> (Tensor, Tensor)");
  library.def(
      "native_radius_sums_backward(Tensor grad_0, bool[4] needs, Tensor query_points, Tensor? query_offsets, "
      "Tensor reference_points, Tensor? reference_offsets, SymInt clouds, Tensor[] query_cells, "
      "Tensor[] reference_cells, Tensor features, Tensor sigma, float radius, Tensor output_0, Tensor output_1) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  POINTPROJ_REGISTER("native_build_hash_grid", build_wrapped)
  POINTPROJ_REGISTER("native_build_hash_grids", build_wrapped_pair)
  POINTPROJ_REGISTER("native_radius_sums", aggregate_within)
  POINTPROJ_REGISTER("native_radius_sums_backward", aggregate_within_backward)
}

}  // namespace pointproj
