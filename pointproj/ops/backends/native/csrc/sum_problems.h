// What an aggregation and its derivatives are given: arguments that are checked, and where the neighbours come from.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "index.h"

namespace pointproj::POINTPROJ_DEVICE {

// ---- arguments

// What every aggregation is given: besides the points, pointproj.ops.specification.records.Summands.
struct SumArguments {
  Clouds points;
  Tensor features, sigma;
  std::string kernel, reduce;
  double power, eps, support;
  bool deterministic;
  POINTPROJ_FIELDS(points, features, sigma, kernel, reduce, power, eps, support, deterministic)
};

// Over the k nearest, which are searched unless neighbor_indices has them.
struct KnnArguments {
  SumArguments sum;
  OptionalTensor cell_list, neighbor_indices;
  int64_t k;
  POINTPROJ_FIELDS(sum, cell_list, neighbor_indices, k)
};

// Over all points within the radius.
struct RadiusArguments {
  SumArguments sum;
  OptionalTensor reference_grid;
  double radius;
  POINTPROJ_FIELDS(sum, reference_grid, radius)
};

// The value of an enum, whose names are in its order.
template <class Enum, size_t kCount>
Enum named(const char* argument, const std::string_view (&names)[kCount], std::string_view name) {
  const auto at = std::find(names, names + kCount, name);
  const auto all = [&] {
    std::string text(names[0]);
    for (size_t i = 1; i < kCount; ++i) text += ", " + std::string(names[i]);
    return text;
  };
  POINTPROJ_CHECK(at != names + kCount, argument, " must be one of ", all(), "; got ", name);
  return static_cast<Enum>(at - names);
}

// ---- problems: arguments that are checked, and where the neighbours come from

struct Problem {
  const SumArguments& given;
  PointSets sets;
  Kernel kernel;
  Reduce reduce;

  explicit Problem(const SumArguments& given)
      : given(given), sets(given.points), kernel(named<Kernel>("kernel", kKernelNames, given.kernel)),
        reduce(named<Reduce>("reduce", kReduceNames, given.reduce)) {
    const Tensor &query_points = given.points.query_points, &features = given.features;
    POINTPROJ_CHECK(features.dim() == 2 && features.size(1) >= 1, "features must have shape (n, channels); got ",
                    text(features.sizes()));
    const ScalarType dtype = features.scalar_type();
    POINTPROJ_CHECK(dtype == ScalarType::Double || (dtype == ScalarType::Float && query_points.scalar_type() == dtype),
                    "features must be float32 or float64, and as wide as the points; got ", dtype);
    POINTPROJ_CHECK(channels() <= 1 << 20, "features may have at most ", 1 << 20, " channels; got ", channels());
    check_like("features", features, {references(), channels()}, dtype, query_points);
    check_like("sigma", given.sigma, {}, dtype, query_points);
  }
  const Device& device() const { return sets.device; }
  int64_t queries() const { return sets.queries.batch.rows; }
  int64_t references() const { return sets.references.batch.rows; }
  int64_t channels() const { return given.features.size(1); }
  // body(a number in the dtype of the positions, the weighting in that of the sums)
  template <class Body>
  void for_types(Body body) const {
    for_dtypes(sets.queries.points, given.features, [&](auto real, auto sum) {
      using Sum = decltype(sum);
      const Uniform<Sum> parameters = {Sum(0), Sum(given.power), Sum(given.eps), Sum(given.support)};
      if (kernel == Kernel::kExponential && reduce == Reduce::kMean) {
        return body(real, DefaultWeighting<Sum>{data<const Sum>(given.sigma), kernel, reduce, parameters});
      }
      body(real, AnyWeighting<Sum>{data<const Sum>(given.sigma), kernel, reduce, parameters});
    });
  }
  // Passes in which all channels are added up: the lanes of a point hold kChannelsAtOnce of them.
  int chunks() const { return kOnGpu ? static_cast<int>((channels() + kChannelsAtOnce - 1) / kChannelsAtOnce) : 1; }
};

struct RowsOfNeighbors {
  const int* rows;

  POINTPROJ_FN int operator()(int pair) const { return rows[pair]; }
};

// Over rows of neighbours, nearest first.
struct NeighborProblem : Problem {
  using Arguments = KnnArguments;
  template <class Real, class Weighting>
  using Neighbors = ListedNeighbors<Real, Weighting>;

  Tensor made;                  // the rows that were searched; empty if rows were given
  Tensor rows;                  // these, or the given ones
  OptionalTensor start, pairs;  // the rows inverted

  NeighborProblem(const KnnArguments& given, const OptionalTensor& made_before)
      : Problem(given.sum), made(made_before ? *made_before : search_unless_given(given)),
        rows(given.neighbor_indices.value_or(made)) {
    POINTPROJ_CHECK(given.k >= 1, "k must be positive; got ", given.k);
    check_like("neighbor_indices", rows, {queries(), given.k}, ScalarType::Int, sets.queries.points);
  }
  Tensor search_unless_given(const KnnArguments& given) const {
    if (given.neighbor_indices) return empty_ints({0, given.k}, *given.neighbor_indices);
    check_k(sets, given.k);
    const Tensor found = empty_ints({queries(), given.k}, sets.queries.points);
    search(sets, given.cell_list, found, std::nullopt);
    return found;
  }
  template <class Real, class Weighting>
  Neighbors<Real, Weighting> neighbors(const Weighting& weighting, bool of_queries, int chunks) const {
    const auto& [query, reference, device] = sets;
    return {data<const Real>((of_queries ? query : reference).points),
            data<const Real>((of_queries ? reference : query).points), data<const int>(rows),
            of_queries ? nullptr : data<const int>(start), of_queries ? nullptr : data<const int>(pairs),
            static_cast<int>(rows.size(1)), weighting, chunks};
  }
  template <class Neighbors>
  Tensor sorted(bool, const Tensor& values) const { return values; }
  template <class Neighbors>
  Tensor features_to_sum(Neighbors&) const { return given.features; }
  void prepare_references() {
    const InvertedRows inverted(device(), RowsOfNeighbors{data<const int>(rows)}, rows.numel(), references(), rows);
    start = inverted.start;
    pairs = inverted.pairs;
  }
};

// Over all points within a radius.
struct RadiusProblem : Problem {
  using Arguments = RadiusArguments;
  static constexpr int64_t kLine = 128;  // bytes of a GPU's cache

  template <class Real, class Weighting>
  using Neighbors = RadiusNeighbors<Real, Weighting>;

  double radius;
  OptionalTensor reference_grid;
  Tensor made;  // the grid of the queries, then that of the references if it was not given

  RadiusProblem(const RadiusArguments& given, const OptionalTensor& made_before)
      : Problem(given.sum), radius(given.radius), reference_grid(given.reference_grid),
        made(made_before ? *made_before : make_grids()) {
    const auto& [query, reference, device] = sets;
    const int64_t own = sizes_of(query).hash_grid().words(), others = sizes_of(reference).hash_grid().words();
    if (reference_grid) reference_grid = checked_table("reference_grid", *reference_grid, others, reference.points);
    made = checked_table("grids", made, own + (reference_grid ? 0 : others), query.points);
  }
  Tensor make_grids() const {
    check_radius(radius);
    std::vector<PointSet> sides = {sets.queries};
    if (!reference_grid) sides.push_back(sets.references);
    return make_hash_grids(sides, device(), {radius, std::nullopt}, given.deterministic);
  }
  template <class Real>
  HashGrid<Real> grid(bool of_queries) const {
    const auto& [query, reference, device] = sets;
    if (of_queries) return view_hash_grid<Real>(words_of(made), query);
    int* const behind = words_of(made) + sizes_of(query).hash_grid().words();
    return view_hash_grid<Real>(reference_grid ? words_of(*reference_grid) : behind, reference);
  }
  template <class Real, class Weighting>
  Neighbors<Real, Weighting> neighbors(const Weighting& weighting, bool of_queries, int chunks) const {
    const HashGrid<Real> own = grid<Real>(of_queries);
    const Real limit = static_cast<Real>(radius);
    return {own.points, own.batch, grid<Real>(!of_queries), limit, largest_square_within(limit), weighting, chunks};
  }
  template <class Neighbors>
  Tensor sorted(bool of_queries, const Tensor& values) const {
    using Real = typename Neighbors::Real;
    using Sum = typename Neighbors::Sum;
    constexpr int64_t kVector = Neighbors::kVector;  // rows begin at multiples of what is read at a time
    const Tensor result = empty({values.size(0), (values.size(1) + kVector - 1) / kVector * kVector}, values);
    device().each(SortRows<Real, Sum>{grid<Real>(of_queries).points, matrix<const Sum>(values), matrix<Sum>(result)},
                  values.size(0));
    return result;
  }
  // The features as they are where sorting them takes longer than it saves: they exceed a GPU's cache, few queries read
  // each row a few times only, and rows are whole lines of the cache already.
  template <class Neighbors>
  Tensor features_to_sum(Neighbors& neighbors) const {
    constexpr int64_t kCache = 1 << 26;
    const Tensor& features = given.features;
    const int64_t row = channels() * static_cast<int64_t>(features.element_size());
    const bool is_aligned = reinterpret_cast<uintptr_t>(features.const_data_ptr()) % kLine == 0;
    neighbors.by_row = kOnGpu && 2 * queries() <= references() && references() * row > kCache &&
                       row % kLine == 0 && is_aligned;
    return neighbors.by_row ? features : sorted<Neighbors>(false, features);
  }
  void prepare_references() {}
};

}  // namespace pointproj::POINTPROJ_DEVICE
