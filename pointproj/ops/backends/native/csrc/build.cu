// Kernels that sort points into cells, and invert neighbour rows.
#include "cell_list_build.h"
#include "cuda.cuh"
#include "hash_grid.h"
#include "neighbor_sums.h"

namespace pointproj::cuda {

void clear(int* data, int64_t count, void* stream) {
  check(cudaMemsetAsync(data, 0, count * sizeof(int), static_cast<cudaStream_t>(stream)));
}

BUILD(BuildCellList<float>)
BUILD(BuildCellList<double>)
BUILD(BuildHashGrids<float>)
BUILD(BuildHashGrids<double>)
BUILD(InvertRows)

}  // namespace pointproj::cuda
