// Kernels that sort points into cells, and invert neighbour lists.
#include "cuda.cuh"
#include "listed.h"
#include "wrapped.h"

namespace pointproj::cuda {

void clear(int* data, int64_t count, void* stream) {
  check(cudaMemsetAsync(data, 0, count * sizeof(int), static_cast<cudaStream_t>(stream)));
}

BUILD(BuildCells<float>)
BUILD(BuildCells<double>)
BUILD(BuildWrapped<float>)
BUILD(BuildWrapped<double>)
BUILD(InvertLists)

}  // namespace pointproj::cuda
