// Kernels of both aggregations and their gradients.
#include "cuda.cuh"
#include "gradients.h"

namespace pointproj::cuda {

EACH(FeatureGradientByAtomics<float>)
EACH(FeatureGradientByAtomics<double>)
POINTPROJ_ALL_SUMS(EACH, float, float)
POINTPROJ_ALL_SUMS(EACH, float, double)
POINTPROJ_ALL_SUMS(EACH, double, double)
POINTPROJ_ALL_GPU_GRADIENTS(EACH, float, float)
POINTPROJ_ALL_GPU_GRADIENTS(EACH, float, double)
POINTPROJ_ALL_GPU_GRADIENTS(EACH, double, double)

}  // namespace pointproj::cuda
