// Kernels of neighbour lists within a radius.
#include "cuda.cuh"
#include "lists.h"

namespace pointproj::cuda {

POINTPROJ_LISTS(EACH, float)
POINTPROJ_LISTS(EACH, double)
#define BY_WARP(Real)                                           \
  EACH(SearchByWarp<RadiusSearch<Real>, WarpBlocks<Real, 1>>)  \
  EACH(SearchByWarp<RadiusSearch<Real>, WarpBlocks<Real, 2>>)  \
  EACH(SearchByWarp<RadiusSearch<Real>, WarpBlocks<Real, 4>>)

BY_WARP(float)
BY_WARP(double)

}  // namespace pointproj::cuda
