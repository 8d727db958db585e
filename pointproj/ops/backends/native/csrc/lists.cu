// Kernels of neighbour lists within a radius.
#include "cuda.cuh"
#include "lists.h"

namespace pointproj::cuda {

POINTPROJ_LISTS(EACH, float)
POINTPROJ_LISTS(EACH, double)
EACH(RadiusSearchByWarp<float, 1>)
EACH(RadiusSearchByWarp<float, 2>)
EACH(RadiusSearchByWarp<float, 4>)
EACH(RadiusSearchByWarp<double, 1>)
EACH(RadiusSearchByWarp<double, 2>)
EACH(RadiusSearchByWarp<double, 4>)

}  // namespace pointproj::cuda
