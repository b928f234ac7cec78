# SPDX-License-Identifier: Apache-2.0
"""Finds the layers in a graph that an activation follows, perhaps after an addition."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from normscope._traced import IN_PLACE, iadd
from normscope.activated import (
    Activation,
    AddsInto,
    BatchNormAct,
    BatchNormAct1d,
    BatchNormAct2d,
    BatchNormAct3d,
)
from normscope.modules import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d

FUSED: Mapping[type[nn.Module], type[BatchNormAct]] = {
    BatchNorm: BatchNormAct,
    BatchNorm1d: BatchNormAct1d,
    BatchNorm2d: BatchNormAct2d,
    BatchNorm3d: BatchNormAct3d,
}

ACTIVATIONS: Mapping[object, Activation] = {
    **dict.fromkeys((nn.ReLU, functional.relu, functional.relu_, torch.relu, torch.relu_), "relu"),
    **dict.fromkeys(("relu", "relu_"), "relu"),  # methods
    **dict.fromkeys((nn.ReLU6, functional.relu6), "relu6"),
    **dict.fromkeys((nn.LeakyReLU, functional.leaky_relu, functional.leaky_relu_), "leaky_relu"),
    **dict.fromkeys((nn.SiLU, functional.silu), "silu"),
    **dict.fromkeys((nn.Hardswish, functional.hardswish), "hard_swish"),
}
_ADDITIONS = (operator.add, torch.add, "add")
_ADDITIONS_IN_PLACE = (iadd, "add_")

# Functions of these packages only write to their arguments if their names or keywords say so.
_KNOWN_PACKAGES = ("torch", "_operator", "builtins", "math")

Modules = Mapping[str, nn.Module]


@dataclass(frozen=True)
class Pair:
    """The nodes of a layer and the activation that follows it.

    Args:
        layer: The node that calls the layer.
        activation_node: The node that calls the activation.
        addition: The node that adds a residual to the layer's output; None if there is none.
        adds_into: Where the sum is written: the layer's output, the residual, or a new tensor.
        moves: Whether the layer has to run where its activation does, because the residual is
            computed after the layer.
        activation: The name of the activation.
        negative_slope: The slope of a leaky ReLU.
    """

    layer: fx.Node
    activation_node: fx.Node
    addition: fx.Node | None
    adds_into: AddsInto
    moves: bool
    activation: Activation
    negative_slope: float

    def merge(self) -> None:
        """Replace the nodes of the pair by a single call of the layer."""
        [x] = self.layer.all_input_nodes
        graph = self.layer.graph
        arguments = [x]
        if self.addition is not None:
            arguments += [node for node in operands(self.addition) if node is not self.layer]
        if self.moves:
            self.activation_node.prepend(self.layer)
        self.activation_node.replace_all_uses_with(self.layer)
        graph.erase_node(self.activation_node)
        if self.addition is not None:
            graph.erase_node(self.addition)
        self.layer.args, self.layer.kwargs = tuple(arguments), {}


def pairs_of(graph: fx.Graph, modules: Modules) -> list[Pair]:
    """Return all pairs that can be merged without changing a value or the order of exchanges."""
    return list(_Search(graph, modules).pairs())


class _Search:
    """A graph, with the lookup tables that the search for pairs needs."""

    def __init__(self, graph: fx.Graph, modules: Modules) -> None:
        self._modules = modules
        self._nodes = list(graph.nodes)
        self._positions = {node: position for position, node in enumerate(self._nodes)}
        calls = Counter(modules[n.target] for n in self._nodes if n.op == "call_module")
        self._once = {module for module, count in calls.items() if count == 1}

    def pairs(self) -> Iterator[Pair]:
        for node in self._nodes:
            key = type(self._modules[node.target]) if node.op == "call_module" else node.target
            activation = ACTIVATIONS.get(key)
            if activation is None or len(node.all_input_nodes) != 1 or self._is_patched(node):
                continue
            [source] = node.all_input_nodes
            slope = self._negative_slope(node) if activation == "leaky_relu" else 0.01
            if len(source.users) == 1:
                yield from self._pairs_before(node, source, activation, slope)

    def _pairs_before(
        self, node: fx.Node, source: fx.Node, activation: Activation, slope: float
    ) -> Iterator[Pair]:
        """Yield the pair of an activation, if there is one."""
        if self._can_be_fused(source):
            yield Pair(source, node, None, "new", False, activation, slope)  # noqa: FBT003
            return
        added = operands(source)
        if len(added) != 2 or added[0] is added[1]:
            return
        in_place = source.target in _ADDITIONS_IN_PLACE
        if in_place and not self._can_be_fused(added[0]):
            return  # the tensor that is written to may be in use elsewhere under another name
        for layer in added:  # of two layers only the later one passes, as the earlier cannot move
            [residual] = (other for other in added if other is not layer)
            if self._can_be_fused(layer) and self._stays_right(layer, residual, node):
                written: AddsInto = "output" if layer is added[0] else "residual"
                into = written if in_place else "new"
                moves = self._positions[residual] > self._positions[layer]
                yield Pair(layer, node, source, into, moves, activation, slope)
                return

    def _can_be_fused(self, node: fx.Node) -> bool:
        """Return whether a node is the only call of a layer and its output has a single user."""
        if node.op != "call_module" or len(node.users) != 1:
            return False
        module = self._modules[str(node.target)]
        given = (*node.args, *node.kwargs.values())
        only_input = len(given) == 1 and isinstance(given[0], fx.Node)
        return (
            type(module) in FUSED
            and module in self._once
            and only_input
            and not self._is_patched(node)
        )

    def _is_patched(self, node: fx.Node) -> bool:
        """Return whether the called module has a forward that overrides that of its class."""
        return node.op == "call_module" and "forward" in self._modules[str(node.target)].__dict__

    def _stays_right(self, layer: fx.Node, residual: fx.Node, activation_node: fx.Node) -> bool:
        """Return whether the layer and the addition can run together with the same results."""
        first, last = self._positions[layer], self._positions[activation_node]
        between = self._nodes[first + 1 : last]
        if any(self._may_write(node) for node in between if layer not in node.all_input_nodes):
            return False
        moves = self._positions[residual] > first
        return not moves or not any(self._exchanges(node) for node in between)

    def _exchanges(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        return any(isinstance(m, BatchNorm) for m in self._modules[str(node.target)].modules())

    def _may_write(self, node: fx.Node) -> bool:
        """Return whether a node might write to an existing tensor; True if unknown."""
        if node.op == "call_module":
            return bool(getattr(self._modules[str(node.target)], "inplace", False))
        if node.op == "call_method":
            return str(node.target).endswith("_")
        if node.op != "call_function":
            return False
        name = getattr(node.target, "__name__", "_")
        package = (getattr(node.target, "__module__", None) or "torch").split(".")[0]
        literals = [a for a in (*node.args, *node.kwargs.values()) if a is True]
        return (
            node.target in IN_PLACE
            or name.endswith("_")
            or name in ("setitem", "delitem", "setattr")
            or package not in _KNOWN_PACKAGES
            or "out" in node.kwargs
            or bool(literals)  # perhaps inplace
        )

    def _negative_slope(self, node: fx.Node) -> float:
        if node.op == "call_module":
            return float(getattr(self._modules[str(node.target)], "negative_slope", 0.01))
        given: Any = node.kwargs.get("negative_slope", node.args[1] if len(node.args) > 1 else 0.01)
        return float(given)


def operands(addition: fx.Node) -> list[fx.Node]:
    """Return the two nodes that are added, or fewer if the node is no plain addition."""
    if addition.op not in ("call_function", "call_method"):
        return []
    if addition.target not in (*_ADDITIONS, *_ADDITIONS_IN_PLACE):
        return []
    if not addition.kwargs.keys() <= {"input", "other", "alpha"}:
        return []
    if addition.kwargs.get("alpha", 1) != 1:
        return []
    named = (addition.kwargs[key] for key in ("input", "other") if key in addition.kwargs)
    return [operand for operand in (*addition.args, *named) if isinstance(operand, fx.Node)]
