// Second derivatives of both aggregations: which kernels run, one after another.
#include "second_gradients.h"
#include "sum_problems.h"

namespace pointproj::POINTPROJ_DEVICE {
namespace {

// Gradients of the upstream gradient, both points, features and sigma; empty where none is needed.
struct SecondGradients {
  Tensor grad, query_points, reference_points, features, sigma_rows;
};

// Directions of both points and of features, empty where they are 0.
struct GivenDirections {
  Tensor query_points, reference_points, features, sigma;
};

template <class Neighbors, class Problem, class Weighting>
void fill_second_gradients(Problem& problem, const Weighting& weighting, const Tensor& grad, const Tensor& aggregated,
                           const Tensor& saved, const GivenDirections& along, const SecondGradients& made) {
  using Real = typename Neighbors::Real;
  using Sum = typename Neighbors::Sum;
  const Tensor& given = problem.given.features;
  const auto is_given = [](const Tensor& tensor) { return tensor.numel() > 0; };
  const auto rows_of = [](const Tensor& tensor) {
    return tensor.numel() > 0 ? matrix<const Sum>(tensor) : Matrix<const Sum>{nullptr, 0};
  };
  // In the order of the points, which sums read together.
  const auto sorted = [&](bool of_queries, const Tensor& tensor) {
    return is_given(tensor) ? problem.template sorted<Neighbors>(of_queries, tensor) : tensor;
  };
  const auto of_sums = [&](const Tensor& direction) { return torch::stable::to(direction, given.scalar_type()); };
  const Tensor query_steps = of_sums(along.query_points), reference_steps = of_sums(along.reference_points);
  const Tensor sorted_grad = sorted(true, grad), features = sorted(false, given);
  const Tensor feature_direction = sorted(false, along.features);
  const Tensor means = empty({problem.queries(), 6}, given);
  const auto launch = [&](auto queries_own, const Tensor& rows, const Tensor& points, bool has_products, bool is_first) {
    const bool has_rows = is_given(rows);
    const int chunks = has_rows && !has_products ? problem.chunks() : 1;
    const Tensor others = sorted(!queries_own, queries_own ? reference_steps : query_steps);
    problem.device().each(
        SecondGradient<Neighbors, queries_own>{
            problem.template neighbors<Real>(weighting, queries_own, chunks),
            matrix<const Sum>(queries_own ? sorted_grad : features),
            matrix<const Sum>(queries_own ? features : sorted_grad),
            {rows_of(queries_own ? query_steps : reference_steps), rows_of(others), rows_of(feature_direction),
             is_given(along.sigma) ? data<const Sum>(along.sigma) : nullptr},
            matrix<const Sum>(aggregated), {data<const Sum>(saved)},
            reinterpret_cast<QueryMeans<Sum>*>(data<Sum>(means)),
            has_rows ? matrix<Sum>(rows) : Matrix<Sum>{nullptr, 0}, is_given(points) ? data<Real>(points) : nullptr,
            queries_own && is_given(made.sigma_rows) ? data<Sum>(made.sigma_rows) : nullptr, has_products, is_first},
        (queries_own ? problem.queries() : problem.references()) * chunks);
  };
  const Tensor none = empty({0}, given);
  const auto launch_side = [&](auto queries_own, const Tensor& rows, const Tensor& points, bool has_products) {
    const bool together = problem.chunks() == 1 || !has_products || !is_given(rows);
    launch(queries_own, together ? rows : none, points, has_products, true);
    if (!together) launch(queries_own, rows, none, false, false);
  };
  const bool of_references = is_given(made.reference_points);
  launch_side(std::true_type{}, made.grad, made.query_points,
              of_references || is_given(made.query_points) || is_given(made.sigma_rows));
  if (!of_references && !is_given(made.features)) return;
  problem.prepare_references();
  launch_side(std::false_type{}, made.features, made.reference_points, of_references);
}

template <class Problem>
Tensors<5> differentiate_twice(const SecondBackwardArguments<typename Problem::Arguments, 3, 4>& given) {
  const auto& [directions, needs, grads, forward, outputs] = given;
  const auto& [aggregated, saved, made] = outputs;
  const Tensor& grad = grads[0];
  Problem problem(forward, made);
  const Tensor &features = problem.given.features, &sigma = problem.given.sigma;
  const auto& [query, reference, device] = problem.sets;
  const auto dtype = features.scalar_type();
  check_like("aggregated", aggregated, {problem.queries(), problem.channels()}, dtype, features);
  check_like("grad", grad, aggregated.sizes(), dtype, features);
  check_like("saved", saved, {problem.queries(), 2}, dtype, features);
  POINTPROJ_CHECK(needs.size() == 5, "needs must have 5 elements, one for each gradient; got ", needs.size());
  const Tensor* const likes[] = {&query.points, &reference.points, &features, &sigma};
  for (int i = 0; i < 4; ++i) {
    if (directions[i].numel() == 0) continue;
    check_like("direction", directions[i], likes[i]->sizes(), likes[i]->scalar_type(), features);
  }
  const auto empty_if = [](bool needed, const Tensor& like) { return empty(needed ? like.sizes() : Shape({0}), like); };
  const SecondGradients gradients{empty_if(needs[0], grad), empty_if(needs[1], query.points),
                                  empty_if(needs[2], reference.points), empty_if(needs[3], features),
                                  empty({needs[4] ? problem.queries() : 0}, features)};
  problem.for_types([&](auto real, auto weighting) {
    using Neighbors = typename Problem::template Neighbors<decltype(real), decltype(weighting)>;
    fill_second_gradients<Neighbors>(problem, weighting, grad, aggregated, saved,
                                     {directions[0], directions[1], directions[2], directions[3]}, gradients);
  });
  return {gradients.grad, gradients.query_points, gradients.reference_points, gradients.features,
          needs[4] ? torch::stable::sum(gradients.sigma_rows) : empty({0}, sigma)};
}

const Operators registered(
    __FILE__, {operator_of<differentiate_twice<NeighborProblem>>("native_knn_aggregate_second_backward"),
               operator_of<differentiate_twice<RadiusProblem>>("native_radius_aggregate_second_backward")});

}  // namespace
}  // namespace pointproj::POINTPROJ_DEVICE
