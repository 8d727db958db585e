// Kernels that sort points into cells and invert neighbour rows.
#include "cell_list_build.h"
#include "cuda.cuh"
#include "gradients.h"
#include "hash_grid.h"

namespace pointproj::cuda {

void use_device(int index) { check(cudaSetDevice(index)); }

void clear(void* data, int64_t bytes, void* stream) {
  check(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)));
}

EACH(PutInOrder<float>)
EACH(PutInOrder<double>)
BUILD(BuildCellList<float>)
BUILD(BuildCellList<double>)
BUILD(BuildHashGrids<float>)
BUILD(BuildHashGrids<double>)
BUILD(InvertRows)

}  // namespace pointproj::cuda
