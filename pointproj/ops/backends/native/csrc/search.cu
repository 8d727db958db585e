// Kernels of the kNN search.
#include "cuda.cuh"
#include "search.h"

namespace pointproj::cuda {

#define SEARCH(Real)                                   \
  EACH(SearchByThread<Real, 8, Levels::kOne, true>)    \
  EACH(SearchByThread<Real, 8, Levels::kOne, false>)   \
  EACH(SearchByThread<Real, 16, Levels::kOne, false>)  \
  EACH(SearchByThread<Real, 32, Levels::kOne, false>)  \
  EACH(SearchInMemory<Real>)                           \
  EACH(SearchByWarp<Real, WarpList<Real>>)             \
  EACH(SearchByWarp<Real, WarpBlocks<Real, 1>>)        \
  EACH(SearchPostponedByThread<Real>)                  \
  EACH(SearchPostponedByWarp<Real>)

SEARCH(float)
SEARCH(double)

}  // namespace pointproj::cuda
