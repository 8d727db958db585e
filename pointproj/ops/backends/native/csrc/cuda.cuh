// A GPU: all its threads as one machine, and the launches.
#pragma once

#include <cooperative_groups.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>
#include <string>

#include "lanes.h"
#include "scan.h"
#include "warp_lanes.cuh"

// Of libtorch_cuda, which a torch for CPUs does not have.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace pointproj::POINTPROJ_DEVICE {

constexpr int kBuildThreads = 512, kBuildWarps = kBuildThreads / 32;
constexpr int kCountedInBlocks = 1 << 18;  // rows: beyond, threads of a block count those of a cell together

constexpr int kOfOneBlock = 4 * kBuildThreads;  // a loop: an ordinary launch takes less of the host's time

// All threads of one launch, which is cooperative unless it has one block. Loops are divided among them. A barrier comes
// before a loop that needs results of another.
struct AllThreads {
  cooperative_groups::grid_group all = cooperative_groups::this_grid();
  Shared<32, float>* shared;

  POINTPROJ_FN void barrier() const { gridDim.x == 1 ? __syncthreads() : all.sync(); }
  POINTPROJ_FN int fetch_add(int* to, int value) const { return atomicAdd(to, value); }
  POINTPROJ_FN void fetch_max(int* to, int value) const { atomicMax(to, value); }
  POINTPROJ_FN unsigned thread() const { return blockIdx.x * kBuildThreads + threadIdx.x; }
  POINTPROJ_FN unsigned threads() const { return gridDim.x * kBuildThreads; }

  template <class Body>
  POINTPROJ_FN void each(int size, Body body) const {
    for (unsigned i = thread(); i < static_cast<unsigned>(size); i += threads()) body(static_cast<int>(i));
  }
  template <class Body>
  POINTPROJ_FN void each_warp(int size, Body body) const {
    WarpLanes<32> lanes(*shared);
    for (unsigned i = thread() / 32; i < static_cast<unsigned>(size); i += threads() / 32) {
      body(lanes, static_cast<int>(i));
    }
  }
  // Ranks in the order in which threads come. Threads of a warp that share a slot count together: a dense cluster is
  // one address for millions of points.
  template <class SlotOf, class Crossing>
  POINTPROJ_FN void count(int rows, int* occupancy, int* place, SlotOf slot_of, int limit, Crossing crossing) const {
    if (limit > 0 && rows > kCountedInBlocks) return count_in_blocks(rows, occupancy, place, slot_of, limit, crossing);
    for (unsigned row = thread(); row < static_cast<unsigned>(rows); row += threads()) {
      const Slot slot = slot_of(static_cast<int>(row));
      if (slot.needs_rank) {
        const unsigned same = __match_any_sync(__activemask(), slot.at);
        const int leader = __ffs(same) - 1, lane = threadIdx.x & 31, size = __popc(same);
        int first = 0;
        if (lane == leader) {
          first = atomicAdd(occupancy + slot.at, size);
          if (first < limit && first + size >= limit) crossing(slot.at);
        }
        first = __shfl_sync(same, first, leader);
        reinterpret_cast<int2*>(place)[row] = make_int2(slot.at, first + __popc(same & ((1u << lane) - 1u)));
      } else {
        place[2 * static_cast<int64_t>(row)] = slot.at;
      }
    }
  }
  // The same where every slot needs ranks: threads of a block count together, in a table in shared memory. Of 10^6 points
  // of a CFD mesh, 10^4 and more fall into one slot. A slot whose place in the table is taken is counted alone.
  template <class SlotOf, class Crossing>
  POINTPROJ_FN void count_in_blocks(
      int rows, int* occupancy, int* place, SlotOf slot_of, int limit, Crossing crossing) const {
    constexpr int kPlaces = 2 * kBuildThreads;
    __shared__ int slots[kPlaces], sizes[kPlaces];
    const auto add = [&](int slot, int size) {
      const int first = atomicAdd(occupancy + slot, size);
      if (first < limit && first + size >= limit) crossing(slot);
      return first;
    };
    for (unsigned begin = blockIdx.x * kBuildThreads; begin < static_cast<unsigned>(rows); begin += threads()) {
      for (int i = threadIdx.x; i < kPlaces; i += kBuildThreads) {
        slots[i] = -1;
        sizes[i] = 0;
      }
      __syncthreads();
      const unsigned row = begin + threadIdx.x;
      int slot = 0, rank = 0, at = -1;
      if (row < static_cast<unsigned>(rows)) {
        slot = slot_of(static_cast<int>(row)).at;
        const int wanted = slot % kPlaces, found = atomicCAS(slots + wanted, -1, slot);
        if (found == -1 || found == slot) at = wanted;
        rank = at < 0 ? add(slot, 1) : atomicAdd(sizes + at, 1);
      }
      __syncthreads();
      for (int i = threadIdx.x; i < kPlaces; i += kBuildThreads) {
        if (slots[i] >= 0) sizes[i] = add(slots[i], sizes[i]);
      }
      __syncthreads();
      if (at >= 0) rank += sizes[at];
      if (row < static_cast<unsigned>(rows)) reinterpret_cast<int2*>(place)[row] = make_int2(slot, rank);
      __syncthreads();
    }
  }
  // How many numbers below size pass the test. It has a barrier, and all threads get the result.
  template <class Test>
  POINTPROJ_FN int count_if(int size, int* partial, Test test) const {
    __shared__ int sums[kBuildWarps];
    int found = 0;
    each(size, [&](int i) { found += test(i) ? 1 : 0; });
    found = block_sum(found, sums);
    if (threadIdx.x == 0) partial[blockIdx.x] = found;
    barrier();
    int all_found = 0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += kBuildThreads) all_found += partial[i];
    return block_sum(all_found, sums);
  }
  // Calls store(i, sum of the first i + 1). Each block sums up its part, then begins with the sum of the parts before.
  // It needs no launch of its own: a library's scan would be three.
  template <class Store>
  POINTPROJ_FN void scan(const int* in, int size, int* partial, Store store) const {
    __shared__ int sums[kBuildWarps];
    const int part = (size - 1) / static_cast<int>(gridDim.x) + 1;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * part;
    const int64_t begin = lesser(first, int64_t(size)), end = lesser(first + part, int64_t(size));
    int sum = 0;
    for (int64_t i = begin + threadIdx.x; i < end; i += kBuildThreads) sum += in[i];
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
    barrier();
    int before = 0;
    for (unsigned i = threadIdx.x; i < blockIdx.x; i += kBuildThreads) before += partial[i];
    before = block_sum(before, sums);
    for (int64_t tile = begin; tile < end; tile += kBuildThreads) {
      const int64_t i = tile + threadIdx.x;
      const int x = running_sum(i < end ? in[i] : 0);
      __syncthreads();
      if ((threadIdx.x & 31) == 31) sums[threadIdx.x / 32] = x;
      __syncthreads();
      int all_before = before;
      for (int warp = 0; warp < kBuildWarps; ++warp) {
        if (warp < static_cast<int>(threadIdx.x / 32)) all_before += sums[warp];
        before += sums[warp];
      }
      if (i < end) store(i, x + all_before);
    }
  }
  POINTPROJ_FN int block_sum(int x, int* sums) const {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(kAll, x, step);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    int sum = 0;
    for (int warp = 0; warp < kBuildWarps; ++warp) sum += sums[warp];
    return sum;
  }
};

template <class Task>
__global__ void __launch_bounds__(kBuildThreads, 2) build_kernel(const Task task) {
  __shared__ Shared<32, float> shared[kBuildWarps];
  AllThreads machine;
  machine.shared = &shared[threadIdx.x / 32];
  task(machine);
}

// Where points have few lanes, warps are few and some have much more to do. Small blocks balance that, all at once.
template <class Task>
constexpr int blocks_at_once() {
  if constexpr (requires { Task::kBlocks; }) {
    return Task::kBlocks;
  } else {
    return Task::kLanes < 32 && sizeof(typename Task::Number) == 4 ? 14 : 1;
  }
}
template <class Task>
constexpr int kThreads = Task::kLanes == 1 ? 128 : Task::kLanes < 32 ? 64 : 256;
template <class Task>
constexpr int kItems = kThreads<Task> / Task::kLanes;  // of a block

// Lanes without an item repeat the last one, so that all lanes of a warp take the same way.
template <class Task>
__global__ void __launch_bounds__(kThreads<Task>, blocks_at_once<Task>()) each_kernel(const Task task, int64_t items) {
  constexpr int kLanes = Task::kLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kItems<Task>, item = first + threadIdx.x / kLanes;
  if constexpr (kLanes == 1) {
    OneLane lanes;
    if (item < items) task(lanes, item);
  } else {
    __shared__ Shared<kLanes, typename Task::Number> shared[kItems<Task>];
    if (first + threadIdx.x / 32 * (32 / kLanes) >= items) return;
    WarpLanes<kLanes> lanes(shared[threadIdx.x / kLanes], item < items);
    task(lanes, lesser(item, items - 1));
  }
}

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

constexpr int kMostDevices = 64;

// The device of a tensor, as the current one, and torch's current stream on it.
struct Device {
  int index;
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  explicit Device(const torch::stable::Tensor& like) : index(like.get_device_index()), guard(index) {
    check(cudaSetDevice(index));  // of this library's own runtime
    void* current;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &current));
    stream = static_cast<cudaStream_t>(current);
  }
  void clear(void* data, int64_t bytes) const {
    if (bytes > 0) check(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), stream));
  }
  template <class Task>
  void build(const Task& task, int64_t largest_loop) const {
    void* arguments[] = {const_cast<Task*>(&task)};
    const auto kernel = reinterpret_cast<const void*>(build_kernel<Task>);
    if (largest_loop <= kOfOneBlock) {
      return check(cudaLaunchKernel(kernel, 1, kBuildThreads, arguments, 0, stream));
    }
    const int64_t wanted = (largest_loop + kBuildThreads - 1) / kBuildThreads;
    const int blocks = static_cast<int>(greater(int64_t(1), lesser(wanted, int64_t(most_build_blocks<Task>()))));
    check(cudaLaunchCooperativeKernel(kernel, blocks, kBuildThreads, arguments, 0, stream));
  }
  template <class Task>
  void each(const Task& task, int64_t items) const {
    if (items == 0) return;
    const auto blocks = static_cast<unsigned>((items + kItems<Task> - 1) / kItems<Task>);
    each_kernel<Task><<<blocks, kThreads<Task>, 0, stream>>>(task, items);
    check(cudaGetLastError());
  }

 private:
  // Blocks that the device holds at once: a cooperative launch may have no more.
  template <class Task>
  int most_build_blocks() const {
    static int known[kMostDevices] = {};
    int& blocks = known[index % kMostDevices];
    if (blocks == 0) {
      int each = 0, processors = 0;
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, build_kernel<Task>, kBuildThreads, 0));
      check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index));
      blocks = lesser(each * processors, kMostBuildBlocks);
    }
    return blocks;
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
