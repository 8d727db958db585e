// How work reaches a device. Tasks are plain structs; cpu.cpp and the .cu files instantiate these for all there are.
#pragma once

#include <cstdint>

#include "common.h"

namespace pointproj {

namespace cpu {
template <class Task>
void build(const Task& task);
template <class Task>
void each(const Task& task, int64_t items);
}  // namespace cpu

namespace cuda {
constexpr int kMostBlocks = 2048;  // of a build: as many partial sums of a scan

void use_device(int index);
void clear(void* data, int64_t bytes, void* stream);
template <class Task>
void build(const Task& task, int64_t largest_loop, void* stream);
template <class Task>
void each(const Task& task, int64_t items, void* stream);
}  // namespace cuda

}  // namespace pointproj

// Tasks that both devices have: EACH(task) for all of one dtype of positions and one of sums, and each weighting.
#define POINTPROJ_GRADIENTS(EACH, ...)    \
  EACH(FeatureGradient<__VA_ARGS__>)      \
  EACH(PointGradient<__VA_ARGS__, true>)  \
  EACH(PointGradient<__VA_ARGS__, false>)

// Those that a GPU has beside them.
#define POINTPROJ_GPU_GRADIENTS(EACH, Real, Weighting)                                \
  EACH(PointGradient<ListedNeighbors<Real, Weighting>, false, true>)                  \
  EACH(PointGradient<RadiusNeighbors<Real, Weighting>, false, true>)                  \
  EACH(GradientsByAtomics<Real, Weighting>)

#define POINTPROJ_SUMS(EACH, ...)                          \
  EACH(NeighborSums<__VA_ARGS__>)                          \
  EACH(RadiusSums<__VA_ARGS__>)                            \
  POINTPROJ_GRADIENTS(EACH, ListedNeighbors<__VA_ARGS__>)  \
  POINTPROJ_GRADIENTS(EACH, RadiusNeighbors<__VA_ARGS__>)

#define POINTPROJ_ALL_SUMS(EACH, Real, Sum)          \
  EACH(SortRows<Real, Sum>)                          \
  POINTPROJ_SUMS(EACH, Real, DefaultWeighting<Sum>)  \
  POINTPROJ_SUMS(EACH, Real, AnyWeighting<Sum>)

#define POINTPROJ_ALL_GPU_GRADIENTS(EACH, Real, Sum)       \
  POINTPROJ_GPU_GRADIENTS(EACH, Real, DefaultWeighting<Sum>)  \
  POINTPROJ_GPU_GRADIENTS(EACH, Real, AnyWeighting<Sum>)
