"""PhysicsNeMo's point transformer blocks with our attention: the same results and gradients."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from pointproj.compat import physicsnemo_layers
from pointproj.compat.physicsnemo_layers import replace
from tests.compat.physicsnemo_library import import_physicsnemo

QUERIES, KEYS, DIM = 53, 37, 24


@pytest.fixture(scope="module")
def blocks():
    import_physicsnemo()
    from physicsnemo.nn.module import point_transformer_attention as library

    return library


class Model(nn.Module):
    """Both blocks: with conditioning and clouds of a batch, dilated, and with given neighbours."""

    def __init__(self, blocks) -> None:
        super().__init__()
        of = {"dim": DIM, "num_heads": 4, "neighbor_k": 5, "mlp_ratio": 2, "dropout": 0.0, "use_te": False}
        self.local = blocks.LocalPointTransformerBlock(dilation=2, conditioning_dim=7, **of)
        self.given = blocks.LocalPointTransformerBlock(dilation=1, **of)
        self.cross = blocks.LocalTokenCrossAttentionBlock(adaln_zero=True, **of)

    def forward(self, x: Tensor, coords: Tensor, context: Tensor, places: Tensor) -> Tensor:
        clouds = (torch.arange(QUERIES) >= 20).long()
        x = self.local(x, coords, cond=torch.linspace(-1, 1, 7).to(x)[None], batch_ids=clouds)
        rows = torch.arange(QUERIES)[:, None] + torch.arange(5) - 3
        x = self.given(x, coords, precomputed_idx=rows.remainder(QUERIES))
        context_clouds = (torch.arange(KEYS) >= 9).long()
        return self.cross(
            x, coords, context, places, query_batch_ids=clouds, context_batch_ids=context_clouds
        )


def test_replaced_blocks_have_the_same_results_and_gradients(blocks):
    torch.manual_seed(0)
    model = Model(blocks).double()
    ours = copy.deepcopy(model)
    found = replace(ours)
    assert found.replaced == {
        "local": "LocalPointTransformerBlock",
        "given": "LocalPointTransformerBlock",
        "cross": "LocalTokenCrossAttentionBlock",
    }
    assert not found.left
    assert [*ours.state_dict()] == [*model.state_dict()]
    ours = pickle.loads(pickle.dumps(ours))  # its classes are found by name
    assert type(ours.local) is physicsnemo_layers.LocalPointTransformerBlock
    given = [torch.randn(QUERIES, DIM), torch.rand(QUERIES, 3), torch.randn(KEYS, DIM), torch.rand(KEYS, 3)]
    results = []
    for of in (model, ours):
        inputs = [tensor.double().requires_grad_() for tensor in given]
        named = dict(zip(("x", "coords", "context", "places"), inputs, strict=True)) | dict(
            of.named_parameters()
        )
        out = of(*inputs)
        gradients = torch.autograd.grad(out.square().sum(), [*named.values()], allow_unused=True)
        results.append({"out": out} | dict(zip(named, gradients, strict=True)))
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-9, atol=1e-10, msg=name)


def test_what_cannot_be_replaced_says_why(blocks):
    model = Model(blocks)
    model.local.attn_proj.layers[1] = nn.Softplus()
    assert "attn_proj cannot run on pairs" in replace(model).left["local"]
    assert type(model.local) is blocks.LocalPointTransformerBlock
    with pytest.raises(ValueError, match="expected a model with some of LocalPointTransformerBlock"):
        replace(nn.Linear(1, 1))
