"""Adam with one count for all parameters: as torch's own bit for bit, also after a state was loaded."""

import copy
import subprocess
import sys
import textwrap

import pytest
import torch

from pointproj.config import OptimizerConfig
from pointproj.training import checkpoint
from pointproj.training.optimizers import build_optimizer

SHAPES = [(7, 3), (7,), (1, 7), ()]


def parameters(device):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]


def give_gradients(device, number, *groups):
    generator = torch.Generator().manual_seed(number)
    gradients = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
    for group in groups:
        for parameter, gradient in zip(group, gradients, strict=True):
            parameter.grad = gradient.clone()


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(("name", "decay"), [("adam", 0.0), ("adam", 0.1), ("adamw", 0.1)])
def test_steps_are_those_of_torch(device, capturable, name, decay):
    ours, theirs = parameters(device), parameters(device)
    settings = OptimizerConfig(name=name, lr=1e-2, weight_decay=decay, betas=(0.8, 0.99))
    optimizer = build_optimizer(settings, ours, capturable=capturable)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    reference = kind(theirs, lr=1e-2, weight_decay=decay, betas=(0.8, 0.99), fused=True)
    optimizer.found_inf = torch.zeros((), device=device)
    for number in range(4):
        give_gradients(device, number, ours, theirs)
        optimizer.found_inf.fill_(number == 1)
        optimizer.step()
        if number != 1:
            reference.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[one][key], reference.state[other][key]), key


def test_a_state_of_another_optimizer_is_continued():
    ours, theirs = parameters("cpu"), parameters("cpu")
    reference = torch.optim.Adam(theirs, lr=1e-2)
    optimizer = build_optimizer(OptimizerConfig(name="adam", lr=1e-2), ours)
    for number in range(2):
        give_gradients("cpu", number, theirs)
        reference.step()
    checkpoint.load_optimizer(optimizer, copy.deepcopy(reference.state_dict()))
    with torch.no_grad():
        for one, other in zip(ours, theirs, strict=True):
            one.copy_(other)
    give_gradients("cpu", 2, ours, theirs)
    optimizer.step()
    reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
        assert optimizer.state[one]["step"] == 3


def test_an_optimizer_does_without_the_compiler():
    program = """
        import sys, torch
        from pointproj.config import OptimizerConfig
        from pointproj.training.optimizers import build_optimizer
        layer = torch.nn.Linear(3, 2)
        optimizer = build_optimizer(OptimizerConfig("adam", lr=0.1), layer.parameters())
        optimizer.zero_grad(set_to_none=True)
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        print("torch._dynamo" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert answer.stdout == "False\n", answer.stderr
