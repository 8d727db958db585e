"""Scans: every point is the first of the surface that its camera meets; what is enclosed is never seen."""

import numpy as np
import torch
import warp as wp

from pointproj.data.clouds import Sampling
from pointproj.data.surface_draws import draw_on_surfaces
from pointproj.geometry.meshes import Mesh
from pointproj.geometry.sampling import SurfaceSampler
from pointproj.geometry.scanning import CAMERA_DISTANCE, CAMERAS, scan
from pointproj.geometry.warp_meshes import on_device, search_mesh
from tests.data.test_device_sampler import joined, words_of
from tests.geometry.test_interior import box

HALF, INNER = np.array([0.9, 0.5, 0.7]), np.array([0.4, 0.3, 0.2])


def nested():
    """A box within a box."""
    outer, inner = box(HALF), box(INNER)
    faces = np.concatenate([inner.faces, outer.faces + len(inner.vertices)])
    return SurfaceSampler(np.concatenate([inner.vertices, outer.vertices]), faces.astype(np.int32))


def assert_seen(points, normals, sensors, cameras):
    """On the outer box, on sides that face the camera of each point, which is where the sensor is."""
    towards = cameras[np.arange(len(points)) % CAMERAS] - points
    towards /= np.linalg.norm(towards, axis=1, keepdims=True)
    np.testing.assert_allclose(sensors, towards, atol=1e-5)
    assert np.abs((np.abs(points) / HALF).max(axis=1) - 1).max() < 1e-5
    side = np.abs(points / HALF).argmax(axis=1)
    rows = np.arange(len(points))
    outwards = np.zeros_like(points)
    outwards[rows, side] = np.sign(points[rows, side])
    np.testing.assert_allclose(np.abs((normals * outwards).sum(axis=1)), 1, atol=1e-5)
    edge = np.sort(np.abs(points) / HALF, axis=1)[:, 1] > 1 - 1e-4  # there the side is not certain
    facing = ((cameras[rows % CAMERAS] - points) * outwards).sum(axis=1) > -1e-5
    assert facing[~edge].all()


def test_a_scan_on_the_host_holds_what_cameras_see():
    cameras = np.random.default_rng(3).standard_normal((CAMERAS, 3))
    cameras *= CAMERA_DISTANCE / np.linalg.norm(cameras, axis=1, keepdims=True)
    points, normals, sensors = scan(nested(), 1001, np.random.default_rng(3))
    assert points.dtype == normals.dtype == sensors.dtype == np.float32
    assert_seen(points, normals, sensors, cameras)
    again = Sampling("sensors", 1001).draw(nested(), np.random.default_rng(3))
    np.testing.assert_array_equal(again["reference_points"], points)
    np.testing.assert_array_equal(again["sensors"], sensors)
    unknown = Sampling("scan", 1001).draw(nested(), np.random.default_rng(3))
    assert set(unknown) == {"reference_points", "normals"}
    np.testing.assert_array_equal(unknown["reference_points"], points)
    assert not np.array_equal(scan(nested(), 1001, np.random.default_rng(4))[0], points)


def test_a_scan_on_the_device_holds_what_cameras_see_fixed_by_seed_epoch_and_shape(device):
    samplers = [nested(), SurfaceSampler(*(getattr(box(HALF), key) for key in ("vertices", "faces")))]
    with on_device(device):
        meshes = [search_mesh(Mesh(each.vertices, each.faces, "box")) for each in samplers]
        wp.synchronize_device(device)
    ids = torch.tensor([mesh.id for mesh in meshes], device=device)
    drawn = torch.tensor([[1, 5, 0], [0, 7, 3], [0, 8, 3]], device=device)
    points, *known = draw_on_surfaces(*joined(samplers, device), ids, drawn, 11, 501)
    for cloud, (identity, epoch) in enumerate([(5, 0), (7, 3), (8, 3)]):
        words = words_of([2**30 + camera for camera in range(CAMERAS)], identity, epoch, 11) / 2**32
        height, angle = 2 * words[:, 0] - 1, 2 * np.pi * words[:, 1]
        across = np.sqrt(1 - height**2)[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        cameras = CAMERA_DISTANCE * np.concatenate([across, height[:, None]], axis=1)
        assert_seen(points[cloud].cpu().numpy(), *(each[cloud].cpu().numpy() for each in known), cameras)
    alone, *_ = draw_on_surfaces(*joined(samplers, device), ids, drawn[1:2], 11, 501)
    assert torch.equal(alone[0], points[1])
    assert not torch.equal(points[1], points[2])
    *_, nowhere = draw_on_surfaces(*joined(samplers, device), None, drawn, 11, 501)
    assert not nowhere.any()
