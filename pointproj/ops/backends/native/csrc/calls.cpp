// Whole calls of the public functions: what several of the other operators do one after another. torch.compile sees
// those; a call that is not compiled spares the way through Python between them.
#include "autograd.h"
#include "tensors.h"

namespace pointproj {

namespace {

using c10::SymInt;
using T = const Tensor&;
using OptionalT = const OptionalTensor&;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// body(the cell list that was given, or else one that is built now)
template <class Body>
auto with_cell_list(T points, OptionalT offsets, const SymInt& clouds, TensorList given, Body body) {
  static const auto build = find_operator<Three, T, OptionalT, SymInt>("native_build_cell_list");
  if (!given.empty()) return body(given);
  const auto [grids, starts, sorted] = build.call(points, offsets, clouds);
  return body(TensorList({grids, starts, sorted}));
}

std::tuple<Tensor, Tensor> nearest(T query_points, OptionalT query_offsets, T reference_points,
                                   OptionalT reference_offsets, SymInt clouds, TensorList cell_list, SymInt k,
                                   bool long_rows) {
  static const auto search =
      find_operator<std::tuple<Tensor, Tensor>, T, OptionalT, T, SymInt, TensorList, SymInt, bool>(
          "native_search_with_distances");
  return with_cell_list(reference_points, reference_offsets, clouds, cell_list, [&](TensorList tables) {
    return search.call(query_points, query_offsets, reference_points, clouds, tables, k, long_rows);
  });
}

Tensor knn_aggregate(T query_points, OptionalT query_offsets, T reference_points, OptionalT reference_offsets,
                     SymInt clouds, TensorList cell_list, T features, T sigma, SymInt k, std::string_view kernel,
                     std::string_view reduce, double power, double eps, double support) {
  static const auto sums =
      find_operator<std::tuple<Tensor, Tensor>, T, T, T, T, T, std::string_view, std::string_view, double, double,
                    double>("native_neighbor_sums");
  static const auto search = find_operator<Tensor, T, OptionalT, T, SymInt, TensorList, SymInt>("native_search");
  const Tensor rows =
      with_cell_list(reference_points, reference_offsets, clouds, cell_list, [&](TensorList tables) {
        return search.call(query_points, query_offsets, reference_points, clouds, tables, k);
      });
  return std::get<0>(
      sums.call(query_points, reference_points, features, sigma, rows, kernel, reduce, power, eps, support));
}

Tensor radius_aggregate(T query_points, OptionalT query_offsets, T reference_points, OptionalT reference_offsets,
                        SymInt clouds, TensorList reference_grid, T features, T sigma, double radius,
                        std::string_view kernel, std::string_view reduce, double power, double eps, double support) {
  static const auto build = find_operator<Three, T, OptionalT, SymInt, double, OptionalT>("native_build_hash_grid");
  static const auto build_both =
      find_operator<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>, T, OptionalT, T, OptionalT, SymInt,
                    double>("native_build_hash_grids");
  static const auto sums =
      find_operator<std::tuple<Tensor, Tensor>, T, OptionalT, T, OptionalT, SymInt, TensorList, TensorList, T, T,
                    double, std::string_view, std::string_view, double, double, double>("native_radius_sums");
  const auto sum = [&](TensorList queries, TensorList references) {
    return std::get<0>(sums.call(query_points, query_offsets, reference_points, reference_offsets, clouds, queries,
                                 references, features, sigma, radius, kernel, reduce, power, eps, support));
  };
  if (!reference_grid.empty()) {
    const auto [width, start, sorted] = build.call(query_points, query_offsets, clouds, radius, std::nullopt);
    return sum({width, start, sorted}, reference_grid);
  }
  const auto [query_width, query_start, queries, reference_width, reference_start, references] =
      build_both.call(query_points, query_offsets, reference_points, reference_offsets, clouds, radius);
  return sum({query_width, query_start, queries}, {reference_width, reference_start, references});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pointproj, library) {
  const std::string points =
      "(Tensor query_points, Tensor? query_offsets, Tensor reference_points, Tensor? reference_offsets, SymInt clouds, ";
  const std::string weighting = ", str kernel, str reduce, float power, float eps, float support) -> Tensor";
  library.def(("native_nearest" + points + "Tensor[] cell_list, SymInt k, bool long_rows) -> (Tensor, Tensor)").c_str(),
              TORCH_FN(nearest));
  library.def(("native_knn_aggregate" + points +
               "Tensor[] cell_list, Tensor features, Tensor sigma, SymInt k" + weighting).c_str(),
              TORCH_FN(knn_aggregate));
  library.def(("native_radius_aggregate" + points +
               "Tensor[] reference_grid, Tensor features, Tensor sigma, float radius" + weighting).c_str(),
              TORCH_FN(radius_aggregate));
}

}  // namespace pointproj
