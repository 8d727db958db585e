#!/usr/bin/env bash
# A CUDA graph captured in a torch.cuda.MemPool whose memory RMM allocates, after RMM has freed memory on another stream. Needs a GPU.
# Expected: it is captured, with each of RMM's memory resources, as in a pool of torch's own.
# Seen: with PoolMemoryResource the capture fails (cudaErrorStreamCaptureIsolation), since RMM lets the captured stream wait for the
# other. CudaMemoryResource works. If the pool has the memory from an ordinary run on the same stream before, both work.
set -euo pipefail
command -v nvidia-smi > /dev/null || { echo "no GPU here: not run"; exit 0; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.11.0 rmm-cu13==26.6.0
cat > "$work/capture.py" <<'PYTHON'
import os
import sys

import rmm
import torch
from rmm.allocators.torch import rmm_torch_allocator


def captured(resource, *, run_before):
    """The result of a replay, or the first line of what ended the capture."""
    rmm.mr.set_current_device_resource(resource)
    rmm.DeviceBuffer(size=2**26)  # allocated and freed
    pool, side = torch.cuda.MemPool(rmm_torch_allocator.allocator()), torch.cuda.Stream()
    numbers = torch.ones(2**22, device="cuda")
    torch.cuda.synchronize()
    if run_before:
        with torch.cuda.use_mem_pool(pool), torch.cuda.stream(side):
            numbers * 2
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool.id, stream=side):
            doubled = numbers * 2
        graph.replay()
        return f"right {doubled.sum().item() == 2**23}"
    except Exception as error:
        return f"failed: {str(error.__context__ or error).splitlines()[0][-60:]}"


upstream = rmm.mr.CudaMemoryResource()
resource = {"cuda": upstream, "pool": rmm.mr.PoolMemoryResource(upstream, 2**28)}[sys.argv[1]]
print(captured(resource, run_before=sys.argv[2] == "before"), flush=True)
os._exit(0)  # after a failed capture torch cannot delete its pools
PYTHON
run() { "$work/venv/bin/python" "$work/capture.py" "$@"; }
cuda=$(run cuda cold) pool=$(run pool cold) before=$(run pool before)
echo "torch 2.11.0, rmm 26.6.0: PoolMemoryResource: seen '$pool', expected '$cuda', as CudaMemoryResource; after a run: '$before'"
[[ $pool == failed* && $cuda == "right True" && $before == "right True" ]]
