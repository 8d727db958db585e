// Kernels that sort points into cells, invert neighbour rows, and fill with zeros.
#include "cell_list_build.h"
#include "cuda.cuh"
#include "gradients.h"
#include "hash_grid.h"

namespace pointproj::cuda {

void use_device(int index) { check(cudaSetDevice(index)); }

EACH(SetToZero)
EACH(PutInOrder<float>)
EACH(PutInOrder<double>)
BUILD(BuildCellList<float>)
BUILD(BuildCellList<double>)
BUILD(BuildHashGrids<float>)
BUILD(BuildHashGrids<double>)
BUILD(InvertRows)

}  // namespace pointproj::cuda
