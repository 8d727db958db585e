// Both aggregations and their gradients: which kernels run, one after another.
#include <string_view>

#include "gradients.h"
#include "index.h"

namespace pointproj::POINTPROJ_DEVICE {

namespace {

// How an operator takes pointproj.ops.specification.reference.Weighting, and the deterministic switch.
#define POINTPROJ_WEIGHTING \
  std::string_view kernel, std::string_view reduce, double power, double eps, double support, bool in_fixed_order
const std::string kWeighting = ", str kernel, str reduce, float power, float eps, float support, bool deterministic";
// What a backward is given beside all arguments and results of its forward: which gradients are needed.
#define POINTPROJ_UPSTREAM const Tensor &grad, const std::vector<bool>&needs
const std::string kUpstream = "(Tensor grad_0, bool[] needs, ";

Kernel kernel_of(std::string_view name) {
  if (name == "exponential") return Kernel::kExponential;
  if (name == "gaussian") return Kernel::kGaussian;
  if (name == "inverse_distance") return Kernel::kInverseDistance;
  if (name == "uniform") return Kernel::kUniform;
  POINTPROJ_CHECK(name == "compact", "kernel must be exponential, gaussian, inverse_distance, uniform or compact; got ",
                  name);
  return Kernel::kCompact;
}

Reduce reduce_of(std::string_view name) {
  if (name == "mean") return Reduce::kMean;
  if (name == "sum") return Reduce::kSum;
  POINTPROJ_CHECK(name == "weighted", "reduce must be mean, sum or weighted; got ", name);
  return Reduce::kWeighted;
}

// What every aggregation is given.
struct Problem {
  Clouds clouds;
  const Tensor& features;
  const Tensor& sigma;
  Kernel kernel;
  Reduce reduce;
  double power, eps, support;
  bool in_fixed_order;  // whether results may not depend on the order in which threads come

  Problem(POINTPROJ_POINTS, const Tensor& features, const Tensor& sigma, POINTPROJ_WEIGHTING)
      : clouds(query_points, query_offsets, reference_points, reference_offsets, clouds_in_all), features(features),
        sigma(sigma), kernel(kernel_of(kernel)), reduce(reduce_of(reduce)), power(power), eps(eps), support(support),
        in_fixed_order(in_fixed_order) {
    POINTPROJ_CHECK(features.dim() == 2 && features.size(1) >= 1, "features must have shape (n, channels); got ",
                    text(features.sizes()));
    const ScalarType dtype = features.scalar_type();
    POINTPROJ_CHECK(dtype == ScalarType::Double || (dtype == ScalarType::Float && query_points.scalar_type() == dtype),
                    "features must be float32 or float64, and as wide as the points; got ", dtype);
    POINTPROJ_CHECK(channels() <= 1 << 20, "features may have at most ", 1 << 20, " channels; got ", channels());
    check_like("features", features, {references(), channels()}, dtype, query_points);
    check_like("sigma", sigma, {}, dtype, query_points);
  }
  const Device& device() const { return clouds.device; }
  int64_t queries() const { return clouds.queries.batch.rows; }
  int64_t references() const { return clouds.references.batch.rows; }
  int64_t channels() const { return features.size(1); }
  // body(a number in the dtype of the positions, the weighting in that of the sums)
  template <class Body>
  void for_types(Body body) const {
    for_dtypes(clouds.queries.points, features, [&](auto real, auto sum) {
      using Sum = decltype(sum);
      const Uniform<Sum> scales = {Sum(0), Sum(power), Sum(eps), Sum(support)};
      if (kernel == Kernel::kExponential && reduce == Reduce::kMean) {
        return body(real, DefaultWeighting<Sum>{data<const Sum>(sigma), kernel, reduce, scales});
      }
      body(real, AnyWeighting<Sum>{data<const Sum>(sigma), kernel, reduce, scales});
    });
  }
  // Passes that it takes to sum up all channels, so many in the lanes of one.
  int chunks() const {
    return kOnGpu ? static_cast<int>((channels() + kChannelsAtOnce - 1) / kChannelsAtOnce) : 1;
  }
};

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // of both points, features and sigma

// What a backward fills; empty where it is not needed. With the query points comes sigma, row by row.
struct Wanted {
  bool of_points;
  Tensor query_points, sigma_rows, reference_points, features;
};

struct RowsOfNeighbors {
  const int* rows;

  POINTPROJ_FN int operator()(int pair) const { return rows[pair]; }
};

// Over rows of neighbours, nearest first.
struct NeighborProblem : Problem {
  template <class Real, class Weighting>
  using Neighbors = ListedNeighbors<Real, Weighting>;

  Tensor searched, rows;        // the first are empty if rows were given
  OptionalTensor start, pairs;  // the rows inverted

  template <class... OfProblem>
  NeighborProblem(const OptionalTensor& given, const OptionalTensor& known, const OptionalTensor& cell_list, int64_t k,
                  const OfProblem&... rest)
      : Problem(rest...), searched(known ? *known : search_unless(given, cell_list, k)),
        rows(given.value_or(searched)) {
    POINTPROJ_CHECK(k >= 1, "k must be positive; got ", k);
    check_like("neighbor_indices", rows, {queries(), k}, ScalarType::Int, clouds.queries.points);
  }
  Tensor search_unless(const OptionalTensor& given, const OptionalTensor& cell_list, int64_t k) const {
    if (given) return empty_ints({0, k}, *given);
    check_k(clouds, k);
    const Tensor made = empty_ints({queries(), k}, clouds.queries.points);
    search(clouds, cell_list, made, std::nullopt);
    return made;
  }
  template <class Real, class Weighting>
  Neighbors<Real, Weighting> neighbors(const Weighting& weighting, bool of_queries, int chunks) const {
    const auto& [query, reference, device] = clouds;
    return {data<const Real>((of_queries ? query : reference).points),
            data<const Real>((of_queries ? reference : query).points),
            data<const int>(rows),
            of_queries ? nullptr : data<const int>(start),
            of_queries ? nullptr : data<const int>(pairs),
            static_cast<int>(rows.size(1)),
            weighting,
            chunks};
  }
  template <class Neighbors>
  Tensor sorted(bool, const Tensor& values) const {
    return values;
  }
  template <class Neighbors>
  Tensor to_be_summed(Neighbors&) const {
    return features;
  }
  void prepare_references() {
    const InvertedRows inverted(device(), RowsOfNeighbors{data<const int>(rows)}, rows.numel(), references(), rows);
    start = inverted.start;
    pairs = inverted.pairs;
  }
};

// Over all points within a radius.
struct RadiusProblem : Problem {
  static constexpr int64_t kLine = 128;  // bytes of a GPU's cache

  template <class Real, class Weighting>
  using Neighbors = RadiusNeighbors<Real, Weighting>;

  double radius;
  OptionalTensor given;  // the grid of the references
  Tensor grids;          // of the queries, and that of the references if it was not given

  template <class... OfProblem>
  RadiusProblem(double radius, const OptionalTensor& given, const OptionalTensor& known, const OfProblem&... rest)
      : Problem(rest...), radius(radius), given(given), grids(known ? *known : make_grids()) {
    const auto& [query, reference, device] = clouds;
    const int64_t own = sizes_of_hash_grid(query).words(), others = sizes_of_hash_grid(reference).words();
    if (given) this->given = checked_table("reference_grid", *given, others, reference.points);
    grids = checked_table("grids", grids, own + (given ? 0 : others), query.points);
  }
  Tensor make_grids() const {
    check_radius(radius);
    std::vector<Cloud> sides = {clouds.queries};
    if (!given) sides.push_back(clouds.references);
    return make_hash_grids(sides, device(), {radius, std::nullopt}, in_fixed_order);
  }
  template <class Real>
  HashGrid<Real> grid(bool of_queries) const {
    const auto& [query, reference, device] = clouds;
    if (of_queries) return view_hash_grid<Real>(words_of(grids), query);
    int* const behind = words_of(grids) + sizes_of_hash_grid(query).words();
    return view_hash_grid<Real>(given ? words_of(*given) : behind, reference);
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
    const Tensor made = empty({values.size(0), (channels() + kVector - 1) / kVector * kVector}, values);
    device().each(SortRows<Real, Sum>{grid<Real>(of_queries).points, matrix<const Sum>(values), matrix<Sum>(made)},
                  values.size(0));
    return made;
  }
  // The features as they are, where sorting them would take longer than it saves: what is beyond a GPU's cache moves
  // twice for it, and few queries read a row but a few times. Rows are then whole lines of the cache already.
  template <class Neighbors>
  Tensor to_be_summed(Neighbors& neighbors) const {
    constexpr int64_t kCache = 1 << 26;
    const int64_t row = channels() * static_cast<int64_t>(features.element_size());
    const bool is_aligned = reinterpret_cast<uintptr_t>(features.const_data_ptr()) % kLine == 0;
    neighbors.by_row = kOnGpu && 2 * queries() <= references() && references() * row > kCache &&
                       row % kLine == 0 && is_aligned;
    return neighbors.by_row ? features : sorted<Neighbors>(false, features);
  }
  void prepare_references() {}
};

template <class Problem>
std::tuple<Tensor, Tensor> aggregate(const Problem& problem) {
  const Tensor aggregated = empty({problem.queries(), problem.channels()}, problem.features);
  const Tensor saved = empty({problem.queries(), 2}, problem.features);
  problem.for_types([&](auto real, auto weighting) {
    using Sum = typename decltype(weighting)::Sum;
    const int chunks = problem.chunks();
    auto neighbors = problem.template neighbors<decltype(real)>(weighting, true, chunks);
    const Tensor features = problem.to_be_summed(neighbors);
    problem.device().each(
        Aggregate<decltype(neighbors)>{neighbors, matrix<const Sum>(features), matrix<Sum>(aggregated),
                                       data<Sum>(saved)},
        problem.queries() * chunks);
  });
  return {aggregated, saved};
}

template <class Neighbors, class Problem, class Weighting>
void fill_gradients(Problem& problem, const Weighting& weighting, const Tensor& grad, const Tensor& aggregated,
                    const Tensor& saved, const Wanted& made) {
  using Real = typename Neighbors::Real;
  using Sum = typename Neighbors::Sum;
  const bool of_features = made.features.numel() > 0, of_references = made.reference_points.numel() > 0;
  const bool of_points = made.of_points, adds = Neighbors::kMayAdd && !problem.in_fixed_order;
  const Tensor own_grad = problem.template sorted<Neighbors>(true, grad);
  const Tensor features = of_points ? problem.template sorted<Neighbors>(false, problem.features) : problem.features;
  const Tensor means = empty({of_points ? problem.queries() : 0}, features);
  const auto launch = [&](auto queries_own, auto with_points, auto with_features) {
    const int chunks = with_features && !queries_own ? problem.chunks() : 1;
    problem.device().each(
        Gradient<Neighbors, queries_own, with_points, with_features>{
            problem.template neighbors<Real>(weighting, queries_own, chunks),
            matrix<const Sum>(queries_own ? own_grad : features), matrix<const Sum>(queries_own ? features : own_grad),
            matrix<const Sum>(aggregated), {data<const Sum>(saved)}, data<Sum>(means),
            data<Real>(queries_own ? made.query_points : made.reference_points), data<Sum>(made.sigma_rows),
            {data<Sum>(made.features), static_cast<int>(problem.channels())},
            adds ? data<Real>(made.reference_points) : nullptr},
        (queries_own ? problem.queries() : problem.references()) * chunks);
  };
  constexpr std::true_type yes;
  constexpr std::false_type no;
  if constexpr (Neighbors::kMayAdd) {
    if (adds) {
      for (const Tensor& tensor : {made.features, made.reference_points}) clear(problem.device(), tensor);
      if (of_points && of_features) return launch(yes, yes, yes);
      if (of_features) return launch(yes, no, yes);
    }
  }
  if (of_points) launch(yes, yes, no);
  if (adds) return;
  if (of_features || of_references) problem.prepare_references();
  if (of_features && of_references && problem.chunks() == 1) return launch(no, yes, yes);
  if (of_features) launch(no, no, yes);
  if (of_references) launch(no, yes, no);
}

template <class Problem>
Gradients differentiate(Problem& problem, const Tensor& grad, const std::vector<bool>& needs, const Tensor& aggregated,
                        const Tensor& saved) {
  const int64_t queries = problem.queries();
  const auto dtype = problem.features.scalar_type();
  check_like("aggregated", aggregated, {queries, problem.channels()}, dtype, problem.features);
  check_like("grad", grad, aggregated.sizes(), dtype, problem.features);
  check_like("saved", saved, {queries, 2}, dtype, problem.features);
  POINTPROJ_CHECK(needs.size() == 4, "needs must say it of 4 gradients; got ", needs.size());
  const auto empty_if = [](bool needed, const Tensor& like) { return empty(needed ? like.sizes() : Shape({0}), like); };
  const bool of_points = needs[0] || needs[1] || needs[3];
  const auto& [query, reference, device] = problem.clouds;
  const Wanted made{of_points, empty_if(of_points, query.points), empty({of_points ? queries : 0}, problem.features),
                    empty_if(needs[1], reference.points), empty_if(needs[2], problem.features)};
  problem.for_types([&](auto real, auto weighting) {
    using Neighbors = typename Problem::template Neighbors<decltype(real), decltype(weighting)>;
    fill_gradients<Neighbors>(problem, weighting, grad, aggregated, saved, made);
  });
  const Tensor none = empty({0}, problem.sigma);
  return {needs[0] ? made.query_points : empty_if(false, query.points), made.reference_points, made.features,
          needs[3] ? torch::stable::sum(made.sigma_rows) : none};
}

#define POINTPROJ_PROBLEM                                                                                            \
  query_points, query_offsets, reference_points, reference_offsets, clouds_in_all, features, sigma, kernel, reduce, \
      power, eps, support, in_fixed_order

// Over the k nearest: sums (Q, channels), two numbers of each query (Q, 2), and the rows, which are searched, unless
// they are given; then there are none here.
std::tuple<Tensor, Tensor, Tensor> knn_aggregate(
    POINTPROJ_POINTS, const OptionalTensor& cell_list, const OptionalTensor& neighbor_indices, const Tensor& features,
    const Tensor& sigma, int64_t k, POINTPROJ_WEIGHTING) {
  const NeighborProblem problem(neighbor_indices, std::nullopt, cell_list, k, POINTPROJ_PROBLEM);
  const auto [aggregated, saved] = aggregate(problem);
  return {aggregated, saved, problem.searched};
}

Gradients knn_aggregate_backward(
    POINTPROJ_UPSTREAM, POINTPROJ_POINTS, const OptionalTensor& cell_list, const OptionalTensor& neighbor_indices,
    const Tensor& features, const Tensor& sigma, int64_t k, POINTPROJ_WEIGHTING, const Tensor& aggregated,
    const Tensor& saved, const Tensor& searched) {
  NeighborProblem problem(neighbor_indices, searched, cell_list, k, POINTPROJ_PROBLEM);
  return differentiate(problem, grad, needs, aggregated, saved);
}

// Over all within the radius: sums (Q, channels), two numbers of each query (Q, 2), and the hash grids that were made.
std::tuple<Tensor, Tensor, Tensor> radius_aggregate(
    POINTPROJ_POINTS, const OptionalTensor& reference_grid, const Tensor& features, const Tensor& sigma,
    double radius, POINTPROJ_WEIGHTING) {
  const RadiusProblem problem(radius, reference_grid, std::nullopt, POINTPROJ_PROBLEM);
  const auto [aggregated, saved] = aggregate(problem);
  return {aggregated, saved, problem.grids};
}

Gradients radius_aggregate_backward(
    POINTPROJ_UPSTREAM, POINTPROJ_POINTS, const OptionalTensor& reference_grid, const Tensor& features,
    const Tensor& sigma, double radius, POINTPROJ_WEIGHTING, const Tensor& aggregated, const Tensor& saved,
    const Tensor& grids) {
  RadiusProblem problem(radius, reference_grid, grids, POINTPROJ_PROBLEM);
  return differentiate(problem, grad, needs, aggregated, saved);
}

const std::string kKnn =
    kPoints + "Tensor? cell_list, Tensor? neighbor_indices, Tensor features, Tensor sigma, SymInt k" + kWeighting;
const std::string kRadius =
    kPoints + "Tensor? reference_grid, Tensor features, Tensor sigma, float radius" + kWeighting;
const std::string kResults = ") -> (Tensor, Tensor, Tensor)";
const std::string kSaved =
    ", Tensor output_0, Tensor output_1, Tensor output_2) -> (Tensor, Tensor, Tensor, Tensor)";
const Operators registered(
    __FILE__, {{"native_knn_aggregate", "(" + kKnn + kResults, TORCH_BOX(&knn_aggregate)},
               {"native_knn_aggregate_backward", kUpstream + kKnn + kSaved, TORCH_BOX(&knn_aggregate_backward)},
               {"native_radius_aggregate", "(" + kRadius + kResults, TORCH_BOX(&radius_aggregate)},
               {"native_radius_aggregate_backward", kUpstream + kRadius + kSaved,
                TORCH_BOX(&radius_aggregate_backward)}});

}  // namespace

}  // namespace pointproj::POINTPROJ_DEVICE
