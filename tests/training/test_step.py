import logging
import math

import pytest
import torch

from pointproj import Projector
from pointproj.config import OptimizerConfig, TargetConfig
from pointproj.training.losses import eikonal_penalty, loss_function
from pointproj.training.optimizers import build_optimizer, learning_rate, set_learning_rate
from pointproj.training.step import TrainingStep


def batches(count, sizes=(3,), device="cpu"):
    """Batches of clouds whose target is the distance to the origin; their sizes alternate."""
    generator = torch.Generator().manual_seed(0)
    query_points = torch.rand(20, 3, generator=generator)
    for number in range(count):
        clouds = torch.rand(sizes[number % len(sizes)], 30, 3, generator=generator)
        target = query_points.norm(dim=-1).expand(len(clouds), -1).clone()
        made = {"query_points": query_points, "reference_points": clouds, "target": target}
        yield {name: tensor.to(device) for name, tensor in made.items()}


def make_step(device="cpu", *, settings=None, clip=0.1, capturable=False, **options):
    torch.manual_seed(0)
    model = Projector(k=3, hidden_channels=8, context=True, backend="torch").to(device)
    settings = settings or OptimizerConfig("adamw", lr=1e-2, weight_decay=1e-3)
    optimizer = build_optimizer(settings, model.parameters(), capturable=capturable)
    return TrainingStep(model, optimizer, loss_function(TargetConfig("udf")), clip=clip, **options)


def mean_loss(step):
    """Of the finite steps since the last status."""
    return mean_of(step.take_status())


def mean_of(status):
    total, not_finite = status.read()
    count = status.steps - len(not_finite)
    return total / count if count else float("nan")


def losses(step, given):
    read = []
    for number, batch in enumerate(given):
        set_learning_rate(step.optimizer, 1e-2 / (1 + number))
        step(batch)
        read.append(mean_loss(step))
    return read


def test_steps_are_forward_loss_backward_clipping_and_adam():
    step = make_step()
    reference = make_step()
    optimizer = torch.optim.AdamW(reference.model.parameters(), lr=1e-2, weight_decay=1e-3)
    for batch in batches(3):
        step(batch)
        optimizer.zero_grad()
        predicted = reference.model(batch["query_points"], batch["reference_points"])[..., 0]
        (predicted - batch["target"]).abs().mean().backward()
        gradients = [parameter.grad for parameter in reference.model.parameters()]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        assert norm > 0.1  # so that clipping has something to do
        for gradient in gradients:
            gradient.mul_(0.1 / norm)
        optimizer.step()
    for ours, theirs in zip(step.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_loss_is_the_mean_since_the_last_read():
    single, double = make_step(), make_step()
    each = losses(single, batches(4))
    double_reads = []
    for number, batch in enumerate(batches(4)):
        set_learning_rate(double.optimizer, 1e-2 / (1 + number))
        double(batch)
        if number % 2:
            double_reads.append(mean_loss(double))
    assert double_reads == pytest.approx([(each[0] + each[1]) / 2, (each[2] + each[3]) / 2], rel=1e-6)
    assert math.isnan(mean_loss(double))


def test_autocast_runs_the_mlps_in_bfloat16():
    step = make_step(amp=True)
    seen = []
    step.model.query_mlp[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    batch = next(batches(1))
    assert step.forward(batch).dtype == torch.float32
    assert seen == [torch.bfloat16]


def test_a_model_that_does_not_compile_runs_eagerly_and_says_so(monkeypatch, caplog):
    def refuse(*args, **options):
        raise RuntimeError("no compiler here\nand much more")

    monkeypatch.setattr(torch, "compile", lambda model, **options: refuse)
    step = make_step(compile=True)
    assert step.mode == "compiled"
    with caplog.at_level(logging.WARNING):
        compiled = losses(step, batches(3))
    assert step.mode == "eager"
    assert [record.message for record in caplog.records] == [
        "torch.compile failed, so steps run without it: RuntimeError: no compiler here"
    ]
    assert compiled == losses(make_step(), batches(3))


def test_an_error_of_the_model_itself_is_not_hidden_by_compilation(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    step = make_step(compile=True)
    batch = next(batches(1))
    batch["target"] = torch.zeros(3, 7)
    with pytest.raises(RuntimeError, match="must match"):
        step(batch)


def test_a_smaller_batch_is_not_compiled_for(monkeypatch):
    compiled_for = []

    def compile(function, **options):
        def called(*args, **named):
            compiled_for.append(len(args[1]))
            return function(*args, **named)

        return called

    expected = losses(make_step(), batches(5, sizes=(3, 2, 4)))
    monkeypatch.setattr(torch, "compile", compile)
    step = make_step(compile=True)
    assert losses(step, batches(5, sizes=(3, 2, 4))) == expected
    assert compiled_for == [3, 4]  # not the one of 2, nor that of 3 after the one of 4
    assert step.mode == "compiled"


@pytest.mark.slow
def test_compiled_losses_equal_eager_ones():
    step = make_step(compile=True)
    compiled = losses(step, batches(5))
    assert step.mode == "compiled"
    assert compiled == pytest.approx(losses(make_step(), batches(5)), rel=1e-5)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (12, 0.5), (19, 0.5 * (1 + math.cos(math.pi * 15 / 16)))],
)
def test_cosine_follows_a_linear_warmup_and_a_constant_rate_stays(step, expected):
    settings = OptimizerConfig("adam", lr=2.0, warmup=0.2, schedule="cosine")
    assert learning_rate(settings, step, 20) == pytest.approx(2.0 * expected)
    assert learning_rate(OptimizerConfig("adam", lr=2.0), step, 20) == 2.0


def test_losses_are_those_the_targets_ask_for():
    prediction, target = torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 0.0]])
    assert loss_function(TargetConfig("udf"))(prediction, target).item() == 1.5
    assert loss_function(TargetConfig("sdf"))(prediction, target).item() == 1.5
    assert loss_function(TargetConfig("random"))(prediction, target).item() == 2.5
    expected = (math.log(2) + math.log(1 + math.exp(2))) / 2
    assert loss_function(TargetConfig("occupancy"))(prediction, target).item() == pytest.approx(expected)


def test_losses_by_name():
    prediction, target = torch.tensor([[0.0, 2.0]]), torch.tensor([[0.005, 0.0]])
    losses = {
        name: loss_function(TargetConfig("sdf", loss=name))(prediction, target).item()
        for name in ("absolute", "smooth", "squared")
    }
    assert losses["absolute"] == pytest.approx(2.005 / 2)
    assert losses["smooth"] == pytest.approx((0.005**2 / 0.02 + 2 - 0.005) / 2)
    assert losses["squared"] == pytest.approx((0.005**2 + 4) / 2)
    label = torch.tensor([[1.0, 0.0]])
    of_probability = loss_function(TargetConfig("occupancy", loss="absolute"))(prediction, label).item()
    assert of_probability == pytest.approx((0.5 + 1 / (1 + math.exp(-2))) / 2)


def test_overlap_loss_counts_every_shape_the_same():
    label = torch.zeros(2, 100)
    label[0, :50] = label[1, :2] = 1
    wrong = torch.where(label > 0.5, 20.0, -20.0)
    wrong[0, 25:50] = wrong[1, 1] = -20.0  # half of what is inside is missed, in both
    loss = loss_function(TargetConfig("occupancy", loss="overlap"))
    cross_entropy = 20.0 * 26 / 200
    overlap = ((25 + 1) / (50 + 1) + (1 + 1) / (2 + 1)) / 2
    assert loss(wrong, label).item() == pytest.approx(cross_entropy + 1 - overlap, rel=1e-5)
    assert loss(torch.full((1, 9), -20.0), torch.zeros(1, 9)).item() == pytest.approx(0.0, abs=1e-5)


def test_eikonal_penalty_of_a_field_with_a_known_gradient():
    query_points = torch.randn(2, 5, 3, requires_grad=True)
    slope = torch.tensor([1.0, 2.0, 2.0], requires_grad=True)  # of length 3
    penalty = eikonal_penalty(query_points @ slope, query_points)
    assert penalty.item() == pytest.approx(4.0)
    penalty.backward()
    torch.testing.assert_close(slope.grad, 2 * 2 * slope.detach() / 3)


def test_a_step_with_eikonal_term_brings_gradients_nearer_to_length_1():
    plain, regular = (make_step(eikonal=weight) for weight in (0.0, 10.0))
    (given,) = batches(1)
    for _ in range(20):
        plain(given)
        regular(given)
    penalties = []
    for step in (plain, regular):
        query_points = given["query_points"].expand(3, -1, -1).clone().requires_grad_()
        prediction = step.forward({**given, "query_points": query_points})
        penalties.append(eikonal_penalty(prediction, query_points).item())
    assert penalties[1] < 0.9 * penalties[0]


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [None, 0.1])
def test_captured_losses_equal_eager_ones_in_every_batch_size(clip):
    captured = make_step("cuda", compile=True, capturable=True, clip=clip)
    sizes = (3, 3, 2)
    replayed = losses(captured, batches(24, sizes, "cuda"))
    assert captured.mode == "captured"
    eager = losses(make_step("cuda", clip=clip), batches(24, sizes, "cuda"))
    assert replayed == pytest.approx(eager, rel=1e-4)


def test_a_note_is_of_its_moment_whatever_steps_follow(device):
    step, other = make_step(device), make_step(device)
    *given, later = batches(5, device=device)
    bad = {**given[0], "target": given[0]["target"] * float("nan")}
    for batch in (*given[:3], bad, given[3]):
        step(batch)
        other(batch)
    status = step.take_status()
    step(later)
    step(bad)
    assert status.read()[1] == [1]
    assert mean_of(status) == mean_loss(other)
    other(later)
    status = step.take_status()
    assert status.read()[1] == [0]
    assert mean_of(status) == mean_loss(other)


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_goes_on_without(caplog):
    step = make_step("cuda", compile=True, capturable=True)
    plain = step.optimizer.step

    def waits_for_the_device():
        step.parameters[0].sum().item()
        plain()

    step.optimizer.step = waits_for_the_device
    with caplog.at_level(logging.WARNING):
        taken = losses(step, batches(8, device="cuda"))
    assert step.mode == "compiled"
    assert any("no CUDA graph of the step" in record.message for record in caplog.records)
    assert taken == pytest.approx(losses(make_step("cuda"), batches(8, device="cuda")), rel=1e-4)


@pytest.mark.gpu
def test_a_captured_step_never_waits_for_the_device():
    step = make_step("cuda", compile=True, capturable=True)
    given = list(batches(8, device="cuda"))
    for batch in given[:5]:
        step(batch)
    assert step.mode == "captured"
    step.take_status()
    statuses = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, batch in enumerate(given[5:]):
            set_learning_rate(step.optimizer, 1e-3 / (1 + number))
            step(batch)
            statuses.append(step.take_status())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [status.steps for status in statuses] == [1, 1, 1]
    assert all(math.isfinite(mean_of(status)) for status in statuses)
