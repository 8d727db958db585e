// Both aggregations and their gradients: which kernels run, one after another.
#include "gradients.h"
#include "sum_problems.h"

namespace pointproj::POINTPROJ_DEVICE {
namespace {

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
  OptionalTensor sigma_rows;
  Tensor query_points, reference_points, features;
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
  OptionalTensor means;
  if (of_points) means = empty({problem.queries(), 2}, features);
  const auto launch = [&](auto queries_own, auto with_points, auto with_features) {
    const int chunks = with_features && !queries_own ? problem.chunks() : 1;
    problem.device().each(
        Gradient<Neighbors, queries_own, with_points, with_features>{
            problem.template neighbors<Real>(weighting, queries_own, chunks),
            matrix<const Sum>(queries_own ? own_grad : features), matrix<const Sum>(queries_own ? features : own_grad),
            matrix<const Sum>(aggregated), {data<const Sum>(saved)},
            reinterpret_cast<QueryTerms<Sum>*>(data<Sum>(means)),
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
  const Tensor& features = problem.given.features;
  const int64_t queries = problem.queries();
  const auto dtype = features.scalar_type();
  check_like("aggregated", aggregated, {queries, problem.channels()}, dtype, features);
  check_like("grad", grad, aggregated.sizes(), dtype, features);
  check_like("saved", saved, {queries, 2}, dtype, features);
  POINTPROJ_CHECK(needs.size() == 4, "needs must have 4 elements, one for each gradient; got ", needs.size());
  const Tensor none = empty({0}, grad);
  const auto empty_if = [&](bool needed, const Tensor& like) { return needed ? empty(like.sizes(), like) : none; };
  const bool of_points = needs[0] || needs[1] || needs[3];
  const auto& [query, reference, device] = problem.sets;
  const NeededGradients needed{of_points, of_points ? OptionalTensor(empty({queries}, features)) : std::nullopt,
                               empty_if(of_points, query.points), empty_if(needs[1], reference.points),
                               empty_if(needs[2], features)};
  problem.for_types([&](auto real, auto weighting) {
    using Neighbors = typename Problem::template Neighbors<decltype(real), decltype(weighting)>;
    fill_gradients<Neighbors>(problem, weighting, grad, aggregated, saved, needed);
  });
  return {needs[0] ? needed.query_points : none, needed.reference_points, needed.features,
          needs[3] ? torch::stable::sum(*needed.sigma_rows) : none};
}

const Operators registered(
    __FILE__, {operator_of<aggregate<NeighborProblem>>("native_knn_aggregate"),
               operator_of<differentiate<NeighborProblem>>("native_knn_aggregate_backward"),
               operator_of<aggregate<RadiusProblem>>("native_radius_aggregate"),
               operator_of<differentiate<RadiusProblem>>("native_radius_aggregate_backward")});

}  // namespace
}  // namespace pointproj::POINTPROJ_DEVICE
