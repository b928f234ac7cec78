# SPDX-License-Identifier: Apache-2.0
"""Layers under torch.fx: they are module calls in the graph, like those of torch.nn."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import fx, nn

import normscope


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        normscope.BatchNorm2d(3, scope="slices:2"),
        nn.Sequential(normscope.BatchNormAct2d(3, activation="relu", scope="local")),
    )


def batch() -> torch.Tensor:
    return torch.randn(4, 2, 6, 6)


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_is_a_module_call_that_trains_and_evaluates(*, training: bool) -> None:
    net, x = model().train(training), batch()
    alone = copy.deepcopy(net)

    traced = fx.symbolic_trace(net)

    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert calls == ["0", "1", "2.0"]
    assert {node.op for node in traced.graph.nodes} == {"placeholder", "call_module", "output"}
    # Tracing has changed nothing.
    assert [layer.elements_seen for layer in (net[1], net[2][0])] == [0, 0]  # type: ignore[index]
    assert all(map(torch.equal, net.state_dict().values(), alone.state_dict().values()))
    pickle.loads(pickle.dumps(net))
    for mode in (True, False):
        assert torch.equal(traced.train(mode)(x), alone.train(mode)(x))
    assert net[1].elements_seen == alone[1].elements_seen > 0  # type: ignore[index]
    assert all(map(torch.equal, net.state_dict().values(), alone.state_dict().values()))


def test_a_residual_is_an_argument_of_the_call() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = normscope.BatchNormAct2d(2, scope="local")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.norm(x, residual=x.sin())
            return y

    block, x = Block(), batch()
    traced = fx.symbolic_trace(copy.deepcopy(block))

    assert torch.equal(traced(x), block(x))


class Doubled(normscope.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override] # no masks
        return 2 * super().forward(input)


class WholeLayers(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, normscope.BatchNorm) or super().is_leaf_module(
            m, module_qualified_name
        )


def test_a_layer_that_overrides_forward_can_be_traced_as_a_whole() -> None:
    net = nn.Sequential(Doubled(2, scope="local"))
    x = batch()

    traced = fx.GraphModule(net, WholeLayers().trace(net))

    assert torch.equal(traced(x), net(x))
