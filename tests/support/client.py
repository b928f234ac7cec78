# SPDX-License-Identifier: Apache-2.0
"""Tests for the networks of other libraries: they train as they do with torch's own layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torchvision_operators  # noqa: F401 - before any client is imported
from rank_pool import RankPool, module_of
from torch import distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

import normscope

SAMPLES = 4
RANKS = 2

# Relative to the largest value of the same kind. A layer differs by a few roundings of 1e-16. A
# network of a hundred layers amplifies this as it amplifies any change of its inputs.
TOLERANCE = 1e-9

Outputs = Callable[[nn.Module, slice], torch.Tensor]


@dataclass(frozen=True)
class Client:
    """A network and how to run it.

    Args:
        make: Makes the network.
        outputs: Returns the outputs [n, *] for the n samples in a slice of all SAMPLES.
    """

    make: Callable[[], nn.Module]
    outputs: Outputs

    def network(self) -> nn.Module:
        """Make the network in float64 and training mode, the same one at each call."""
        return seeded(self.make)


@dataclass(frozen=True)
class Step:
    """The results of a training step: outputs [n, *], gradients and buffers by name."""

    outputs: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def seeded(network: Callable[[], nn.Module]) -> nn.Module:
    """Make a network in float64 and training mode, the same one at each call."""
    torch.manual_seed(0)
    return network().double().train()


def samples(*shape: int) -> torch.Tensor:
    """Return all samples [SAMPLES, *shape], the same at each call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, *shape, dtype=torch.float64, generator=generator)


def outputs_for(*shape: int, key: str = "") -> Outputs:
    """Return the outputs of a model for samples of a shape; with a key, those that it names so."""

    def outputs(model: nn.Module, part: slice) -> torch.Tensor:
        found = model(samples(*shape)[part])
        y: torch.Tensor = found[key] if key else found
        return y

    return outputs


def step_of(model: nn.Module, outputs: Outputs, part: slice = slice(SAMPLES)) -> Step:
    """Run a training step whose loss is a sum over samples."""
    y = outputs(model, part)
    weights = torch.linspace(-1, 1, y[0].numel(), dtype=y.dtype).view(y[0].shape)
    loss: torch.Tensor = (weights * y + y.square()).sum()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Step(y.detach(), gradients, {n: b.clone() for n, b in model.named_buffers()})


def step_on_rank(file: str, name: str) -> Step:
    """Run a step on this rank's share of the samples, with layers of scope world.

    Args:
        file: The test file that defines CLIENTS.
        name: The name of a client.
    """
    # Ranks import this file under another module name. The test process could not unpickle a Step
    # of that module.
    from client import step_of

    client: Client = module_of(file).CLIENTS[name]
    model = normscope.convert(client.network())
    share = SAMPLES // distributed.get_world_size()
    first = distributed.get_rank() * share
    return step_of(model, client.outputs, slice(first, first + share))


def assert_equal_steps(got: Step, expected: Step) -> None:
    """Assert that two steps agree within TOLERANCE."""
    assert expected.gradients
    assert got.gradients.keys() == expected.gradients.keys()
    assert got.buffers.keys() == expected.buffers.keys()
    _assert_near({"": got.outputs}, {"": expected.outputs})
    _assert_near(got.gradients, expected.gradients)
    _assert_near(got.buffers, expected.buffers)


def _assert_near(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    largest = max((t.abs().max().item() for t in expected.values() if t.numel()), default=0.0)
    for name, tensor in expected.items():
        error = (got[name] - tensor).abs().max().item() if tensor.numel() else 0.0
        assert error <= TOLERANCE * largest, f"{name}: off by {error}, of {largest}"


def assert_trains_as_torch(client: Client) -> None:
    """Assert that a converted network trains like the original, and can be reverted."""
    plain = client.network()
    model = copy.deepcopy(plain)
    classes = [type(layer) for layer in plain.modules()]

    assert normscope.convert(model, "local") is model

    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    assert layers
    assert all(isinstance(layer, normscope.BatchNorm) for layer in layers)
    assert_equal_steps(step_of(model, client.outputs), step_of(plain, client.outputs))
    # Checkpoints of the converted network load into the original one.
    other = client.network()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        evaluated = client.outputs(model.eval(), slice(SAMPLES))
        assert torch.equal(evaluated, client.outputs(other.eval(), slice(SAMPLES)))
    normscope.revert(model)
    assert [type(layer) for layer in model.modules()] == classes
    with torch.no_grad():
        assert torch.equal(evaluated, client.outputs(model, slice(SAMPLES)))


class NetworkTests:
    """Tests of all CLIENTS, a dict of Clients by name, in a file that derives from this class."""

    def test_a_network_trains_as_with_the_library_s_layers(self, client: Client) -> None:
        assert_trains_as_torch(client)

    def test_ranks_train_as_one_process_on_the_whole_batch(
        self, request: pytest.FixtureRequest, name: str, client: Client, ranks: RankPool
    ) -> None:
        """Ranks with scope world and a share of the batch each are torch on the whole batch."""
        steps: list[Step] = ranks.run(RANKS, step_on_rank, str(request.path), name)

        outputs = torch.cat([step.outputs for step in steps])
        gradients = {
            key: sum((step.gradients[key] for step in steps), torch.zeros(()))
            for key in steps[0].gradients
        }
        expected = step_of(client.network(), client.outputs)
        for step in steps:
            assert_equal_steps(Step(outputs, gradients, step.buffers), expected)
