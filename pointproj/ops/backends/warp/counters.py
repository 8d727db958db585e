"""Counters in global memory: ranks of arrival, and how a kernel goes on with what all its threads wrote."""

import warp as wp

# Threads of a warp that meet in a place count together: a dense cluster is one address for millions.
_COUNT_TOGETHER = """
    const unsigned active = __activemask();
    __syncwarp(active);  // what they wrote counts as written before the first of them counts them in
    const unsigned same = __match_any_sync(active, place);
    const int lane = threadIdx.x & 31, leader = __ffs(same) - 1;
    int before = 0;
    if (lane == leader) before = atomicAdd(counters.data + place, __popc(same));
"""


@wp.func_native(f"""
#if defined(__CUDA_ARCH__)
    {_COUNT_TOGETHER}
    return __shfl_sync(active, before, leader) + __popc(same & ((1u << lane) - 1u));
#else
    return counters.data[place]++;
#endif
""")
def arrive(counters: wp.array(dtype=wp.int32), place: int) -> int:
    """Count a point in; returns how many came before."""
    ...


@wp.func_native(f"""
#if defined(__CUDA_ARCH__)
    __threadfence();
    {_COUNT_TOGETHER}
    __threadfence();
    return lane == leader && before + __popc(same) == size;
#else
    return ++counters.data[place] == size;
#endif
""")
def completes(counters: wp.array(dtype=wp.int32), place: int, size: int) -> bool:
    """Count a point; true for the last of ``size``, which can read what all of them wrote."""
    ...


_FRESH = """
    const char* first = reinterpret_cast<const char*>(table.data) + row * table.strides[0];
    return reinterpret_cast<const volatile {kind}*>(first)[column];
"""


@wp.func_native(_FRESH.format(kind="int"))
def fresh(table: wp.array2d(dtype=wp.int32), row: int, column: int) -> int:
    """An entry as other threads of this launch have left it, not as a cache remembers it."""
    ...


@wp.func_native(_FRESH.format(kind="float"))
def fresh(table: wp.array2d(dtype=wp.float32), row: int, column: int) -> wp.float32: ...


@wp.func_native(_FRESH.format(kind="double"))
def fresh(table: wp.array2d(dtype=wp.float64), row: int, column: int) -> wp.float64: ...


# All threads of a block call these together. Blocks take tickets when they start, so none waits for a
# block that cannot start.
_TAKE_TICKET = """
#if defined(__CUDA_ARCH__)
    __shared__ int ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(tickets.data, 1);
    __syncthreads();
    return ticket * blockDim.x + threadIdx.x;
#else
    return tickets.data[0]++;
#endif
"""
_FINISH_TICKET = """
#if defined(__CUDA_ARCH__)
    __syncthreads();
    __threadfence();
    if (threadIdx.x == 0) atomicAdd(tickets.data + 1, blockDim.x);
#endif
"""
_AWAIT_TICKETS = """
#if defined(__CUDA_ARCH__)
    if (threadIdx.x == 0) {
        while (*reinterpret_cast<volatile int*>(tickets.data + 1) < threads) {}
    }
    __syncthreads();
    __threadfence();
#endif
"""


@wp.func_native(_TAKE_TICKET)
def take_ticket(tickets: wp.array(dtype=wp.int32)) -> int:
    """Number of this thread in the order in which blocks start; ``tickets`` are two counters, 0 at first."""
    ...


@wp.func_native(_FINISH_TICKET)
def finish_ticket(tickets: wp.array(dtype=wp.int32)):
    """Say that the threads of this block have done their part."""
    ...


@wp.func_native(_AWAIT_TICKETS)
def await_tickets(tickets: wp.array(dtype=wp.int32), threads: int):
    """Wait until so many threads, all before those of this block, have done theirs; see what they wrote."""
    ...
