// How work reaches a device. Tasks are plain structs; cpu.cpp and the .cu files instantiate these for all there are.
#pragma once

#include <cstdint>

namespace pointproj {

namespace cpu {
template <class Task>
void build(const Task& task);
template <class Task>
void each(const Task& task, int64_t items);
}  // namespace cpu

namespace cuda {
constexpr int kMostBlocks = 2048;  // of a build: room for their partial sums

void clear(int* data, int64_t count, void* stream);

template <class Task>
void build(const Task& task, int64_t largest_loop, void* stream);
template <class Task>
void each_thread(const Task& task, int64_t items, void* stream);
template <class Task>
void each_warp(const Task& task, int64_t items, void* stream);
}  // namespace cuda

}  // namespace pointproj
