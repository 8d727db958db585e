// Attention over neighbour lists: which kernels run, one after another.
#include "index.h"
#include "second_attention.h"

namespace pointproj::POINTPROJ_DEVICE {
namespace {

struct AttentionArguments {
  Tensor queries, keys, values, bias, rows;
  OptionalTensor row_splits;
  int64_t heads;
  double scale;
  bool deterministic;
  POINTPROJ_FIELDS(queries, keys, values, bias, rows, row_splits, heads, scale, deterministic)
};

bool is_aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0; }

// Arguments that are checked.
struct AttentionProblem {
  const AttentionArguments& given;
  Device device;
  ListedRows lists;
  int64_t channels;  // of a head

  explicit AttentionProblem(const AttentionArguments& given) : given(given), device(given.queries) {
    const auto& [queries, keys, values, bias, rows, row_splits, heads, scale, deterministic] = given;
    channels = heads > 0 && queries.dim() == 2 ? queries.size(1) / heads : 0;
    POINTPROJ_CHECK(channels >= 1 && channels <= kMostHeadChannels && channels * heads == queries.size(1),
                    "queries must have shape (q, heads * channels) with 1 to ", kMostHeadChannels,
                    " channels in each head; got ", text(queries.sizes()), " and ", heads, " heads");
    const ScalarType dtype = queries.scalar_type();
    POINTPROJ_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double,
                    "queries must be float32 or float64; got ", dtype);
    lists = checked_lists(rows, row_splits, keys.size(0), queries);
    check_like("queries", queries, {lists.queries, queries.size(1)}, dtype, queries);
    check_like("keys", keys, {keys.size(0), queries.size(1)}, dtype, queries);
    check_like("values", values, keys.sizes(), dtype, queries);
    check_like("bias", bias, {bias.size(0) > 0 ? rows.numel() : 0, heads}, dtype, queries);
  }
  template <class Sum>
  Attention<Sum> view() const {
    const auto& [queries, keys, values, bias, rows, row_splits, heads, scale, deterministic] = given;
    return {lists, matrix<const Sum>(queries), matrix<const Sum>(keys), matrix<const Sum>(values),
            bias.size(0) > 0 ? data<const Sum>(bias) : nullptr, static_cast<int>(heads), static_cast<int>(channels),
            static_cast<Sum>(scale),
            channels % 4 == 0 && is_aligned(queries) && is_aligned(keys) && is_aligned(values)};
  }
  // body(a number in the dtype of the sums, the lanes of a head)
  template <class Body>
  void for_types(Body body) const {
    const auto with_lanes = [&](auto sum) {
      if constexpr (kOnGpu) {
        if (channels <= 16) return body(sum, std::integral_constant<int, 4>{});
        if (channels <= 64) return body(sum, std::integral_constant<int, 16>{});
      }
      body(sum, std::integral_constant<int, 32>{});  // of which a CPU has one
    };
    given.queries.scalar_type() == ScalarType::Float ? with_lanes(float{}) : with_lanes(double{});
  }
};

// The result (Q, heads * channels), and logarithms of the sums of exponentials (Q, heads).
Tensors<2> attend(const AttentionArguments& given) {
  const AttentionProblem problem(given);
  const Tensor result = empty(given.queries.sizes(), given.queries);
  const Tensor log_sums = empty({given.queries.size(0), given.heads}, given.queries);
  if (given.keys.size(0) == 0) {
    clear(problem.device, result);
    return {result, log_sums};
  }
  problem.for_types([&](auto sum, auto lanes) {
    using Sum = decltype(sum);
    problem.device.each(
        Attend<Sum, decltype(lanes)::value>{problem.view<Sum>(), matrix<Sum>(result), data<Sum>(log_sums)},
        log_sums.numel());
  });
  return {result, log_sums};
}

// Gradients of queries, keys, values and bias.
Tensors<4> attend_backward(const BackwardArguments<AttentionArguments, 2>& arguments) {
  const auto& [grads, needs, given, outputs] = arguments;
  const auto& [queries, keys, values, bias, rows, row_splits, heads, scale, deterministic] = given;
  const Tensor &grad = grads[0], &result = outputs[0], &log_sums = outputs[1];
  const AttentionProblem problem(given);
  check_like("grad", grad, queries.sizes(), queries.scalar_type(), queries);
  const bool of_references = needs[1] || needs[2], in_order = deterministic || !kOnGpu;
  const Tensor none = empty({0}, queries);
  const auto like = [&](bool needed, const Tensor& tensor) {
    return needed ? empty({tensor.size(0), tensor.size(1)}, tensor) : none;
  };
  const Tensor d_queries = like(needs[0], queries), means = empty({queries.size(0), heads}, queries);
  const Tensor d_keys = like(of_references, keys), d_values = like(of_references, values);
  const Tensor d_bias = like(needs[3], bias);
  for (const Tensor& tensor : {d_queries, d_keys, d_values, d_bias}) clear(problem.device, tensor);
  const Tensors<4> made = {d_queries, needs[1] ? d_keys : none, needs[2] ? d_values : none, d_bias};
  if (keys.size(0) == 0) return made;
  problem.for_types([&](auto sum, auto lanes) {
    using Sum = decltype(sum);
    constexpr int kLanes = decltype(lanes)::value;
    Attention<Sum> view = problem.view<Sum>();
    view.aligned = view.aligned && is_aligned(grad) && is_aligned(result);
    const auto by_atomics = [&](const Tensor& made) {
      return of_references && !in_order ? matrix<Sum>(made) : Matrix<Sum>{nullptr, 0};
    };
    problem.device.each(
        AttendGradient<Sum, kLanes>{view, matrix<const Sum>(grad), matrix<const Sum>(result),
                                    data<const Sum>(log_sums), data<Sum>(means),
                                    needs[0] ? matrix<Sum>(d_queries) : Matrix<Sum>{nullptr, 0},
                                    d_bias.numel() > 0 ? data<Sum>(d_bias) : nullptr, by_atomics(d_keys),
                                    by_atomics(d_values)},
        log_sums.numel());
    if (!of_references || !in_order) return;
    const InvertedRows inverted(problem.device, problem.lists, rows.numel(), keys.size(0), rows);
    problem.device.each(
        AttendReferenceGradient<Sum, kLanes>{view, matrix<const Sum>(grad), data<const Sum>(log_sums),
                                             data<const Sum>(means), data<const int>(inverted.start),
                                             data<const int>(inverted.pairs), matrix<Sum>(d_keys),
                                             matrix<Sum>(d_values)},
        keys.size(0) * heads);
  });
  return made;
}

// Gradients of the upstream gradient, queries, keys, values and bias.
Tensors<5> attend_second_backward(const SecondBackwardArguments<AttentionArguments, 2, 4>& arguments) {
  const auto& [directions, needs, grads, given, outputs] = arguments;
  const auto& [queries, keys, values, bias, rows, row_splits, heads, scale, deterministic] = given;
  const Tensor &grad = grads[0], &result = outputs[0], &log_sums = outputs[1];
  const AttentionProblem problem(given);
  const Tensor* const likes[] = {&queries, &queries, &keys, &values, &bias};
  Tensors<5> made;
  for (int i = 0; i < 5; ++i) {
    const Tensor& like = *likes[i];
    made[i] = empty(needs[i] ? like.sizes() : Shape({0}), like);
    clear(problem.device, made[i]);
    if (i > 0 && directions[i - 1].numel() == 0) continue;
    check_like("direction", i > 0 ? directions[i - 1] : grad, like.sizes(), queries.scalar_type(), queries);
  }
  if (keys.size(0) == 0) return made;
  const Tensor means = empty({log_sums.numel(), 3}, queries);
  problem.for_types([&](auto sum, auto lanes) {
    using Sum = decltype(sum);
    constexpr int kLanes = decltype(lanes)::value;
    Attention<Sum> view = problem.view<Sum>();
    for (const Tensor& tensor : {grad, result, directions[0], directions[1], directions[2]}) {
      view.aligned = view.aligned && is_aligned(tensor);
    }
    const auto rows_of = [](const Tensor& tensor) {
      return tensor.numel() > 0 ? matrix<const Sum>(tensor) : Matrix<const Sum>{nullptr, 0};
    };
    const auto filled = [](const Tensor& tensor) {
      return tensor.numel() > 0 ? matrix<Sum>(tensor) : Matrix<Sum>{nullptr, 0};
    };
    const SecondAttention<Sum> second{
        view,
        {rows_of(directions[0]), rows_of(directions[1]), rows_of(directions[2]),
         directions[3].numel() > 0 ? data<const Sum>(directions[3]) : nullptr},
        matrix<const Sum>(grad), data<const Sum>(log_sums), reinterpret_cast<HeadMeans<Sum>*>(data<Sum>(means))};
    const int64_t query_heads = log_sums.numel();
    problem.device.each(SecondAttendMeans<Sum, kLanes>{second, matrix<const Sum>(result), filled(made[0])}, query_heads);
    if (made[1].numel() > 0 || made[4].numel() > 0) {
      problem.device.each(
          SecondAttendGradient<Sum, kLanes>{second, filled(made[1]),
                                            made[4].numel() > 0 ? data<Sum>(made[4]) : nullptr},
          query_heads);
    }
    if (made[2].numel() == 0 && made[3].numel() == 0) return;
    const InvertedRows inverted(problem.device, problem.lists, rows.numel(), keys.size(0), rows);
    problem.device.each(
        SecondAttendReferenceGradient<Sum, kLanes>{second, data<const int>(inverted.start),
                                                   data<const int>(inverted.pairs), filled(made[2]), filled(made[3])},
        keys.size(0) * heads);
  });
  return made;
}

const Operators registered(__FILE__, {operator_of<attend>("native_attend"),
                                      operator_of<attend_backward>("native_attend_backward"),
                                      operator_of<attend_second_backward>("native_attend_second_backward")});

#if !defined(__CUDACC__)
struct NoArguments {
  POINTPROJ_FIELDS()
};

int64_t most_head_channels(const NoArguments&) { return kMostHeadChannels; }

const Operators sizes(__FILE__, {operator_of<most_head_channels>("native_most_head_channels")}, kWithoutTensors);
#endif

}  // namespace
}  // namespace pointproj::POINTPROJ_DEVICE
