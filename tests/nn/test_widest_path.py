import heapq

import numpy as np
import pytest
import torch

from pointproj.nn.widest_path import widest_path


def widest_by_hand(distance):
    """The widest ways from outside, one cell after the other, the widest first (Dijkstra)."""
    side = len(distance)
    widest = np.full((side,) * 3, -1.0)
    front = [(-np.inf, (x, y, z)) for x, y, z in np.ndindex(side, side, side) if {0, side - 1} & {x, y, z}]
    heapq.heapify(front)
    while front:
        width, cell = heapq.heappop(front)
        if widest[cell] >= 0:
            continue
        widest[cell] = min(-width, distance[cell])
        for axis in range(3):
            for step in (-1, 1):
                beside = list(cell)
                beside[axis] += step
                if 0 <= beside[axis] < side and widest[tuple(beside)] < 0:
                    heapq.heappush(front, (-widest[cell], tuple(beside)))
    return widest


@pytest.mark.parametrize("side", [1, 2, 7, 12])
def test_as_wide_as_the_widest_way_from_face_to_face(side):
    distance = torch.rand(3, side, side, side, generator=torch.Generator().manual_seed(side))
    widest = widest_path(distance, side**3)
    expected = np.stack([widest_by_hand(one) for one in distance.double().numpy()])
    torch.testing.assert_close(widest.double(), torch.from_numpy(expected))


def test_a_closed_box_lets_nothing_in_and_a_hole_as_much_as_it_is_wide():
    distance = torch.ones(2, 9, 9, 9)
    wall = torch.zeros(9, 9, 9, dtype=torch.bool)
    wall[2:7, 2:7, 2:7] = True
    wall[3:6, 3:6, 3:6] = False
    distance[:, wall] = 0.0
    distance[1, 4, 4, 6] = 0.25
    closed, opened = widest_path(distance, 9)
    assert not closed[3:6, 3:6, 3:6].any()
    assert (opened[3:6, 3:6, 3:6] == 0.25).all()
    assert (closed[0] == 1).all()


def test_a_way_longer_than_the_rounds_does_not_count():
    assert widest_path(torch.ones(1, 9, 9, 9), 3)[0, 4, 4, 4] == 0
    assert widest_path(torch.ones(1, 9, 9, 9), 5)[0, 4, 4, 4] == 1


def test_it_is_a_constant_to_autograd():
    distance = torch.rand(1, 4, 4, 4, requires_grad=True)
    assert not widest_path(distance, 4).requires_grad


def test_it_is_an_operator_that_torch_compiles_around():
    distance = torch.rand(2, 5, 5, 5)
    torch.library.opcheck(torch.ops.pointproj.widest_path.default, (distance, 5))
