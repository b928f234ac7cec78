# SPDX-License-Identifier: Apache-2.0
"""Layers that also apply the activation which follows them in a torch.nn.Sequential."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from normscope._binding.torch_private import children_of, has_hooks
from normscope.layers.activated import (
    OWN_ATTRIBUTES,
    BatchNormAct,
    BatchNormAct1d,
    BatchNormAct2d,
    BatchNormAct3d,
    activation_of,
)
from normscope.layers.batch_norm import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d
from normscope.models.derived import class_of, set_class

_FUSED: dict[type[BatchNorm], type[BatchNormAct]] = {
    BatchNorm: BatchNormAct,
    BatchNorm1d: BatchNormAct1d,
    BatchNorm2d: BatchNormAct2d,
    BatchNorm3d: BatchNormAct3d,
}
_UNFUSED: dict[type[nn.Module], type[BatchNorm]] = {act: norm for norm, act in _FUSED.items()}


def register_fusion(layer_class: type[BatchNorm], fused_class: type[BatchNormAct]) -> None:
    """Register the class of the layers of a class that are fused with an activation."""
    _FUSED[layer_class] = fused_class
    _UNFUSED[fused_class] = layer_class


class FusedActivation(nn.Identity):
    """A placeholder for an activation, which the layer before it applies. It keeps the activation.

    Args:
        activation: The module. It is not registered as a child: it has no state, and is not called.
    """

    activation: nn.Module

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.training = activation.training
        self.__dict__["activation"] = activation

    def extra_repr(self) -> str:
        """Return the text of the activation."""
        return repr(self.activation)


@dataclass(frozen=True)
class Pair:
    """A layer and the next module: its activation, or a :class:`FusedActivation` in its place.

    Args:
        sequence: The torch.nn.Sequential in which they follow each other.
        layer: The layer.
        name: The name of the next module in the sequence.
    """

    sequence: nn.Sequential
    layer: BatchNorm
    name: str

    def fuse(self) -> None:
        """Let the layer apply the activation."""
        activation = children_of(self.sequence)[self.name]
        assert activation is not None
        settings = activation_of(activation)
        assert settings is not None
        self.layer.__dict__.update(zip(OWN_ATTRIBUTES, settings, strict=True))
        set_class(self.layer, _FUSED[type(self.layer)])
        children_of(self.sequence)[self.name] = FusedActivation(activation)

    def split(self) -> None:
        """Undo :meth:`fuse`."""
        place = children_of(self.sequence)[self.name]
        assert isinstance(place, FusedActivation)
        children_of(self.sequence)[self.name] = place.activation.train(place.training)
        for key in OWN_ATTRIBUTES:
            del self.layer.__dict__[key]
        set_class(self.layer, _UNFUSED[class_of(self.layer)])


def fusible_pairs(model: nn.Module, layers: Container[nn.Module]) -> list[Pair]:
    """Return the pairs of one of the layers and an activation that it can apply."""
    places = Counter(child for module in model.modules() for child in children_of(module).values())
    return [
        Pair(sequence, layer, name)
        for sequence, layer, name, after in _neighbors(model)
        if isinstance(layer, BatchNorm)
        and layer in layers
        and places[layer] == places[after] == 1
        and _is_plain(layer)
        and activation_of(after) is not None
    ]


def fused_pairs(model: nn.Module) -> dict[nn.Module, Pair]:
    """Return the pairs that are fused, by layer."""
    return {
        layer: Pair(sequence, layer, name)
        for sequence, layer, name, after in _neighbors(model)
        if isinstance(after, FusedActivation)
        and isinstance(layer, BatchNormAct)
        and class_of(layer) in _UNFUSED
    }


def unfused_class(layer: BatchNorm, fused: Container[nn.Module]) -> type[nn.Module]:
    """Return the layer's class; if the layer is fused, its class once the pair is split."""
    return _UNFUSED[class_of(layer)] if layer in fused else class_of(layer)


def _neighbors(model: nn.Module) -> Iterator[tuple[nn.Sequential, nn.Module, str, nn.Module]]:
    """Yield each module of a sequence with the next one, whose only input is the first's output."""
    for sequence in model.modules():
        if not isinstance(sequence, nn.Sequential) or not _calls_in_order(sequence):
            continue
        children = list(children_of(sequence).items())
        for (_, first), (name, second) in pairwise(children):
            if first is not None and second is not None:
                yield sequence, first, name, second


def _calls_in_order(sequence: nn.Sequential) -> bool:
    own = type(sequence)
    return (
        own.forward is nn.Sequential.forward
        and own.__iter__ is nn.Sequential.__iter__
        and "forward" not in vars(sequence)
    )


def _is_plain(layer: BatchNorm) -> bool:
    """Return whether a call of the layer is its class's forward, and the class can be changed."""
    return type(layer) in _FUSED and "forward" not in vars(layer) and not has_hooks(layer)
