// Sums and gradients within a radius on a GPU, for 16 points at a time; tiles.cu has the kernels.
#pragma once

#include "radius_sums.h"

namespace pointproj {

constexpr int kTilePoints = 16, kTileChannels = 32;  // at most

enum class TileJob {
  kSums,        // as RadiusSums
  kFeatures,    // as FeatureGradient
  kQueries,     // as PointGradient of the queries
  kReferences,  // as PointGradient of the references, with that of the features
};

// The default weighting, in single precision.
struct RadiusTiles {
  RadiusNeighbors<float, DefaultWeighting<float>> problem;
  Matrix<const float> own_values, other_values;  // rows in the order of sorted points, zeros up to a multiple of 4
  Matrix<const float> aggregated;                // (Q, channels)
  float* saved;         // (Q, 2) see RadiusWeights; only kSums writes it
  float* means;         // (Q,) as in PointGradient
  float* d_points;      // (own points, 3)
  float* sigma_rows;    // (Q,)
  Matrix<float> sums;   // (own points, channels) the result, or the gradient of the features
};

namespace cuda {
template <TileJob job>
void tiles(const RadiusTiles& task, int64_t points, void* stream);
}  // namespace cuda

}  // namespace pointproj
