"""The MLP of every point: the same for any shape of rows, and what the compiler keeps for its backward."""

from functools import partial

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from pointproj.nn.mlp import MLP


def test_rows_may_have_any_shape():
    torch.manual_seed(0)
    mlp = MLP(3, 25, 7)
    rows = torch.randn(2, 5, 3)
    expected = nn.Sequential(*mlp)(rows)
    torch.testing.assert_close(mlp(rows), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(mlp(rows.transpose(0, 1)), expected.transpose(0, 1), rtol=0, atol=1e-6)
    assert mlp(torch.randn(0, 3)).shape == (0, 7)


def test_compiled_layers_keep_no_masks():
    """On a CPU the compiler's code takes longer to write a mask than all layers to be computed."""
    kept: list[Tensor] = []

    def keep_outputs(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        (output,) = graph.graph.find_nodes(op="output")
        kept.extend(node.meta["val"] for node in output.args[0] if isinstance(node, torch.fx.Node))
        return graph

    backend = aot_autograd(
        fw_compiler=keep_outputs,
        bw_compiler=lambda graph, _: graph,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    mlp = MLP(3, 25, 7)
    torch.compile(mlp, backend=backend, fullgraph=True)(torch.randn(1, 500, 3)).sum().backward()
    assert len(kept) > 1
    assert not [of for of in kept if isinstance(of, Tensor) and of.dtype == torch.bool]
