"""Many calls, in several processes: what ``python -m tests.differential`` does."""

import argparse
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable

import torch

import tests.differential
from pointproj.ops.backends import BackendUnavailable
from pointproj.ops.registry import resolve
from pointproj.ops.specification.reference import KERNELS
from tests.differential.check import Expected, check
from tests.differential.draw import Call, draw

CHUNK = 20  # cases that a process does before it asks for more


def run(
    numbers: range,
    seed: int,
    kernels: tuple[str, ...],
    backends: list[str],
    device: str,
    until: float,
    changed: Callable[[Call], Call] | None = None,
) -> dict[str, dict]:
    """Check these cases, as ``changed`` returns them; what came of them by backend."""
    tallies = {name: Counter() for name in backends}
    failures = {name: [] for name in backends}
    for number in numbers:
        if time.time() > until:
            break
        call = draw(seed, number, kernels=kernels)
        expected = Expected.of(changed(call) if changed else call)
        for name in backends:
            outcome = check(expected, name, device)
            tallies[name].update(cases=1, tensors=outcome.compared, beyond=outcome.beyond)
            if outcome.differences:
                failures[name].append((number, outcome.differences, str(call)))
    return {name: {"counts": tallies[name], "failures": failures[name]} for name in backends}


def _run(job: tuple) -> dict[str, dict]:
    return run(*job)


def _start() -> None:
    torch.set_num_threads(1)


def main() -> None:
    """Check cases on backends; one line a backend, one for each case that differs."""
    parser = argparse.ArgumentParser("python -m tests.differential", description=tests.differential.__doc__)
    parser.add_argument("--backend", nargs="+", default=["native"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kernels", nargs="+", default=list(KERNELS), choices=KERNELS, help="fewer to compile"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no case is begun")
    parser.add_argument("--verbose", action="store_true", help="describe the calls that differ")
    given = parser.parse_args()
    for name in given.backend:
        try:
            resolve(name, given.device, "radius")
        except BackendUnavailable as reason:
            raise SystemExit(str(reason)) from None
    started = time.time()
    numbers = range(given.first, given.first + given.cases)
    parts = [numbers[i : i + CHUNK] for i in range(0, len(numbers), CHUNK)]
    jobs = [
        (part, given.seed, tuple(given.kernels), given.backend, given.device, started + given.seconds)
        for part in parts
    ]
    totals = {name: Counter() for name in given.backend}
    failed = Counter()
    with multiprocessing.get_context("spawn").Pool(given.jobs, _start) as pool:
        for result in pool.imap(_run, jobs):
            for name, of in result.items():
                totals[name].update(of["counts"])
                failed[name] += len(of["failures"])
                for number, differences, words in of["failures"]:
                    again = f"--backend {name} --device {given.device} --seed {given.seed}"
                    again += f" --first {number} --cases 1 --kernels {' '.join(given.kernels)}"
                    print(f"python -m tests.differential {again}  # {'; '.join(differences)}", flush=True)
                    if given.verbose:
                        print(f"    {words}", flush=True)
    for name, counts in totals.items():
        print(
            f"{name} on {given.device}: {counts['cases']} cases from {given.first}, seed {given.seed}: "
            f"{counts['tensors']} tensors compared, of which {counts['beyond']} not, being beyond their "
            f"dtype in plain torch; {failed[name]} cases differ; {time.time() - started:.0f} s",
            flush=True,
        )
    raise SystemExit(any(failed.values()))
