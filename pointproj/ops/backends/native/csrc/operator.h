// An operator of torch is a function of one struct, its arguments.
//
// The struct lists its fields once. From this list come the schema, which Python reads, and the code that takes the
// arguments of a call from torch's stack. A field may be such a struct itself: its fields then stand in its place.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "common.h"

namespace pointproj::POINTPROJ_DEVICE {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
template <size_t count>
using Tensors = std::array<Tensor, count>;

// All members of a struct in their order, by the names that they have in the schema.
#define POINTPROJ_FIELDS(...)                       \
  using HasFields = std::true_type;                 \
  template <class Visit>                            \
  void each_field(Visit visit) {                    \
    visit(#__VA_ARGS__ __VA_OPT__(, ) __VA_ARGS__); \
  }

// What a backward is given by pointproj/ops/bridge/torch_op.py.
template <class Forward, size_t outputs>
struct BackwardArguments {
  Tensors<1> grad;
  std::vector<bool> needs;  // for each differentiable input, whether its gradient is needed
  Forward forward;
  Tensors<outputs> output;
  POINTPROJ_FIELDS(grad, needs, forward, output)
};

// And a second backward, for as many differentiable inputs. A direction without elements is 0.
template <class Forward, size_t outputs, size_t inputs>
struct SecondBackwardArguments {
  Tensors<inputs> direction;  // upstream gradients of the first gradients
  std::vector<bool> needs;    // whether the gradient of `grad`, then of each input, is needed
  Tensors<1> grad;
  Forward forward;
  Tensors<outputs> output;
  POINTPROJ_FIELDS(direction, needs, grad, forward, output)
};

template <class Field>
concept Struct = requires { typename Field::HasFields; };
template <class Field>
concept Array = requires(Field field) { field.fill(Tensor()); };

inline std::string type_of(const Tensor&) { return "Tensor"; }
inline std::string type_of(const OptionalTensor&) { return "Tensor?"; }
inline std::string type_of(int64_t) { return "SymInt"; }
inline std::string type_of(double) { return "float"; }
inline std::string type_of(const std::optional<double>&) { return "float?"; }
inline std::string type_of(bool) { return "bool"; }
inline std::string type_of(const std::vector<bool>&) { return "bool[]"; }
inline std::string type_of(const std::string&) { return "str"; }

// Adds the fields to a schema: "(Tensor points, Tensor? offsets". Several tensors are numbered: "Tensor output_0".
template <class Field>
void declare(std::string& schema, const std::string& name, Field& field) {
  if constexpr (Struct<Field>) {
    field.each_field([&](std::string names, auto&... fields) {
      std::istringstream rest(names);
      (declare(schema, (std::getline(rest >> std::ws, names, ','), names), fields), ...);
    });
  } else if constexpr (Array<Field>) {
    for (size_t i = 0; i < field.size(); ++i) declare(schema, name + "_" + std::to_string(i), field[i]);
  } else {
    schema += (schema.back() == '(' ? "" : ", ") + type_of(field) + " " + name;
  }
}

// From torch's stack and to it.
template <class Field>
void read(StableIValue*& stack, Field& field) {
  if constexpr (Struct<Field>) {
    field.each_field([&](const char*, auto&... fields) { (read(stack, fields), ...); });
  } else if constexpr (Array<Field>) {
    for (Tensor& tensor : field) read(stack, tensor);
  } else {
    field = torch::stable::detail::to<Field>(*stack++);
  }
}
template <class Result>
void write(StableIValue* stack, const Result& result) {
  if constexpr (Array<Result>) {
    for (const Tensor& tensor : result) write(stack++, tensor);
  } else {
    *stack = torch::stable::detail::from(result);
  }
}

// Fake kernels and derivatives are pointproj/ops/bridge/cpp_op.py's.
struct Operator {
  std::string name, schema;
  void (*call)(StableIValue*, uint64_t, uint64_t);
};

template <auto function, class Result, class Arguments>
Operator boxed(const char* name, Result (*)(const Arguments&)) {
  Arguments arguments;
  Result result;
  std::string schema = "(";
  declare(schema, "", arguments);
  declare(schema += ") -> (", "result", result);
  return {name, schema + ")", [](StableIValue* stack, uint64_t, uint64_t) {
            Arguments given;
            StableIValue* next = stack;
            read(next, given);
            write(stack, function(given));
          }};
}
template <auto function>
Operator operator_of(const char* name) { return boxed<function>(name, function); }

constexpr const char* kWithoutTensors = "CompositeExplicitAutograd";  // dispatch key of operators that take none

// The operators of a file, for the device that it is compiled for. Their schemas come with the CPU's.
struct Operators {
  using Library = torch::stable::detail::StableLibrary;
  Library schemas, kernels;

  Operators(const char* file, const std::vector<Operator>& all, const char* dispatch_key = kOnGpu ? "CUDA" : "CPU")
      : schemas(Library::Kind::FRAGMENT, "pointproj", nullptr, file, 0),
        kernels(Library::Kind::IMPL, "pointproj", dispatch_key, file, 0) {
    for (const auto& [name, schema, call] : all) {
      if (!kOnGpu) schemas.def((name + schema).c_str());
      kernels.impl(name.c_str(), call);
    }
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
