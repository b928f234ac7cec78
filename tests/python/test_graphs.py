# SPDX-License-Identifier: Apache-2.0
"""Compiled graphs: the bits of eager mode, and exchanges in a fixed order without repetition."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import distributed, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.effects import with_effects

import normscope

pytestmark = [pytest.mark.on_device, pytest.mark.usefixtures("quiet_compiler")]


class Residual(nn.Module):
    """A network in which two layers do not depend on each other."""

    def __init__(self, scope: str = "local") -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.path = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.shortcut = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        normscope.convert(self, scope=scope)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, 3, H, W] to [N, 8, H, W]."""
        x = self.stem(x)
        return torch.relu(self.path(x) + self.shortcut(x))


def step(net: nn.Module, call: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """Return all results of a training step."""
    x = x.clone().requires_grad_()
    y = call(x)
    torch.autograd.backward(y.float().square().sum())
    gradients = [x.grad, *(p.grad for p in net.parameters())]
    return [
        t.detach().clone() for t in (y, *gradients, *net.state_dict().values()) if t is not None
    ]


# This compiler runs the operations of the graph one by one, and rounds each as in eager mode.
BIT_TRUE: dict[str, Any] = {"backend": "aot_eager"}


@pytest.mark.own_kernels
def test_a_graph_of_an_op_with_an_activation_has_its_gradients() -> None:
    x = torch.randn(4, 5, 6)
    gradients = []
    for graph in ({}, {"graph": "fused test"}):

        def run(x: torch.Tensor, graph: dict[str, str] = graph) -> torch.Tensor:
            op = torch.ops.normscope.batch_norm_forward
            none = [None] * 5
            arguments: tuple[Any, ...] = (*none, 0.1, 1e-5, [], "pooled", "local", "", "")
            y: torch.Tensor = op(x, *arguments, activation="relu", **graph)[0]
            return y

        call = torch.compile(run, fullgraph=True, **BIT_TRUE) if graph else run
        leaf = x.clone().requires_grad_()
        (call(leaf) + 1).square().sum().backward()
        gradients.append(leaf.grad)

    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.own_kernels
def test_exact_graphs_have_the_bits_of_fused_sequences() -> None:
    net = normscope.convert(nn.Sequential(nn.BatchNorm2d(5), nn.SiLU()), "local", fuse=True)
    ours, theirs = copy.deepcopy(net), copy.deepcopy(net)
    x = torch.randn(4, 5, 6, 6) + 30

    with normscope.training.exact_graphs():
        got = step(ours, torch.compile(ours, fullgraph=True, **BIT_TRUE), x)

    assert all(map(torch.equal, got, step(theirs, theirs, x)))


# Says whether a graph has the bits of eager mode. The next process finds the graph on disk.
COMPILES = """
import copy, torch, normscope

torch.manual_seed(0)
net = normscope.BatchNorm2d(5, scope="local")
x = torch.randn(4, 5, 6, 6) + 30
eager = copy.deepcopy(net)(x)
with normscope.training.exact_graphs():
    y = torch.compile(net)(x)
    y.sum().backward()  # torch writes the graphs once it has both
print(torch.equal(y, eager))
"""


@pytest.mark.slow
@pytest.mark.own_kernels
def test_no_graph_on_disk_is_of_other_kernels(tmp_path: Path) -> None:
    for kernels, has_bits in (("torch", "False\n"), ("", "True\n")):
        printed = subprocess.run(
            [sys.executable, "-c", COMPILES],
            env=os.environ
            | {
                "NORMSCOPE_DEVICE_KERNELS": kernels,
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
                "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

        assert printed == has_bits  # a compiler rounds torch's operations in its own way


def ops_of(net: nn.Module, x: torch.Tensor) -> tuple[list[str], list[str]]:
    """Return the names of the ops in the forward and backward graphs, in order."""
    names: list[list[str]] = [[], []]

    def into(number: int) -> Callable[..., Any]:
        def keep(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
            for node in graph.graph.nodes:
                if node.op != "call_function":
                    continue
                op = node.args[1] if node.target is with_effects else node.target
                names[number].append(str(op))
            return graph

        return keep

    backend = aot_autograd(
        fw_compiler=into(0),
        bw_compiler=into(1),
        partition_fn=min_cut_rematerialization_partition,
    )
    step(net, torch.compile(net, fullgraph=True, backend=backend), x)
    return names[0], names[1]


def normscopes(names: list[str]) -> list[str]:
    return [name.removeprefix("normscope.").removesuffix(".default") for name in names if
            name.startswith("normscope.")]  # fmt: skip


@pytest.mark.own_kernels
def test_elementwise_operations_are_left_to_the_compiler() -> None:
    forward, backward = ops_of(Residual(), torch.randn(2, 3, 5, 5))

    assert normscopes(forward) == ["batch_norm_statistics"] * 3
    assert normscopes(backward) == ["batch_norm_gradient_sums"] * 3


@pytest.mark.own_kernels
def test_exact_graphs_have_one_op_per_layer_and_a_new_mode_recompiles() -> None:
    net, x = Residual(), torch.randn(2, 3, 5, 5)
    with normscope.training.exact_graphs():
        forward, backward = ops_of(net, x)
    again, _ = ops_of(net, x)

    assert normscopes(forward) == ["batch_norm_statistics", "batch_norm_with_statistics"] * 3
    assert normscopes(backward) == ["batch_norm_backward"] * 3
    assert normscopes(again) == ["batch_norm_statistics"] * 3


@pytest.mark.own_kernels  # torch's normalize slice by slice: the graph fixes their number
@pytest.mark.parametrize(("scope", "expected"), [("slices:2", 1), ("norm_batch:2", 3)])
def test_only_a_norm_batch_is_compiled_for_each_size_of_the_batch(
    scope: str, expected: int
) -> None:
    layer = normscope.BatchNorm2d(3, scope=scope)
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter, dynamic=True)

    for samples in (4, 6, 9, 6):
        compiled(torch.randn(samples, 3, 5, 5))

    assert counter.frame_count == expected


def exchanges_with_little_memory() -> tuple[list[str], list[str]]:
    with functorch_config.patch(activation_memory_budget=0.1):
        forward, backward = ops_of(Residual("world"), torch.randn(2, 3, 9, 9))
    first, second = (
        [name for name in normscopes(names) if name != "keep_order"]
        for names in (forward, backward)
    )
    return first, second


@pytest.mark.own_kernels
def test_no_exchange_is_repeated_to_save_memory(ranks: RankPool) -> None:
    [(forward, backward)] = ranks.run(1, exchanges_with_little_memory, hang_seconds=400)

    assert forward == ["batch_norm_statistics"] * 3
    assert backward == ["batch_norm_gradient_sums"] * 3


def bytes_kept(net: nn.Module, call: Callable[..., torch.Tensor], x: torch.Tensor) -> int:
    """Return the bytes that autograd saves for backward, without parameters."""
    parameters = {p.data_ptr() for p in net.parameters()} | {x.data_ptr()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(x)
    return sum(kept.values())


def test_a_graph_saves_no_more_for_backward_than_eager_mode() -> None:
    net, x = Residual(), torch.randn(2, 3, 16, 16)
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled = torch.compile(net, fullgraph=True, backend=backend)

    # The graph keeps statistics in float64, torch's kernels keep them in float32.
    statistics = 3 * 3 * 8 * torch.float64.itemsize
    assert bytes_kept(net, compiled, x) <= bytes_kept(net, net, x) + statistics


def chain_of_exchanges() -> list[list[bool]]:
    """Return whether each exchange depends on the one before, in forward and in backward."""
    net, x = Residual("world"), torch.randn(2, 3, 5, 5)
    needs: list[list[bool]] = []

    def look(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        behind: dict[torch.fx.Node, set[torch.fx.Node]] = {}
        met: list[torch.fx.Node] = []
        needs.append([])
        for node in graph.graph.nodes:
            behind[node] = set().union(*({n, *behind[n]} for n in node.all_input_nodes))
            if any(name in str(node.target) for name in ("_statistics", "_gradient_sums")):
                needs[-1].append(not met or met[-1] in behind[node])
                met.append(node)
        return graph

    backend = aot_autograd(fw_compiler=look, partition_fn=min_cut_rematerialization_partition)
    step(net, torch.compile(net, fullgraph=True, backend=backend), x)
    return needs


@pytest.mark.own_kernels
def test_exchanges_of_branches_have_the_order_of_the_program(ranks: RankPool) -> None:
    assert ranks.run(1, chain_of_exchanges, hang_seconds=400) == [[[True] * 3, [True] * 3]]


def steps_on_unequal_ranks(options: dict[str, Any]) -> tuple[int, bool]:
    """Run different graphs on the ranks; return the exchanges, and whether results are right."""
    torch.manual_seed(0)
    net = Residual(scope="world")
    torch.manual_seed(distributed.get_rank())
    x = torch.randn(2 + distributed.get_rank(), 3, 6, 6 + 4 * distributed.get_rank())
    theirs = copy.deepcopy(net)
    compiled = torch.compile(net, fullgraph=True, **options)
    got, expected = step(net, compiled, x), step(theirs, theirs, x)
    before = normscope.training.communication_counters().calls
    step(net, compiled, x)
    calls = normscope.training.communication_counters().calls - before
    # Convolutions of 72 products and sums over the batch in a different order, with eps 1.2e-7.
    return calls, all(
        torch.allclose(a.float(), b.float(), rtol=0, atol=1e-4 * b.float().abs().amax().item())
        for a, b in zip(got, expected, strict=True)
    )


@pytest.mark.parametrize(
    "options", [BIT_TRUE, pytest.param({"dynamic": True}, marks=pytest.mark.slow)]
)
def test_ranks_with_different_graphs_make_the_same_exchanges(
    ranks: RankPool, options: dict[str, Any]
) -> None:
    for calls, equal in ranks.run(2, steps_on_unequal_ranks, options, hang_seconds=400):
        assert calls == 2 * 3
        assert equal


def trained_in_parallel(*, compiled: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = Residual("world")
    call: Callable[..., torch.Tensor] = nn.parallel.DistributedDataParallel(net)
    if compiled:
        call = torch.compile(call, **BIT_TRUE)
    torch.manual_seed(1 + distributed.get_rank())
    return step(net, call, torch.randn(2, 3, 6, 6))


def parallel_and_compiled() -> bool:
    compiled, eager = trained_in_parallel(compiled=True), trained_in_parallel(compiled=False)
    return all(map(torch.equal, compiled, eager))


@pytest.mark.own_kernels
def test_data_parallel_graphs_have_the_bits_of_eager_mode(ranks: RankPool) -> None:
    assert ranks.run(2, parallel_and_compiled, hang_seconds=400) == [True, True]
