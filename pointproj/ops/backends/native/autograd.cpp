// Autograd in C++ for operators that pointproj/ops/bridge/cpp_op.py differentiates in Python otherwise.
//
// torch's stable ABI has no autograd, so this is a library of its own, for one version of torch. Python calls it where no
// mode and no transform observes an operator. The gradients are those of the operators `<name>_backward`. With
// `create_graph` these are called by the dispatcher, which differentiates them in turn.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <new>

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace pointproj {
namespace {

using torch::jit::Stack;

struct Rule {
  c10::OperatorHandle forward, backward;
  std::vector<int64_t> places;  // of the arguments that get a gradient
  std::vector<bool> is_tensor;  // of the arguments, then of the results
};

void run(const c10::OperatorHandle& op, Stack& stack) {
  try {
    op.callBoxed(&stack);
  } catch (const std::bad_alloc& error) {  // the stable ABI cannot throw torch's own
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  }
}

void run_below_autograd(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowAutograd below;
  run(op, stack);
}

}  // namespace

struct Recorded : torch::autograd::Function<Recorded> {
  // The arguments, which are also saved, become the results. Only the first of these has a gradient: it is returned.
  static at::Tensor forward(AutogradContext* context, at::TensorList, const Rule* rule, Stack* stack) {
    Stack values = *stack, others;
    run_below_autograd(rule->forward, *stack);
    values.insert(values.end(), stack->begin(), stack->end());
    variable_list saved;
    for (size_t i = 0; i < values.size(); ++i) {
      if (!rule->is_tensor[i]) {
        others.push_back(std::move(values[i]));
      } else {
        saved.push_back(values[i].isNone() ? at::Tensor() : std::move(values[i]).toTensor());
      }
    }
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    others.emplace_back(reinterpret_cast<int64_t>(rule));
    context->saved_data["others"] = c10::ivalue::Tuple::create(std::move(others));
    return stack->front().toTensor();
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto& others = context->saved_data["others"].toTupleRef().elements();
    const auto* rule = reinterpret_cast<const Rule*>(others.back().toInt());
    const size_t count = rule->places.size();
    variable_list made(count + 2);
    if (!grads[0].defined()) return made;
    c10::List<bool> needs;
    for (size_t i = 0; i < count; ++i) needs.push_back(context->needs_input_grad(i));
    Stack stack{grads[0].contiguous(), needs};
    const bool differentiable = at::GradMode::is_enabled();
    auto saved = context->get_saved_variables();
    if (differentiable) {
      // The backward treats results as functions of the arguments. With their history, a second one would come here.
      const auto results = saved.end() - static_cast<std::ptrdiff_t>(rule->forward.schema().returns().size());
      std::transform(results, saved.end(), results, [](const at::Tensor& result) { return result.detach(); });
    }
    auto tensor = saved.begin();
    auto other = others.begin();
    for (const bool is_tensor : rule->is_tensor) {
      stack.push_back(!is_tensor ? *other++ : tensor->defined() ? c10::IValue(*tensor) : c10::IValue());
      tensor += is_tensor;
    }
    (differentiable ? run : run_below_autograd)(rule->backward, stack);
    for (size_t i = 0; i < count; ++i) {
      if (needs[i]) made[i] = stack[i].toTensor();
    }
    return made;
  }
};

}  // namespace pointproj

// torch's own writes down the name of the node at every call, which takes longer than all else here.
template <>
variable_list torch::autograd::CppNode<pointproj::Recorded>::apply(variable_list&& grads) {
  std::lock_guard<std::mutex> lock(mutex_);
  variable_list made = pointproj::Recorded::backward(&ctx_, std::move(grads));
  made.resize(num_outputs());
  return made;
}

namespace pointproj {
namespace {

std::map<std::string, Rule>& rules() {
  static std::map<std::string, Rule> made;
  return made;
}

// Wrappers may be left over from a transform that ended; torch resolves negative bits on its way.
bool is_plain(const c10::IValue& value) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet others({DispatchKey::Negative, DispatchKey::Python, DispatchKey::Batched,
                                        DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper});
  return !value.isTensor() || (!value.toTensor().key_set().has_any(others) && !value.toTensor().is_meta());
}

void record(const c10::OperatorHandle& op, Stack* stack) {
  const Rule& rule = rules().at(op.operator_name().name);
  const size_t count = op.schema().arguments().size(), first = stack->size() - count;
  if (!std::all_of(stack->begin() + first, stack->end(), is_plain)) return rule.forward.callBoxed(stack);
  const auto needs_gradient = [&](int64_t place) { return (*stack)[first + place].toTensor().requires_grad(); };
  if (!at::GradMode::is_enabled() || std::none_of(rule.places.begin(), rule.places.end(), needs_gradient)) {
    return run_below_autograd(rule.forward, *stack);
  }
  Stack own(std::make_move_iterator(stack->begin() + first), std::make_move_iterator(stack->end()));
  torch::jit::drop(*stack, count);
  variable_list inputs;
  for (const int64_t place : rule.places) inputs.push_back(own[place].toTensor());
  const at::Tensor result = Recorded::apply(at::TensorList(inputs), &rule, &own);
  stack->emplace_back(result);
  stack->insert(stack->end(), std::make_move_iterator(own.begin() + 1), std::make_move_iterator(own.end()));
}

// Makes the operator `<name>_recorded`: the operator of this name, with autograd.
void define_recorded(const std::string& name, std::vector<int64_t> places) {
  static torch::Library library(torch::Library::FRAGMENT, "pointproj", std::nullopt, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto forward = dispatcher.findSchemaOrThrow(name.c_str(), "");
  const auto backward = dispatcher.findSchemaOrThrow((name + "_backward").c_str(), "");
  const std::string own = name + "_recorded";
  std::vector<bool> is_tensor;
  for (const auto* values : {&forward.schema().arguments(), &forward.schema().returns()}) {
    for (const auto& value : *values) is_tensor.push_back(c10::TensorType::get()->isSubtypeOf(value.type()));
  }
  if (!rules().emplace(own, Rule{forward, backward, std::move(places), std::move(is_tensor)}).second) return;
  library.def(forward.schema().cloneWithName(own, ""));
  library.impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<&record>());
}

TORCH_LIBRARY_FRAGMENT(pointproj, library) {
  library.def("define_recorded(str name, int[] places) -> ()",
              [](const std::string& name, std::vector<int64_t> places) { define_recorded(name, std::move(places)); });
}

}  // namespace
}  // namespace pointproj
