// Kernels of both aggregations and their gradients.
#include "cuda.cuh"
#include "listed.h"
#include "within.h"

namespace pointproj::cuda {

#define AGGREGATE(...)                    \
  EACH_WARP(SortRows<__VA_ARGS__>)        \
  EACH_WARP(AggregateWithin<__VA_ARGS__>) \
  EACH_WARP(GatherWithin<__VA_ARGS__>)    \
  EACH_WARP(PullWithin<__VA_ARGS__>)      \
  EACH_WARP(PushWithin<__VA_ARGS__>)      \
  EACH_WARP(AggregateListed<__VA_ARGS__>) \
  EACH_WARP(PullListed<__VA_ARGS__>)      \
  EACH_WARP(PushListed<__VA_ARGS__>)

EACH_WARP(GatherListed<float>)
EACH_WARP(GatherListed<double>)
EACH_WARP(SpreadListed<float>)
EACH_WARP(SpreadListed<double>)
AGGREGATE(float, float)
AGGREGATE(float, double)
AGGREGATE(double, double)

}  // namespace pointproj::cuda
