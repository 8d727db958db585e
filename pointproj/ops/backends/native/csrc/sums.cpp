// The torch operators of both aggregations and their gradients: they check, allocate, and hand out tasks.
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sum.h>

#include <string_view>

#include "autograd.h"
#include "neighbor_sums.h"
#include "radius_sums.h"
#include "tensors.h"

namespace pointproj {

namespace {

// As pointproj.ops.reference.Weighting, whose fields end the arguments of both operators.
struct WeightingArguments {
  Kernel kernel;
  bool divides;
  double power, eps, support;

  WeightingArguments(std::string_view name, std::string_view reduce, double power, double eps, double support)
      : kernel(kernel_of(name)), divides(reduce == "mean"), power(power), eps(eps), support(support) {
    TORCH_CHECK(divides || reduce == "sum", "reduce must be mean or sum; got ", reduce);
  }
  static Kernel kernel_of(std::string_view name) {
    if (name == "exponential") return Kernel::kExponential;
    if (name == "gaussian") return Kernel::kGaussian;
    if (name == "inverse_distance") return Kernel::kInverseDistance;
    if (name == "uniform") return Kernel::kUniform;
    TORCH_CHECK(name == "compact", "kernel must be exponential, gaussian, inverse_distance, uniform or compact; got ",
                name);
    return Kernel::kCompact;
  }
};

// What both operators are given, and what their tasks need of it.
struct Problem {
  const Tensor& query_points;
  const Tensor& reference_points;
  const Tensor& features;
  const Tensor& sigma;
  Device device;
  WeightingArguments weighting;

  Problem(const Tensor& query_points, const Tensor& reference_points, const Tensor& features, const Tensor& sigma,
          const WeightingArguments& weighting)
      : query_points(query_points), reference_points(reference_points), features(features), sigma(sigma),
        device(query_points), weighting(weighting) {
    check_pair(query_points, reference_points);
    TORCH_CHECK(features.dim() == 2 && features.size(1) >= 1, "features must have shape (n, channels); got ",
                features.sizes());
    TORCH_CHECK(features.scalar_type() == at::kDouble ||
                    (features.scalar_type() == at::kFloat && query_points.scalar_type() == at::kFloat),
                "features must be float32 or float64, and as wide as the points; got ", features.scalar_type());
    TORCH_CHECK(features.size(1) <= 1 << 20, "features may have at most ", 1 << 20, " channels; got ",
                features.size(1));
    check_like("features", features, {references(), channels()}, features.scalar_type(), query_points);
    check_like("sigma", sigma, {}, features.scalar_type(), query_points);
  }
  int64_t queries() const { return query_points.size(0); }
  int64_t references() const { return reference_points.size(0); }
  int64_t channels() const { return features.size(1); }
  // body(a number in the dtype of the positions, the weighting in that of the sums)
  template <class Body>
  void for_types(Body body) const {
    for_dtypes(query_points, features, [&](auto real, auto sum) {
      using Sum = decltype(sum);
      const auto& [kernel, divides, power, eps, support] = weighting;
      const Sum* known_sigma = data<const Sum>(sigma);
      if (kernel == Kernel::kExponential && divides) return body(real, DefaultWeighting<Sum>{known_sigma});
      body(real, AnyWeighting<Sum>{known_sigma, kernel, divides, Sum(power), Sum(eps), Sum(support)});
    });
  }
  // Passes that it takes to sum up all channels, so many in the lanes of one.
  int chunks() const {
    return device.is_cuda ? static_cast<int>((channels() + kChannelsAtOnce - 1) / kChannelsAtOnce) : 1;
  }
};

// What a backward fills; empty where it is not needed. With the query points comes sigma, row by row.
struct Gradients {
  bool of_points;
  Tensor query_points, sigma_rows, reference_points, features;
};

// Over rows of neighbours that are given.
struct NeighborProblem : Problem {
  static constexpr const char* kName = "native_neighbor_sums";
  static constexpr std::array<int, 4> kDifferentiable = {0, 1, 2, 3};

  template <class Real, class Weighting>
  using Neighbors = ListedNeighbors<Real, Weighting>;
  template <class Real, class Weighting>
  using Forward = NeighborSums<Real, Weighting>;

  const Tensor& rows;
  Tensor start, pairs;  // the rows inverted

  NeighborProblem(const Tensor& query_points, const Tensor& reference_points, const Tensor& features,
                  const Tensor& sigma, const Tensor& rows, const WeightingArguments& weighting)
      : Problem(query_points, reference_points, features, sigma, weighting), rows(rows) {
    TORCH_CHECK(rows.dim() == 2 && rows.size(1) >= 1, "neighbor_indices must have shape (queries, k); got ",
                rows.sizes());
    check_like("neighbor_indices", rows, {queries(), rows.size(1)}, at::kInt, query_points);
  }
  template <class Real, class Weighting>
  Neighbors<Real, Weighting> neighbors(const Weighting& weighting, bool of_queries, int chunks) const {
    return {data<const Real>(of_queries ? query_points : reference_points),
            data<const Real>(of_queries ? reference_points : query_points),
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
  // All that is wanted, in any order, if that is allowed: it is quicker.
  template <class Real, class Weighting>
  bool add_gradients(const Weighting& weighting, const Tensor& grad, const Tensor& aggregated, const Tensor& weights,
                     const Gradients& wanted) const {
    using Sum = typename Weighting::Sum;
    if (device.in_fixed_order) return false;
    const auto all_of = [](const Tensor& tensor) -> SetToZero::Part {
      return {static_cast<int*>(tensor.mutable_data_ptr()), static_cast<int64_t>(tensor.nbytes() / sizeof(int))};
    };
    device.clear({{all_of(wanted.features), all_of(wanted.reference_points)}});
    if (!wanted.of_points) {
      device.each_on_gpu(FeatureGradientByAtomics<Sum>{matrix<const int>(rows), matrix<const Sum>(weights),
                                                       matrix<const Sum>(grad), matrix<Sum>(wanted.features), chunks()},
                         queries() * chunks());
      return true;
    }
    device.each_on_gpu(
        GradientsByAtomics<Real, Weighting>{neighbors<Real>(weighting, true, 1), matrix<const Sum>(grad),
                                            matrix<const Sum>(features), matrix<const Sum>(aggregated),
                                            data<const Sum>(weights), {data<Sum>(wanted.features),
                                            static_cast<int>(channels())}, data<Real>(wanted.reference_points),
                                            data<Real>(wanted.query_points), data<Sum>(wanted.sigma_rows)},
        queries());
    return true;
  }
  int64_t saved_columns() const { return rows.size(1); }
  void check_gradients() const {
    TORCH_CHECK(rows.numel() <= kLargestInt, "gradients of more than ", kLargestInt,
                " pairs of neighbours are not supported; got ", rows.numel(), ": split the queries");
  }
  void prepare_references() {
    const int64_t count = rows.numel();
    if (device.is_cuda && device.in_fixed_order) {
      const Tensor flat = rows.view({-1});
      const Tensor order = at::argsort(flat, /*stable=*/true, /*dim=*/0, /*descending=*/false);
      const Tensor ends = at::arange(references() + 1, rows.options());
      start = at::searchsorted(flat.index_select(0, order), ends, /*out_int32=*/true);
      pairs = order.to(at::kInt);
      return;
    }
    start = empty_ints({references() + 2}, rows);
    pairs = empty_ints({count}, rows);
    const SortBuffers buffers(count, references() + 1, rows);
    device.build(InvertRows{data<const int>(rows), data<int>(start), data<int>(pairs), buffers.view()},
                 std::max(count, references() + 1));
  }
};

// Over all points within a radius.
struct RadiusProblem : Problem {
  static constexpr int64_t kLine = 128;  // bytes of a GPU's cache
  static constexpr const char* kName = "native_radius_sums";
  static constexpr std::array<int, 4> kDifferentiable = {0, 2, 7, 8};

  template <class Real, class Weighting>
  using Neighbors = RadiusNeighbors<Real, Weighting>;
  template <class Real, class Weighting>
  using Forward = RadiusSums<Real, Weighting>;
  struct Side {
    TensorList grid;
    Batch batch;
  };

  Side query_side, reference_side;
  double radius;

  RadiusProblem(const Tensor& query_points, const OptionalTensor& query_offsets, const Tensor& reference_points,
                const OptionalTensor& reference_offsets, int64_t clouds, TensorList query_grid,
                TensorList reference_grid, const Tensor& features, const Tensor& sigma, double radius,
                const WeightingArguments& weighting)
      : Problem(query_points, reference_points, features, sigma, weighting),
        query_side{query_grid, batch_of(query_points, query_offsets, clouds)},
        reference_side{reference_grid, batch_of(reference_points, reference_offsets, clouds)}, radius(radius) {
    check_hash_grid("query_grid", query_grid, query_points, query_side.batch);
    check_hash_grid("reference_grid", reference_grid, reference_points, reference_side.batch);
    check_radius(radius);
  }
  template <class Real, class Weighting>
  Neighbors<Real, Weighting> neighbors(const Weighting& weighting, bool of_queries, int chunks) const {
    const Side &own = of_queries ? query_side : reference_side, &others = of_queries ? reference_side : query_side;
    const Real limit = static_cast<Real>(radius);
    return {view_sorted_points<Real>(own.grid[2]), own.batch, view_hash_grid<Real>(others.grid, others.batch), limit,
            largest_square_within(limit), weighting, chunks};
  }
  template <class Neighbors>
  Tensor sorted(bool of_queries, const Tensor& values) const {
    using Real = typename Neighbors::Real;
    using Sum = typename Neighbors::Sum;
    const Tensor made = at::empty({values.size(0), padded<Neighbors>()}, values.options());
    const auto points = view_sorted_points<Real>((of_queries ? query_side : reference_side).grid[2]);
    device.each(SortRows<Real, Sum>{points, matrix<const Sum>(values), matrix<Sum>(made)}, values.size(0));
    return made;
  }
  // So many columns that rows begin at multiples of what is read at a time; on a GPU, unless that makes them much
  // longer, at multiples of lines of the cache, of which each is read as few as can be then.
  template <class Neighbors>
  int64_t padded() const {
    const auto up_to = [&](int64_t step) { return (channels() + step - 1) / step * step; };
    const int64_t least = up_to(Neighbors::kVector), lines = up_to(kLine / sizeof(typename Neighbors::Sum));
    return device.is_cuda && 4 * lines <= 5 * least ? lines : least;
  }
  // The features as they are, where sorting them would take longer than it saves: what is beyond a GPU's cache moves
  // twice for it, and few queries read a row but a few times. Rows are then whole lines of the cache already.
  template <class Neighbors>
  Tensor to_be_summed(Neighbors& neighbors) const {
    constexpr int64_t kCache = 1 << 26;
    const int64_t row = channels() * features.element_size();
    const bool is_aligned = reinterpret_cast<uintptr_t>(features.const_data_ptr()) % kLine == 0;
    neighbors.by_row = device.is_cuda && 2 * queries() <= references() && references() * row > kCache &&
                       row % kLine == 0 && is_aligned;
    return neighbors.by_row ? features : sorted<Neighbors>(false, features);
  }
  template <class Real, class Weighting>
  bool add_gradients(const Weighting&, const Tensor&, const Tensor&, const Tensor&, const Gradients&) const {
    return false;
  }
  int64_t saved_columns() const { return 2; }
  void check_gradients() const {}
  void prepare_references() {}
};

// An operator and its backward, by the arguments of its schema.
template <class Problem, class... Arguments>
struct Operator {
  static std::tuple<Tensor, Tensor> forward(
      Arguments... arguments, std::string_view kernel, std::string_view reduce, double power, double eps,
      double support) {
    const Problem problem(arguments..., {kernel, reduce, power, eps, support});
    const Tensor aggregated = at::empty({problem.queries(), problem.channels()}, problem.features.options());
    const Tensor saved = at::empty({problem.queries(), problem.saved_columns()}, problem.features.options());
    problem.for_types([&](auto real, auto weighting) {
      using Real = decltype(real);
      using Weighting = decltype(weighting);
      using Sum = typename Weighting::Sum;
      using Neighbors = typename Problem::template Neighbors<Real, Weighting>;
      const int chunks = problem.chunks();
      Neighbors neighbors = problem.template neighbors<Real>(weighting, true, chunks);
      const Tensor features = problem.to_be_summed(neighbors);
      problem.device.each(
          typename Problem::template Forward<Real, Weighting>{neighbors, matrix<const Sum>(features),
                                                              matrix<Sum>(aggregated), {data<Sum>(saved)}},
          problem.queries() * chunks);
    });
    return {aggregated, saved};
  }

  // Gradients of query points, reference points, features and sigma; empty where one is not needed.
  static std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
      const Tensor& grad, std::array<bool, 4> needs, Arguments... arguments, std::string_view kernel,
      std::string_view reduce, double power, double eps, double support, const Tensor& aggregated,
      const Tensor& saved) {
    Problem problem(arguments..., {kernel, reduce, power, eps, support});
    const bool of_queries = needs[0], of_references = needs[1], of_features = needs[2], of_sigma = needs[3];
    const int64_t queries = problem.queries(), references = problem.references();
    const auto dtype = problem.features.scalar_type();
    check_like("aggregated", aggregated, {queries, problem.channels()}, dtype, problem.features);
    check_like("grad", grad, aggregated.sizes(), dtype, problem.features);
    check_like("saved", saved, {queries, problem.saved_columns()}, dtype, problem.features);
    const auto empty_if = [](bool needed, const Tensor& like) {
      return at::empty(needed ? like.sizes() : at::IntArrayRef{0}, like.options());
    };
    const bool of_points = of_queries || of_references || of_sigma;
    const Gradients made{of_points, empty_if(of_points, problem.query_points),
                         at::empty({of_points ? queries : 0}, problem.features.options()),
                         empty_if(of_references, problem.reference_points), empty_if(of_features, problem.features)};
    problem.for_types([&](auto real, auto weighting) {
      using Real = decltype(real);
      if (problem.template add_gradients<Real>(weighting, grad, aggregated, saved, made)) return;
      using Neighbors = typename Problem::template Neighbors<Real, decltype(weighting)>;
      gather<Neighbors>(problem, weighting, grad, aggregated, saved, made);
    });
    return {of_queries ? made.query_points : empty_if(false, made.query_points), made.reference_points, made.features,
            of_sigma ? made.sigma_rows.sum() : empty_if(false, problem.sigma)};
  }

  // Each gradient by a group of lanes that goes through the neighbours of the point it belongs to.
  template <class Neighbors, class Weighting>
  static void gather(Problem& problem, const Weighting& weighting, const Tensor& grad, const Tensor& aggregated,
                     const Tensor& saved, const Gradients& made) {
    using Real = typename Neighbors::Real;
    using Sum = typename Neighbors::Sum;
    const auto neighbors_of = [&](bool queries_own, int chunks) {
      return problem.template neighbors<Real>(weighting, queries_own, chunks);
    };
    const typename Neighbors::Weights weights{data<const Sum>(saved)};
    const bool of_features = made.features.numel() > 0, of_references = made.reference_points.numel() > 0;
    const int64_t references = problem.references();
    const bool at_once = problem.device.is_cuda && of_features && of_references &&
                         problem.channels() <= kChannelsAtOnce;  // gradients of the references
    problem.check_gradients();
    if (of_features || of_references) problem.prepare_references();
    const Tensor own_grad = problem.template sorted<Neighbors>(true, grad);
    if (of_features && !at_once) {
      const int chunks = problem.chunks();
      problem.device.each(
          FeatureGradient<Neighbors>{neighbors_of(false, chunks), matrix<const Sum>(own_grad),
                                     matrix<Sum>(made.features), weights},
          references * chunks);
    }
    if (!made.of_points) return;
    const Tensor features = problem.template sorted<Neighbors>(false, problem.features);
    const Tensor means = at::empty({problem.queries()}, features.options());
    problem.device.each(
        PointGradient<Neighbors, true>{neighbors_of(true, 1), matrix<const Sum>(own_grad), matrix<const Sum>(features),
                                       matrix<const Sum>(aggregated), weights, data<Sum>(means),
                                       data<Real>(made.query_points), data<Sum>(made.sigma_rows)},
        problem.queries());
    if (!of_references) return;
    if (at_once) {
      problem.device.each_on_gpu(
          PointGradient<Neighbors, false, true>{neighbors_of(false, 1), matrix<const Sum>(features),
                                                matrix<const Sum>(own_grad), matrix<const Sum>(aggregated), weights,
                                                data<Sum>(means), data<Real>(made.reference_points), nullptr,
                                                matrix<Sum>(made.features)},
          references);
    } else {
      problem.device.each(
          PointGradient<Neighbors, false>{neighbors_of(false, 1), matrix<const Sum>(features),
                                          matrix<const Sum>(own_grad), matrix<const Sum>(aggregated), weights,
                                          data<Sum>(means), data<Real>(made.reference_points), nullptr},
          references);
    }
  }

  static void define(torch::Library& library, const std::string& arguments) {
    const std::string name = Problem::kName;
    const std::string inputs = arguments + ", str kernel, str reduce, float power, float eps, float support";
    pointproj::define(library, name + "(" + inputs + ") -> (Tensor, Tensor)", TORCH_FN(forward), Gradient::kOwn);
    pointproj::define(library,
                      name + "_backward(Tensor grad_0, bool[4] needs, " + inputs +
                          ", Tensor output_0, Tensor output_1) -> (Tensor, Tensor, Tensor, Tensor)",
                      TORCH_FN(backward), Gradient::kOwn);
    Autograd<Problem, Arguments..., std::string_view, std::string_view, double, double, double>::register_in(library);
  }
};

using T = const Tensor&;
using OptionalT = const OptionalTensor&;

}  // namespace

TORCH_LIBRARY_FRAGMENT(pointproj, library) {
  Operator<NeighborProblem, T, T, T, T, T>::define(
      library,
      "Tensor query_points, Tensor reference_points, Tensor features, Tensor sigma, Tensor neighbor_indices");
  Operator<RadiusProblem, T, OptionalT, T, OptionalT, int64_t, TensorList, TensorList, T, T, double>::define(
      library,
      "Tensor query_points, Tensor? query_offsets, Tensor reference_points, Tensor? reference_offsets, SymInt clouds, "
      "Tensor[] query_grid, Tensor[] reference_grid, Tensor features, Tensor sigma, float radius");
}

}  // namespace pointproj
