import pytest
import torch

from pointproj.training import report
from pointproj.training.validation import (
    Evaluation,
    MeshErrors,
    baseline_name,
    evaluate,
    field_errors,
    untrained_predictor,
)


def batch(target, clouds=None, query_points=None):
    target = torch.as_tensor(target)
    return {
        "target": target,
        "name": [f"mesh_{i}" for i in range(len(target))],
        "class_name": ["table" if i % 2 else "chair" for i in range(len(target))],
        "reference_points": clouds,
        "query_points": query_points,
    }


@pytest.mark.parametrize(
    ("kind", "predicted", "target", "expected"),
    [
        ("udf", [[1.0, 2.0], [0.0, 0.0]], [[0.0, 4.0], [0.0, 1.0]], {"mean_absolute_error": [1.5, 0.5]}),
        (
            *("sdf", [[-1.0, 1.0, 0.5, 0.5]], [[-2.0, 1.0, -0.5, 0.5]]),
            {"mean_absolute_error": [0.5], "sign_accuracy": [0.75]},
        ),
        (
            *("occupancy", [[3.0, 3.0, -3.0, -3.0], [-1.0] * 4], [[1.0, 0.0, 1.0, 0.0], [0.0] * 4]),
            {"error_rate": [0.5, 0.0], "iou": [1 / 3, 1.0]},
        ),
        ("random", [[0.0, 0.0]], [[1.0, 3.0]], {"mean_squared_error": [5.0]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_of_each_target(kind, predicted, target, expected):
    errors = field_errors(kind, torch.tensor(predicted), torch.tensor(target))
    for name, values in expected.items():
        assert torch.equal(errors[name], torch.tensor(values)), name


def test_every_mesh_counts_the_same_however_batches_fall():
    batches = [batch([[1.0, 1.0], [2.0, 2.0]]), batch([[6.0, 6.0]])]
    evaluation = evaluate(lambda inputs: torch.zeros_like(inputs["target"]), batches, "udf")
    assert evaluation.error == 3.0
    assert [mesh.errors["mean_absolute_error"] for mesh in evaluation.meshes] == [1.0, 2.0, 6.0]
    by_class = evaluation.by_class()
    assert (list(by_class), by_class["chair"].error) == (["chair", "table"], 3.5)
    assert by_class["table"].error == 2.0


def test_nothing_to_evaluate_is_an_error():
    with pytest.raises(ValueError, match="at least one batch"):
        evaluate(lambda inputs: inputs["target"], [], "udf")


def test_untrained_distance_is_to_the_nearest_sampled_point():
    clouds = torch.tensor([[[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]], [[0.0, 3.0, 0.0], [0.0, 0.0, 4.0]]])
    query_points = torch.tensor([[0.0, 0.0, 0.0], [0.75, 0.0, 0.0]])
    inputs = batch([[0.0, 0.0], [0.0, 0.0]], clouds, query_points)
    expected = torch.tensor([[0.0, 0.25], [3.0, (9 + 0.75**2) ** 0.5]])
    for target_name in ("udf", "sdf"):
        torch.testing.assert_close(untrained_predictor(target_name, "torch")(inputs), expected)


def test_untrained_signs_follow_the_nearest_normal_if_the_model_sees_normals():
    clouds = torch.tensor([[[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]]])
    query_points = torch.tensor([[0.0, 0.0, 0.5], [0.0, 0.0, 3.0], [0.0, 0.0, -0.75]])
    inputs = batch([[0.0, 0.0, 0.0]], clouds, query_points) | {"normals": clouds}
    signed = untrained_predictor("sdf", "torch", normals=True)(inputs)
    torch.testing.assert_close(signed, torch.tensor([[-0.5, 2.0, -0.25]]))
    labels = untrained_predictor("occupancy", "torch", normals=True)(inputs) > 0
    assert labels.tolist() == [[True, False, True]]


def test_untrained_occupancy_takes_everything_for_outside():
    clouds, query_points = torch.zeros(1, 1, 3), torch.rand(4, 3)
    inputs = batch([[1.0, 0.0, 0.0, 0.0]], clouds, query_points)
    evaluation = evaluate(untrained_predictor("occupancy", "torch"), [inputs], "occupancy")
    assert evaluation.means() == {"error_rate": 0.25, "iou": 0.0}


def evaluation_of(*errors):
    meshes = tuple(
        MeshErrors(f"m{i}", name, {"mean_absolute_error": value}) for i, (name, value) in enumerate(errors)
    )
    return Evaluation("mean_absolute_error", meshes)


def test_comparison_and_table_hold_both_errors_by_class():
    trained = evaluation_of(("bed", 0.5), ("bed", 1.5), ("desk", 4.0))
    baseline = evaluation_of(("bed", 2.0), ("bed", 2.0), ("desk", 8.0))
    compared = report.comparison(trained, baseline, before=7.0)
    assert (compared["metric_value"], compared["baseline"], compared["ratio"]) == (2.0, 4.0, 0.5)
    assert compared["before_training"] == 7.0
    assert compared["classes"]["bed"] == {"meshes": 2, "metric_value": 1.0, "baseline": 2.0, "ratio": 0.5}
    text = report.text(compared, "udf", "3 unseen meshes", baseline_name("udf"))
    rows = {line.split()[1]: line.split() for line in text.splitlines() if line.startswith("| ")}
    assert rows["bed"][3::2] == ["2", "1.00000", "2.00000", "0.50"]
    assert rows["all"][3::2] == ["3", "2.00000", "4.00000", "0.50"]


def test_a_perfect_baseline_has_no_ratio():
    compared = report.comparison(evaluation_of(("bed", 0.5)), evaluation_of(("bed", 0.0)), before=1.0)
    assert compared["ratio"] is None
    assert "0.50000" in report.text(compared, "udf", "1 unseen mesh", "zero")
