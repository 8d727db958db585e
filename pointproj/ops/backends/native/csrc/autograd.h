// How torch differentiates an aggregation: autograd functions for it and for its backward, which torch knows as an
// operator of its own. The second backward is an operator that Python makes, see pointproj/ops/bridge/torch_op.py.
//
// An aggregation returns its values and what its backward wants to be kept. Beside it there are
//   <name>_backward(grad, needs, arguments..., both results) -> gradients of the differentiable arguments
//   <name>_second_backward(directions..., grad, arguments..., both results) -> gradients of grad, and of those
// Written in C++ because a call of Python's autograd functions takes longer than many of these kernels.
#pragma once

#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace pointproj {

using at::Tensor;

// An argument as torch hands it on, and as it is kept until the backward.
template <class T>
struct Argument {
  using Passed = T;
  using Kept = std::decay_t<T>;
};
template <>
struct Argument<int64_t> {
  using Passed = c10::SymInt;
  using Kept = c10::SymInt;
};
template <>
struct Argument<at::TensorList> {
  using Passed = at::TensorList;
  using Kept = std::vector<Tensor>;
};
template <>
struct Argument<std::string_view> {
  using Passed = std::string_view;
  using Kept = std::string;
};
template <class T>
using Passed = typename Argument<T>::Passed;

template <class Visit>
void each_tensor(Tensor& tensor, Visit visit) {
  visit(tensor);
}
template <class Visit>
void each_tensor(std::optional<Tensor>& tensor, Visit visit) {
  if (tensor) visit(*tensor);
}
template <class Visit>
void each_tensor(std::vector<Tensor>& tensors, Visit visit) {
  for (Tensor& tensor : tensors) visit(tensor);
}
template <class T, class Visit>
void each_tensor(T&, Visit) {}

template <class Result, class... Arguments>
auto find_operator(const std::string& name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("pointproj::" + name).c_str(), "")
      .template typed<Result(Arguments...)>();
}

inline bool is_differentiated(const Tensor& tensor) {
  return (tensor.requires_grad() && at::GradMode::is_enabled()) || tensor._fw_grad(0).defined();
}

// Of the operator Self::kName, whose arguments with the numbers Self::kDifferentiable have gradients.
template <class Self, class... Arguments>
struct Autograd {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;
  using T = const Tensor&;
  using Needs = std::array<bool, 4>;
  using Results = std::tuple<Tensor, Tensor>;
  using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  using SecondGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

  static const auto& aggregation() {
    static const auto found = find_operator<Results, Passed<Arguments>...>(Self::kName);
    return found;
  }
  static const auto& backward() {
    static const auto found =
        find_operator<Gradients, T, Needs, Passed<Arguments>..., T, T>(std::string(Self::kName) + "_backward");
    return found;
  }
  static const auto& second_backward() {
    static const auto found = find_operator<SecondGradients, T, T, T, T, T, Passed<Arguments>..., T, T>(
        std::string(Self::kName) + "_second_backward");
    return found;
  }

  // All that a backward is given.
  struct Call : torch::CustomClassHolder {
    std::tuple<typename Argument<Arguments>::Kept...> arguments;
    Needs needs{};
    Tensor grad, aggregated, saved;

    explicit Call(const Passed<Arguments>&... arguments) : arguments(keep(arguments)...) {}

    static std::vector<Tensor> keep(at::TensorList tensors) { return tensors.vec(); }
    static std::string keep(std::string_view text) { return std::string(text); }
    template <class Any>
    static Any keep(const Any& any) {
      return any;
    }
    template <class Visit>
    void each(Visit visit) {
      std::apply([&](auto&... argument) { (each_tensor(argument, visit), ...); }, arguments);
      each_tensor(grad, visit);
      each_tensor(aggregated, visit);
      each_tensor(saved, visit);
    }
    template <int number>
    const Tensor& differentiable() const {
      return std::get<Self::kDifferentiable[number]>(arguments);
    }
    // Tensors are kept where torch counts them and sees whether they were changed.
    static void save(Context* ctx, c10::intrusive_ptr<Call> call) {
      Tensors tensors;
      call->each([&](Tensor& tensor) { tensors.push_back(std::exchange(tensor, Tensor())); });
      ctx->save_for_backward(std::move(tensors));
      ctx->saved_data["call"] = c10::IValue::make_capsule(std::move(call));
      ctx->set_materialize_grads(false);  // no zeros for results that no gradient arrives for
    }
    static Call load(Context* ctx) {
      Call call = *c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
      Tensors tensors = ctx->get_saved_variables();
      size_t next = 0;
      call.each([&](Tensor& tensor) { tensor = std::move(tensors[next++]); });
      // Results are functions of the arguments, and derivatives count them as such: with their history, a second
      // backward would come back here once more, with gradients of zero.
      if (at::GradMode::is_enabled()) call.aggregated = call.aggregated.detach();
      return call;
    }
  };

  struct Forward : torch::autograd::Function<Forward> {
    static Tensors forward(Context* ctx, T, T, T, T, const c10::intrusive_ptr<Call>& call) {
      at::AutoDispatchBelowADInplaceOrView below;
      std::tie(call->aggregated, call->saved) =
          std::apply([](const auto&... arguments) { return aggregation().call(arguments...); }, call->arguments);
      const Tensors made = {call->aggregated, call->saved};
      ctx->mark_non_differentiable({call->saved});
      Call::save(ctx, call);
      return made;
    }
    static Tensors backward(Context* ctx, const Tensors& grads) {
      if (!grads[0].defined()) return Tensors(5);
      const Call call = Call::load(ctx);
      const Needs needs = {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2),
                           ctx->needs_input_grad(3)};
      const auto [query, reference, features, sigma] = std::apply(
          [&](const auto&... arguments) {
            return Autograd::backward().call(grads[0].contiguous(), needs, arguments..., call.aggregated, call.saved);
          },
          call.arguments);
      const auto if_needed = [&](int number, const Tensor& made) { return needs[number] ? made : Tensor(); };
      return {if_needed(0, query), if_needed(1, reference), if_needed(2, features), if_needed(3, sigma), Tensor()};
    }
  };

  struct Backward : torch::autograd::Function<Backward> {
    static Tensors forward(Context* ctx, T, T, T, T, T, const c10::intrusive_ptr<Call>& call) {
      at::AutoDispatchBelowADInplaceOrView below;
      const auto [query, reference, features, sigma] = std::apply(
          [&](const auto&... arguments) {
            return Autograd::backward().call(call->grad, call->needs, arguments..., call->aggregated, call->saved);
          },
          call->arguments);
      Call::save(ctx, call);
      return {query, reference, features, sigma};
    }
    static Tensors backward(Context* ctx, const Tensors& given) {
      const Call call = Call::load(ctx);
      const auto direction = [&](int number, const Tensor& of) {
        if (call.needs[number] && given[number].defined()) return given[number].contiguous();
        return at::zeros_like(of, {}, at::MemoryFormat::Contiguous);
      };
      const auto [grad, query, reference, features, sigma] = std::apply(
          [&](const auto&... arguments) {
            return second_backward().call(
                direction(0, call.template differentiable<0>()), direction(1, call.template differentiable<1>()),
                direction(2, call.template differentiable<2>()), direction(3, call.template differentiable<3>()),
                call.grad, arguments..., call.aggregated, call.saved);
          },
          call.arguments);
      return {grad, query, reference, features, sigma, Tensor()};
    }
  };

  // The kernels that torch calls before those of a device.
  template <size_t... kNumbers, class Tuple>
  static bool any_differentiated(std::index_sequence<kNumbers...>, const Tuple& arguments) {
    return (is_differentiated(std::get<Self::kDifferentiable[kNumbers]>(arguments)) || ...);
  }
  static Results aggregate(Passed<Arguments>... arguments) {
    if (!any_differentiated(std::make_index_sequence<4>(), std::tie(arguments...))) {
      at::AutoDispatchBelowADInplaceOrView below;
      return aggregation().call(arguments...);
    }
    const auto call = c10::make_intrusive<Call>(arguments...);
    const Tensor query = call->template differentiable<0>(), reference = call->template differentiable<1>(),
                 features = call->template differentiable<2>(), sigma = call->template differentiable<3>();
    const Tensors made = Forward::apply(query, reference, features, sigma, call);
    return {made[0], made[1]};
  }
  static Gradients differentiate(
      const Tensor& grad, Needs needs, Passed<Arguments>... arguments, const Tensor& aggregated,
      const Tensor& saved) {
    if (!is_differentiated(grad) &&
        !any_differentiated(std::make_index_sequence<4>(), std::tie(arguments...))) {
      at::AutoDispatchBelowADInplaceOrView below;
      return backward().call(grad, needs, arguments..., aggregated, saved);
    }
    const auto call = c10::make_intrusive<Call>(arguments...);
    call->needs = needs;
    call->grad = grad;
    call->aggregated = aggregated;
    call->saved = saved;
    const Tensor query = call->template differentiable<0>(), reference = call->template differentiable<1>(),
                 features = call->template differentiable<2>(), sigma = call->template differentiable<3>();
    const Tensors made = Backward::apply(grad, query, reference, features, sigma, call);
    return {made[0], made[1], made[2], made[3]};
  }
  // Of several upstream gradients at once (torch.autograd.grad with is_grads_batched), one call for each: torch's own way
  // to that takes no lists of tensors.
  static Gradients differentiate_each(
      const Tensor& grad, Needs needs, Passed<Arguments>... arguments, const Tensor& aggregated,
      const Tensor& saved) {
    const at::BatchedTensorImpl* const batch = at::maybeGetBatchedImpl(grad);
    TORCH_CHECK(batch, Self::kName, ": of a batch only the upstream gradient can be");
    const at::BatchDim last = batch->bdims().back();
    at::BatchDims others;
    for (const at::BatchDim& dim : batch->bdims().slice(0, batch->bdims().size() - 1)) {
      others.emplace_back(dim.level(), dim.dim() - (dim.dim() > last.dim() ? 1 : 0));
    }
    std::array<Tensors, 4> made;
    for (int64_t i = 0; i < batch->value().size(last.dim()); ++i) {
      Tensor one = batch->value().select(last.dim(), i);
      if (!others.empty()) one = at::makeBatched(one, others);
      const auto [query, reference, features, sigma] =
          backward().call(one.contiguous(), needs, arguments..., aggregated, saved);
      const Tensor* const gradients[] = {&query, &reference, &features, &sigma};
      for (int number = 0; number < 4; ++number) made[number].push_back(*gradients[number]);
    }
    const auto all = [&](int number) { return at::addBatchDim(at::stack(made[number]), last.level(), 0); };
    return {all(0), all(1), all(2), all(3)};
  }
  static void register_in(torch::Library& library) {
    const std::string name = Self::kName;
    library.impl(name.c_str(), c10::DispatchKey::Autograd, TORCH_FN(aggregate));
    library.impl((name + "_backward").c_str(), c10::DispatchKey::Autograd, TORCH_FN(differentiate));
    library.impl((name + "_backward").c_str(), c10::DispatchKey::Batched, TORCH_FN(differentiate_each));
  }
};

}  // namespace pointproj
