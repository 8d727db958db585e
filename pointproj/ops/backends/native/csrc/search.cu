// Kernels of the kNN search.
#include "cuda.cuh"
#include "search.h"

namespace pointproj::cuda {

#define SEARCH(Real)                                              \
  EACH(SearchByThread<Knn<Real, Levels::kOne>, 8, true>)          \
  EACH(SearchByThread<Knn<Real, Levels::kOne>, 8>)                \
  EACH(SearchByThread<Knn<Real, Levels::kOne>, 16>)               \
  EACH(SearchByThread<Knn<Real, Levels::kOne>, 32>)               \
  EACH(SearchInMemory<Knn<Real, Levels::kBoth>>)                  \
  EACH(SearchByWarp<Knn<Real, Levels::kOne>, WarpList<Real>>)       \
  EACH(SearchByWarp<Knn<Real, Levels::kOne>, WarpBlocks<Real, 1>>)  \
  EACH(SearchPostponed<Real, 1>)                                  \
  EACH(SearchPostponed<Real, 32>)

SEARCH(float)
SEARCH(double)

}  // namespace pointproj::cuda
