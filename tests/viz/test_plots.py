"""Pictures of shapes and losses."""

import numpy as np
import pytest
from matplotlib.image import imread

from pointproj.viz import plots

SIDE = 8


def shape(seed=0):
    generator = np.random.default_rng(seed)
    points = generator.uniform(-1, 1, (50, 3)).astype(np.float32)
    return points, generator.uniform(-1, 1, SIDE**3).astype(np.float32)


@pytest.mark.parametrize("target_name", ["udf", "sdf", "occupancy", "random"])
def test_a_shape_becomes_one_wide_picture(tmp_path, target_name):
    points, values = shape()
    target = {"udf": abs(values), "occupancy": (values > 0).astype(np.float32)}.get(target_name, values)
    path = tmp_path / "shape.png"
    settings = {"name": "chair_0001", "target_name": target_name, "reference_points": points}
    plots.draw_shape(path, **settings, target=target, prediction=values)
    pixels = imread(path)
    assert pixels.shape[1] > 3 * pixels.shape[0]
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 100  # something is drawn
    assert [file.name for file in tmp_path.iterdir()] == ["shape.png"]


def drawn_slices(monkeypatch, **settings):
    drawn = {}
    monkeypatch.setattr(
        plots, "_draw_slice", lambda axis, title, values, *colours: drawn.update({title: values})
    )
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: None)
    plots.draw_shape(None, name="x", **settings)
    return drawn


def test_slices_are_cut_through_the_middle_of_the_cloud_with_z_upwards(monkeypatch):
    x, y, z = np.meshgrid(*[np.arange(SIDE)] * 3, indexing="ij")
    target = (100 * x + 10 * y + z).astype(np.float32).ravel()
    points = np.tile(np.float32([0.5, -1 + 2 * 5 / (SIDE - 1), 0.0]), (10, 1))
    drawn = drawn_slices(
        monkeypatch, target_name="udf", reference_points=points, target=target, prediction=target - 2
    )
    wanted, predicted, error = drawn.values()
    assert [title.split(" at ")[0] for title in drawn] == ["target", "prediction", "|prediction - target|"]
    assert wanted[0, 1] == 150  # x = 1, y = 5, z = 0
    assert wanted[3, 2] == 253
    assert (predicted == wanted - 2).all()
    assert (error == 2).all()


def test_occupancy_logits_are_drawn_as_probabilities(monkeypatch):
    points, _ = shape()
    target, logits = np.ones(SIDE**3, np.float32), np.full(SIDE**3, -1000.0, np.float32)
    given = {"target_name": "occupancy", "reference_points": points, "target": target}
    drawn = drawn_slices(monkeypatch, **given, prediction=logits)
    assert (drawn["prediction"] == 0).all()


def test_losses_are_drawn_beside_the_baseline(tmp_path):
    path = tmp_path / "losses.png"
    facts = {"loss_name": "udf loss", "metric_name": "mean absolute error", "baseline": 0.4}
    plots.draw_losses(path, losses=[(1, 0.5), (2, 0.25)], errors=[(0, 0.6), (2, 0.3)], **facts)
    colours = {tuple(pixel) for pixel in (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colours


def test_numbers_on_the_axes_are_written_as_they_are_said(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure))
    for scale in (1.0, 1e-3):
        curve = [(step, scale * (0.0135 + 0.02 / (1 + step))) for step in range(9)]
        facts = {"loss_name": "loss", "metric_name": "mean absolute error", "baseline": 0.05 * scale}
        plots.draw_losses(tmp_path / "losses.png", losses=curve, errors=curve, **facts)
    for figure in drawn:
        figure.canvas.draw()
        for axis in figure.axes:
            shown = [text.get_text() for text in axis.get_yticklabels(which="both") if text.get_text()]
            assert len(shown) >= 2
            assert not [text for text in shown if "10^" in text or "times" in text]
    assert "0.02" in [text.get_text() for text in drawn[0].axes[0].get_yticklabels()]
    names = [text.get_text() for text in drawn[0].axes[1].get_legend().get_texts()]
    assert names == ["network", "baseline, which needs no training"]
