// Kernels that sort points into cells, invert neighbour rows, and fill with zeros.
#include "cell_list_build.h"
#include "cuda.cuh"
#include "hash_grid.h"
#include "neighbor_sums.h"

namespace pointproj::cuda {

EACH(SetToZero)
BUILD(BuildCellList<float>)
BUILD(BuildCellList<double>)
BUILD(BuildHashGrids<float>)
BUILD(BuildHashGrids<double>)
BUILD(InvertRows)

}  // namespace pointproj::cuda
