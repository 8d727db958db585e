// Weighted sums over neighbour lists and their derivatives: which kernels run, one after another.
#include "weighted_sums.h"

#include "sum_problems.h"

namespace pointproj::POINTPROJ_DEVICE {
namespace {

// Of a kernel, as for pointproj.ops.backends.native.operators.list_weights.
struct KernelWeightArguments {
  Tensor distances, rows;
  OptionalTensor row_splits;
  int64_t references;
  OptionalTensor reference_weights;
  Tensor sigma;
  std::string kernel, reduce;
  double power, eps, support;
  POINTPROJ_FIELDS(distances, rows, row_splits, references, reference_weights, sigma, kernel, reduce, power, eps, support)
};

// Weights in the shape of the rows.
Tensors<1> kernel_weights(const KernelWeightArguments& given) {
  const auto& [distances, rows, row_splits, references, own, sigma, kernel, reduce, power, eps, support] = given;
  const ScalarType dtype = distances.scalar_type();
  POINTPROJ_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double,
                  "distances must be float32 or float64; got ", dtype);
  const ListedRows lists = checked_lists(rows, row_splits, references, distances);
  check_like("distances", distances, rows.sizes(), dtype, distances);
  check_like("sigma", sigma, {}, dtype, distances);
  if (own) check_like("reference_weights", *own, {references}, dtype, distances);
  const Tensor weights = empty(rows.sizes(), distances);
  for_positions(distances, [&](auto zero) {
    using Sum = decltype(zero);
    const AnyWeighting<Sum> weighting{data<const Sum>(sigma), named<Kernel>("kernel", kKernelNames, kernel),
                                      named<Reduce>("reduce", kReduceNames, reduce),
                                      {Sum(0), Sum(power), Sum(eps), Sum(support)}};
    Device(distances).each(
        KernelWeights<Sum>{lists, weighting, data<const Sum>(distances), data<const Sum>(own), data<Sum>(weights)},
        lists.queries);
  });
  return {weights};
}

struct WeightedSumArguments {
  Tensor features, weights, rows;
  OptionalTensor row_splits;
  bool deterministic;
  POINTPROJ_FIELDS(features, weights, rows, row_splits, deterministic)
};

// Arguments that are checked, and the sums over their lists.
struct WeightedSums {
  const WeightedSumArguments& given;
  Device device;
  ListedRows lists;
  int64_t queries, channels;

  explicit WeightedSums(const WeightedSumArguments& given) : given(given), device(given.features) {
    const auto& [features, weights, rows, row_splits, deterministic] = given;
    const ScalarType dtype = features.scalar_type();
    POINTPROJ_CHECK(features.dim() == 2 && (dtype == ScalarType::Float || dtype == ScalarType::Double),
                    "features must have shape (n, channels), in float32 or float64; got ", text(features.sizes()),
                    " in ", dtype);
    lists = checked_lists(rows, row_splits, features.size(0), features);
    queries = lists.queries;
    channels = features.size(1);
    check_like("features", features, features.sizes(), dtype, features);
    check_like("weights", weights, rows.sizes(), dtype, features);
  }
  int chunks() const { return kOnGpu ? static_cast<int>((channels + kChannelsAtOnce - 1) / kChannelsAtOnce) : 1; }

  // Of each query, (Q, C): values of reference points times weights; twice, if there are others.
  Tensor of_queries(const Tensor& values, const Tensor& weights, const OptionalTensor& other_values = std::nullopt,
                    const OptionalTensor& other_weights = std::nullopt) const {
    const Tensor sums = empty({queries, channels}, given.features);
    each([&](auto zero) {
      using Sum = decltype(zero);
      device.each(PairSums<Sum, true>{lists, nullptr, nullptr, nullptr,
                                      {terms<Sum>(values, weights), terms<Sum>(other_values, other_weights)},
                                      matrix<Sum>(sums), chunks()},
                  queries * chunks());
    });
    return sums;
  }
  // Of each reference point, (N, C): values of queries times weights.
  Tensor of_references(const Tensor& values, const Tensor& weights) const {
    const auto& [features, own_weights, rows, row_splits, deterministic] = given;
    const Tensor sums = empty(features.sizes(), features);
    if (kOnGpu && !deterministic) return by_atomics(values, weights, sums);
    const InvertedRows inverted(device, lists, rows.numel(), features.size(0), rows);
    OptionalTensor of_pairs;
    if (row_splits) {
      of_pairs = empty_ints({rows.numel()}, rows);
      device.each(QueriesOfPairs{lists, data<int>(of_pairs)}, queries);
    }
    each([&](auto zero) {
      using Sum = decltype(zero);
      device.each(PairSums<Sum, false>{lists, data<const int>(inverted.start), data<const int>(inverted.pairs),
                                       data<const int>(of_pairs),
                                       {terms<Sum>(values, weights), {{nullptr, 0}, nullptr}},
                                       matrix<Sum>(sums), chunks()},
                  features.size(0) * chunks());
    });
    return sums;
  }
  // Of each pair: the product of values of its query and of its reference point, 0 where there is no neighbour.
  Tensor of_pairs(const Tensor& of_query, const Tensor& of_reference) const {
    const Tensor products = empty(given.rows.sizes(), given.features);
    clear(device, products);
    if (given.features.size(0) == 0) return products;
    each([&](auto zero) {
      using Sum = decltype(zero);
      device.each(PairProducts<Sum>{lists, matrix<const Sum>(of_query), matrix<const Sum>(of_reference),
                                    data<Sum>(products)},
                  queries);
    });
    return products;
  }

 private:
  // By a list turned around, which a GPU sorts, this would take several times as long as its sums.
  Tensor by_atomics(const Tensor& values, const Tensor& weights, const Tensor& sums) const {
    clear(device, sums);
    if (sums.numel() == 0 || weights.numel() == 0) return sums;
    each([&](auto zero) {
      using Sum = decltype(zero);
      if constexpr (kOnGpu) device.each(AddPairs<Sum>{lists, terms<Sum>(values, weights), matrix<Sum>(sums)}, queries);
    });
    return sums;
  }
  template <class Sum>
  WeightedRows<Sum> terms(const OptionalTensor& values, const OptionalTensor& weights) const {
    // A direction of 0 has no elements, but the other term has such rows.
    if (!values || values->numel() == 0 || weights->numel() == 0) return {{nullptr, static_cast<int>(channels)}, nullptr};
    return {matrix<const Sum>(*values), data<const Sum>(weights)};
  }
  template <class Body>
  void each(Body body) const {
    given.features.scalar_type() == ScalarType::Float ? body(float{}) : body(double{});
  }
};

// Sums (Q, C).
Tensors<1> weighted_sums(const WeightedSumArguments& given) {
  return {WeightedSums(given).of_queries(given.features, given.weights)};
}

// Gradients of features and weights.
Tensors<2> weighted_sums_backward(const BackwardArguments<WeightedSumArguments, 1>& arguments) {
  const auto& [grads, needs, given, outputs] = arguments;
  const WeightedSums sums(given);
  const Tensor &grad = grads[0], none = empty({0}, grad);
  check_like("grad", grad, {sums.queries, sums.channels}, given.features.scalar_type(), given.features);
  return {needs[0] ? sums.of_references(grad, given.weights) : none,
          needs[1] ? sums.of_pairs(grad, given.features) : none};
}

// Gradients of the upstream gradient, features and weights.
Tensors<3> weighted_sums_second_backward(const SecondBackwardArguments<WeightedSumArguments, 1, 2>& arguments) {
  const auto& [directions, needs, grads, given, outputs] = arguments;
  const auto& [by_features, by_weights] = directions;
  const WeightedSums sums(given);
  const Tensor &grad = grads[0], none = empty({0}, grad);
  check_like("grad", grad, {sums.queries, sums.channels}, given.features.scalar_type(), given.features);
  const Tensor* const likes[] = {&given.features, &given.weights};
  for (int i = 0; i < 2; ++i) {
    if (directions[i].numel() == 0) continue;
    check_like("direction", directions[i], likes[i]->sizes(), given.features.scalar_type(), given.features);
  }
  const auto like = [&](bool needed, bool is_zero, const Tensor& tensor, auto make) {
    if (!needed || !is_zero) return needed ? make() : none;
    const Tensor zeros = empty(tensor.sizes(), tensor);
    clear(sums.device, zeros);
    return zeros;
  };
  return {needs[0] ? sums.of_queries(by_features, given.weights, given.features, by_weights) : none,
          like(needs[1], by_weights.numel() == 0, given.features, [&] { return sums.of_references(grad, by_weights); }),
          like(needs[2], by_features.numel() == 0, given.weights, [&] { return sums.of_pairs(grad, by_features); })};
}

const Operators registered(__FILE__, {operator_of<kernel_weights>("native_list_weights"),
                                      operator_of<weighted_sums>("native_weighted_sums"),
                                      operator_of<weighted_sums_backward>("native_weighted_sums_backward"),
                                      operator_of<weighted_sums_second_backward>("native_weighted_sums_second_backward")});

}  // namespace
}  // namespace pointproj::POINTPROJ_DEVICE
