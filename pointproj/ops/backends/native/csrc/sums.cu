// Kernels of both aggregations and their gradients.
#include "cuda.cuh"
#include "neighbor_sums.h"
#include "radius_sums.h"

namespace pointproj::cuda {

#define SUMS(...)                               \
  EACH(FeatureGradientByAtomics<__VA_ARGS__>)   \
  POINTPROJ_ALL_SUMS(EACH, __VA_ARGS__)

SUMS(float, float)
SUMS(float, double)
SUMS(double, double)

}  // namespace pointproj::cuda
