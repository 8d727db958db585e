"""Batches made ahead are those that are made when they are asked for."""

import torch

from pointproj.data.transfer import made_ahead


def test_batches_made_ahead_are_those_that_are_made_when_asked_for(device):
    size = 1000 if device == "cuda" else 50
    table = torch.rand(size, size, device=device)

    def made_there():
        for number in range(6):
            long = table
            for _ in range(20):  # so long that the batch is used while it would still be in the making
                long = long @ table / (size / 2)
            yield {"sum": (long[:3] + number).clone(), "name": [str(number)]}

    expected = [batch["sum"].clone() for batch in made_there()]
    for number, batch in enumerate(made_ahead(made_there(), torch.device(device))):
        assert batch["name"] == [str(number)]
        assert torch.equal(batch["sum"], expected[number])
    assert number == 5
