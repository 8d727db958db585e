"""Counting in, and knowing who was last: how a kernel goes on with what all its threads have written."""

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
    """Count a point in; true for one of them once all ``size`` have come: it sees what they all wrote."""
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
