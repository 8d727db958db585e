// How work reaches a device. Tasks are plain structs; cpu.cpp and the .cu files instantiate these for all there are.
#pragma once

#include <cstdint>

#include "common.h"

namespace pointproj {

// Fills one or two parts of a GPU's memory with zeros, in one launch.
struct SetToZero {
  static constexpr int kLanes = 1, kBlocks = 1;
  static constexpr int64_t kMostThreads = 1 << 17;
  struct Part {
    int* data;
    int64_t size;
  };
  Part parts[2];

  int64_t threads() const { return lesser(greater(parts[0].size, parts[1].size), kMostThreads); }
  template <class Lanes>
  POINTPROJ_FN void operator()(Lanes&, int64_t item) const {
    for (const Part& part : parts) {
      for (int64_t i = item; i < part.size; i += kMostThreads) part.data[i] = 0;
    }
  }
};

namespace cpu {
template <class Task>
void build(const Task& task);
template <class Task>
void each(const Task& task, int64_t items);
}  // namespace cpu

namespace cuda {
constexpr int kMostBlocks = 2048;  // of a build: as many partial sums of a scan

void use_device(int index);
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
