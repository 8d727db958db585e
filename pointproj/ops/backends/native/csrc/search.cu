// Kernels of the kNN search.
#include "cuda.cuh"

namespace pointproj::cuda {

#define SEARCH(Real)                                         \
  EACH_THREAD(SearchAlone<Real, 8, Level::kOne, true>)       \
  EACH_THREAD(SearchAlone<Real, 8, Level::kOne, false>)      \
  EACH_THREAD(SearchAlone<Real, 16, Level::kOne, false>)     \
  EACH_THREAD(SearchAlone<Real, 32, Level::kOne, false>)     \
  EACH_THREAD(SearchInMemory<Real>)                          \
  EACH_THREAD(SearchLeftAlone<Real>)                         \
  EACH_WARP(SearchTogether<Real>)                            \
  EACH_WARP(SearchLeft<Real>)

SEARCH(float)
SEARCH(double)

}  // namespace pointproj::cuda
