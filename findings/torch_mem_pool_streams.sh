#!/usr/bin/env bash
# Memory that another stream has used (record_stream), freed and requested again inside torch.cuda.use_mem_pool. Needs a GPU.
# Expected: it is reused once the other stream is done, as outside of the pool.
# Seen: nothing of it is reused before the block ends, since torch puts off the events of such memory while any pool is in use, as
# during a capture. Six times 64 MiB reserve 384 MiB instead of 64.
set -euo pipefail
command -v nvidia-smi > /dev/null || { echo "no GPU here: not run"; exit 0; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.11.0
"$work/venv/bin/python" - <<'PYTHON'
from contextlib import nullcontext

import torch

MIB = 2**20


def reserved(pool):
    """MiB that six tensors of 64 MiB reserve, one after the other."""
    other = torch.cuda.Stream()
    before = torch.cuda.memory_reserved()
    with nullcontext() if pool is None else torch.cuda.use_mem_pool(pool):
        for _ in range(6):
            tensor = torch.ones(16 * MIB, device="cuda")
            tensor.record_stream(other)
            del tensor
            torch.cuda.synchronize()
    return (torch.cuda.memory_reserved() - before) // MIB


expected, seen = reserved(None), reserved(torch.cuda.MemPool())
print(f"torch {torch.__version__}: MiB reserved in a pool: seen {seen}, expected {expected}, as outside of it")
raise SystemExit(not (expected == 64 and seen == 384))
PYTHON
