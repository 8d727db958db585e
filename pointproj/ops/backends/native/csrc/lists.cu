// Kernels of neighbour lists within a radius.
#include "cuda.cuh"
#include "lists.h"

namespace pointproj::cuda {

POINTPROJ_LISTS(EACH, float)
POINTPROJ_LISTS(EACH, double)
EACH(RadiusSearchByWarp<float>)
EACH(RadiusSearchByWarp<double>)

}  // namespace pointproj::cuda
