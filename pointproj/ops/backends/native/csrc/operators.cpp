// The operators by name and schema. Fake kernels and derivatives are pointproj/ops/bridge/cpp_op.py's.
#include "operators.h"

namespace pointproj {

namespace {

struct Operator {
  std::string name, schema;
  void (*boxed)(StableIValue*, uint64_t, uint64_t);
};

const std::string kPoints =
    "Tensor query_points, Tensor? query_offsets, Tensor reference_points, Tensor? reference_offsets, SymInt clouds, ";
const std::string kValues = "Tensor features, Tensor sigma, ";
const std::string kWeighting = ", str kernel, str reduce, float power, float eps, float support, bool deterministic";
const std::string kGrid = "Tensor? reference_grid, ";

// An operator and its backward.
std::vector<Operator> differentiable(const std::string& name, const std::string& arguments, int results,
                                     decltype(Operator::boxed) forward, decltype(Operator::boxed) backward) {
  std::string types = "Tensor", saved = ", Tensor output_0";
  for (int i = 1; i < results; ++i) {
    types += ", Tensor";
    saved += ", Tensor output_" + std::to_string(i);
  }
  return {{name, "(" + arguments + ") -> (" + types + ")", forward},
          {name + "_backward",
           "(Tensor grad_0, bool[] needs, " + arguments + saved + ") -> (Tensor, Tensor, Tensor, Tensor)", backward}};
}

std::vector<Operator> all_operators() {
  std::vector<Operator> all = {
      {"native_build_index",
       "(Tensor points, Tensor? offsets, SymInt clouds, float? radius, Tensor? largest_radius, bool deterministic) -> "
       "Tensor",
       TORCH_BOX(&build_index)},
      {"native_knn", "(" + kPoints + "Tensor? cell_list, SymInt k, bool long_rows) -> (Tensor, Tensor)",
       TORCH_BOX(&knn)},
      {"native_radius_search",
       "(" + kPoints + kGrid + "float radius, Tensor? radii, SymInt k) -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&radius_search)},
      {"native_radius_list",
       "(" + kPoints + kGrid + "float radius, Tensor? radii, SymInt capacity) -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&radius_list)}};
  for (const auto& both :
       {differentiable("native_aggregate_neighbors",
                       "Tensor query_points, Tensor reference_points, " + kValues + "Tensor neighbor_indices" +
                           kWeighting,
                       2, TORCH_BOX(&aggregate_neighbors), TORCH_BOX(&aggregate_neighbors_backward)),
        differentiable("native_knn_aggregate", kPoints + "Tensor? cell_list, " + kValues + "SymInt k" + kWeighting, 3,
                       TORCH_BOX(&knn_aggregate), TORCH_BOX(&knn_aggregate_backward)),
        differentiable("native_radius_aggregate", kPoints + kGrid + kValues + "float radius" + kWeighting, 3,
                       TORCH_BOX(&radius_aggregate), TORCH_BOX(&radius_aggregate_backward))}) {
    all.insert(all.end(), both.begin(), both.end());
  }
  return all;
}

void implement(torch::stable::detail::StableLibrary& library) {
  for (const Operator& each : all_operators()) library.impl(each.name.c_str(), each.boxed);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pointproj, library) {
  for (const Operator& each : all_operators()) library.def((each.name + each.schema).c_str());
}
STABLE_TORCH_LIBRARY_IMPL(pointproj, CPU, library) { implement(library); }
#ifdef POINTPROJ_CUDA
STABLE_TORCH_LIBRARY_IMPL(pointproj, CUDA, library) { implement(library); }
#endif

}  // namespace pointproj
