// Both aggregations and their gradients: which kernels run, one after another.
#include <algorithm>
#include <string>
#include <string_view>

#include "gradients.h"
#include "index.h"

namespace pointproj::POINTPROJ_DEVICE {
namespace {

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
    const Tensor result = empty({values.size(0), (channels() + kVector - 1) / kVector * kVector}, values);
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

// ---- operators

// Sums (Q, channels), base and inverse total of each query (Q, 2), and what was made for them: rows or hash grids.
template <class Problem>
Tensors<3> aggregate(const typename Problem::Arguments& given) {
  const Problem problem(given, std::nullopt);
  const Tensor& features = problem.given.features;
  const Tensor aggregated = empty({problem.queries(), problem.channels()}, features);
  const Tensor saved = empty({problem.queries(), 2}, features);
  problem.for_types([&](auto real, auto weighting) {
    using Sum = typename decltype(weighting)::Sum;
    const int chunks = problem.chunks();
    auto neighbors = problem.template neighbors<decltype(real)>(weighting, true, chunks);
    const Tensor to_sum = problem.features_to_sum(neighbors);
    problem.device().each(
        Aggregate<decltype(neighbors)>{neighbors, matrix<const Sum>(to_sum), matrix<Sum>(aggregated),
                                       data<Sum>(saved)},
        problem.queries() * chunks);
  });
  return {aggregated, saved, problem.made};
}

// The gradients that a backward fills; empty where none is needed. Those of sigma, by row, come with the query points.
struct NeededGradients {
  bool of_points;
  Tensor query_points, sigma_rows, reference_points, features;
};

template <class Neighbors, class Problem, class Weighting>
void fill_gradients(Problem& problem, const Weighting& weighting, const Tensor& grad, const Tensor& aggregated,
                    const Tensor& saved, const NeededGradients& needed) {
  using Real = typename Neighbors::Real;
  using Sum = typename Neighbors::Sum;
  const Tensor& given = problem.given.features;
  const bool of_features = needed.features.numel() > 0, of_references = needed.reference_points.numel() > 0;
  const bool of_points = needed.of_points, by_atomics = Neighbors::kMayUseAtomics && !problem.given.deterministic;
  const Tensor own_grad = problem.template sorted<Neighbors>(true, grad);
  const Tensor features = of_points ? problem.template sorted<Neighbors>(false, given) : given;
  const Tensor means = empty({of_points ? problem.queries() : 0}, features);
  const auto launch = [&](auto queries_own, auto with_points, auto with_features) {
    const int chunks = with_features && !queries_own ? problem.chunks() : 1;
    problem.device().each(
        Gradient<Neighbors, queries_own, with_points, with_features>{
            problem.template neighbors<Real>(weighting, queries_own, chunks),
            matrix<const Sum>(queries_own ? own_grad : features), matrix<const Sum>(queries_own ? features : own_grad),
            matrix<const Sum>(aggregated), {data<const Sum>(saved)}, data<Sum>(means),
            data<Real>(queries_own ? needed.query_points : needed.reference_points), data<Sum>(needed.sigma_rows),
            {data<Sum>(needed.features), static_cast<int>(problem.channels())},
            by_atomics ? data<Real>(needed.reference_points) : nullptr},
        (queries_own ? problem.queries() : problem.references()) * chunks);
  };
  constexpr std::true_type yes;
  constexpr std::false_type no;
  if constexpr (Neighbors::kMayUseAtomics) {
    if (by_atomics) {
      for (const Tensor& tensor : {needed.features, needed.reference_points}) clear(problem.device(), tensor);
      if (of_points && of_features) return launch(yes, yes, yes);
      if (of_features) return launch(yes, no, yes);
    }
  }
  if (of_points) launch(yes, yes, no);
  if (by_atomics) return;
  if (of_features || of_references) problem.prepare_references();
  if (of_features && of_references && problem.chunks() == 1) return launch(no, yes, yes);
  if (of_features) launch(no, no, yes);
  if (of_references) launch(no, yes, no);
}

// Gradients of both points, features and sigma.
template <class Problem>
Tensors<4> differentiate(const BackwardArguments<typename Problem::Arguments, 3>& given) {
  const auto& [grads, needs, forward, outputs] = given;
  const auto& [aggregated, saved, made] = outputs;
  const Tensor& grad = grads[0];
  Problem problem(forward, made);
  const Tensor &features = problem.given.features, &sigma = problem.given.sigma;
  const int64_t queries = problem.queries();
  const auto dtype = features.scalar_type();
  check_like("aggregated", aggregated, {queries, problem.channels()}, dtype, features);
  check_like("grad", grad, aggregated.sizes(), dtype, features);
  check_like("saved", saved, {queries, 2}, dtype, features);
  POINTPROJ_CHECK(needs.size() == 4, "needs must have 4 elements, one for each gradient; got ", needs.size());
  const auto empty_if = [](bool needed, const Tensor& like) { return empty(needed ? like.sizes() : Shape({0}), like); };
  const bool of_points = needs[0] || needs[1] || needs[3];
  const auto& [query, reference, device] = problem.sets;
  const NeededGradients needed{of_points, empty_if(of_points, query.points), empty({of_points ? queries : 0}, features),
                               empty_if(needs[1], reference.points), empty_if(needs[2], features)};
  problem.for_types([&](auto real, auto weighting) {
    using Neighbors = typename Problem::template Neighbors<decltype(real), decltype(weighting)>;
    fill_gradients<Neighbors>(problem, weighting, grad, aggregated, saved, needed);
  });
  const Tensor none = empty({0}, sigma);
  return {needs[0] ? needed.query_points : empty_if(false, query.points), needed.reference_points, needed.features,
          needs[3] ? torch::stable::sum(needed.sigma_rows) : none};
}

const Operators registered(
    __FILE__, {operator_of<aggregate<NeighborProblem>>("native_knn_aggregate"),
               operator_of<differentiate<NeighborProblem>>("native_knn_aggregate_backward"),
               operator_of<aggregate<RadiusProblem>>("native_radius_aggregate"),
               operator_of<differentiate<RadiusProblem>>("native_radius_aggregate_backward")});

}  // namespace
}  // namespace pointproj::POINTPROJ_DEVICE
