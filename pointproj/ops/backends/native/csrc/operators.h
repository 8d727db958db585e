// What torch sees of this library, and the one step that two of its operators share.
#pragma once

#include <string_view>
#include <tuple>

#include "torch.h"

// Packed points, cloud after cloud, and how an aggregation weighs: as pointproj.ops.clouds.Clouds and
// pointproj.ops.reference.Weighting.
#define POINTPROJ_POINTS                                                                   \
  const Tensor &query_points, const OptionalTensor &query_offsets, const Tensor &reference_points, \
      const OptionalTensor &reference_offsets, int64_t count
#define POINTPROJ_WEIGHTING \
  std::string_view kernel, std::string_view reduce, double power, double eps, double support
// What a backward is given beside all arguments and results of its forward: which gradients are needed.
#define POINTPROJ_UPSTREAM const Tensor &grad, const std::vector<bool>&needs

namespace pointproj {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // of both points, features, sigma; empty if not needed

// Rows of the k nearest, as many as there are columns for, and distances if they are wanted.
void search(const Clouds& clouds, const OptionalTensor& cell_list, const Tensor& rows, const OptionalTensor& distances);
void check_k(const Clouds& clouds, int64_t k);

// An index for searches within about a radius, or, without one, for kNN: (words,).
Tensor build_index(const Tensor& points, const OptionalTensor& offsets, int64_t clouds, std::optional<double> radius,
                   const OptionalTensor& largest_radius, bool in_fixed_order);

// Distances and rows of the k nearest (Q, k).
std::tuple<Tensor, Tensor> knn(POINTPROJ_POINTS, const OptionalTensor& cell_list, int64_t k, bool long_rows);

// The same within a radius, and how many are within it (Q,).
std::tuple<Tensor, Tensor, Tensor> radius_search(POINTPROJ_POINTS, const OptionalTensor& reference_grid, double radius,
                                                 const OptionalTensor& radii, int64_t k);

// Where the neighbours of each query begin (Q + 1,), their rows, ascending, as far as there is room, and their distances
// (capacity,).
std::tuple<Tensor, Tensor, Tensor> radius_list(POINTPROJ_POINTS, const OptionalTensor& reference_grid, double radius,
                                               const OptionalTensor& radii, int64_t capacity);

// Sums over given rows of neighbours (Q, channels), and the weights (Q, k).
std::tuple<Tensor, Tensor> aggregate_neighbors(
    const Tensor& query_points, const Tensor& reference_points, const Tensor& features, const Tensor& sigma,
    const Tensor& neighbor_indices, POINTPROJ_WEIGHTING, bool in_fixed_order);
Gradients aggregate_neighbors_backward(
    POINTPROJ_UPSTREAM, const Tensor& query_points, const Tensor& reference_points, const Tensor& features,
    const Tensor& sigma, const Tensor& neighbor_indices, POINTPROJ_WEIGHTING, bool in_fixed_order,
    const Tensor& aggregated, const Tensor& weights);

// The same, and the rows, which are searched first.
std::tuple<Tensor, Tensor, Tensor> knn_aggregate(
    POINTPROJ_POINTS, const OptionalTensor& cell_list, const Tensor& features, const Tensor& sigma, int64_t k,
    POINTPROJ_WEIGHTING, bool in_fixed_order);
Gradients knn_aggregate_backward(
    POINTPROJ_UPSTREAM, POINTPROJ_POINTS, const OptionalTensor& cell_list, const Tensor& features,
    const Tensor& sigma, int64_t k, POINTPROJ_WEIGHTING, bool in_fixed_order, const Tensor& aggregated,
    const Tensor& weights, const Tensor& neighbor_indices);

// Sums over all within the radius (Q, channels), two numbers of each query (Q, 2), and the hash grids that were made.
std::tuple<Tensor, Tensor, Tensor> radius_aggregate(
    POINTPROJ_POINTS, const OptionalTensor& reference_grid, const Tensor& features, const Tensor& sigma,
    double radius, POINTPROJ_WEIGHTING, bool in_fixed_order);
Gradients radius_aggregate_backward(
    POINTPROJ_UPSTREAM, POINTPROJ_POINTS, const OptionalTensor& reference_grid, const Tensor& features,
    const Tensor& sigma, double radius, POINTPROJ_WEIGHTING, bool in_fixed_order, const Tensor& aggregated,
    const Tensor& saved, const Tensor& grids);

}  // namespace pointproj
