# SPDX-License-Identifier: Apache-2.0
"""Models of torch's own layers, for tools that know no others."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from normscope._layers import named_layers
from normscope._parametrized import class_of, set_class
from normscope._scripted import added
from normscope._traced import has_hooks
from normscope.activated import (
    OWN_ATTRIBUTES,
    BatchNormAct,
    BatchNormAct1d,
    BatchNormAct2d,
    BatchNormAct3d,
)
from normscope.conversion import (
    _COUNT,
    _ORIGINAL,
    _SETTINGS,
    _original_class,
    _revert_layer,
)
from normscope.lazy import LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d
from normscope.modules import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d
from normscope.registry import named
from normscope.sync import SyncBatchNorm

_TORCH: dict[type[nn.Module], type[nn.Module]] = {
    BatchNorm1d: nn.BatchNorm1d,
    BatchNorm2d: nn.BatchNorm2d,
    BatchNorm3d: nn.BatchNorm3d,
    BatchNormAct1d: nn.BatchNorm1d,
    BatchNormAct2d: nn.BatchNorm2d,
    BatchNormAct3d: nn.BatchNorm3d,
    LazyBatchNorm1d: nn.LazyBatchNorm1d,
    LazyBatchNorm2d: nn.LazyBatchNorm2d,
    LazyBatchNorm3d: nn.LazyBatchNorm3d,
}
_OF_ANY_DIMENSIONS = (BatchNorm, BatchNormAct, SyncBatchNorm)


def to_torch(model: nn.Module, any_dims: type[_BatchNorm] | None = None) -> nn.Module:
    """Give the layers of normscope torch's classes, in place, to deploy the model.

    Unlike ``revert``, it does not matter how the layers came into the model: by ``convert``, as
    classes of normscope, or by ``fuse``. In evaluation the model computes what it did, to the bit.
    In training, its layers then share no statistics.

    A layer stays the object that it is, with its parameters, buffers, hooks and names in
    ``state_dict``. A :class:`~normscope.BatchNormAct` cannot: a :class:`BatchNormThenActivation`
    takes its place, with its parameters and buffers, whose names in ``state_dict`` become those of
    a torch.nn.Sequential (``norm.weight`` is ``norm.0.weight``). Of a model and what ``fuse`` has
    made of it, either can be given; the layers that were not fused are the same in both.

    Args:
        model: The model, or a layer itself.
        any_dims: What a layer that takes inputs of any number of dimensions becomes, as a
            :class:`~normscope.SyncBatchNorm`: torch.nn.BatchNorm1d, 2d or 3d, since what fuses and
            quantizes layers does not know torch.nn.SyncBatchNorm either.

    Returns:
        The model; if it is a BatchNormAct itself, what takes its place.

    Raises:
        TypeError: If a layer's class is not known here, since what it adds would be lost.
        ValueError: If ``any_dims`` is missing, or is no class of torch's for it.
        RuntimeError: If a BatchNormAct has hooks.

        Each names the layer; nothing has been changed then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), BatchNorm2d(8), torch.nn.ReLU())
        >>> type(to_torch(model)[1]) is torch.nn.BatchNorm2d
        True
    """
    layers = [
        (layer, _torch_class(layer, name or "model", any_dims))
        for name, layer in named_layers(model, BatchNorm, include=None, exclude=None)
    ]
    replaced: dict[nn.Module | None, nn.Module] = {}
    for layer, torch_class in layers:
        if isinstance(layer, BatchNormAct):
            replaced[layer] = BatchNormThenActivation(layer, torch_class)
        elif _goes_back(layer):
            _revert_layer(layer, torch_class)
        else:
            object.__setattr__(layer, "__dict__", _attributes_of_torch(layer))
            set_class(layer, torch_class)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            module._modules[name] = replaced.get(child, child)
    return replaced.get(model, model)


class BatchNormThenActivation(nn.Sequential):
    """What :func:`to_torch` makes of a BatchNormAct: torch's layer ``[0]``, its activation ``[1]``.

    Tools that trace go through it, and see torch's layers, with an addition between them if there
    is a residual.

    Args:
        layer: Whose parameters, buffers, activation and mode it has.
        torch_class: Of its own layer.

    Shape:
        - Input: [N, C, *]
        - Residual: that of the input, or one that broadcasts with it
        - Output: that of the input

    Example:
        >>> [type(module).__name__ for module in to_torch(BatchNormAct2d(8, activation="silu"))]
        ['BatchNorm2d', 'SiLU']
    """

    def __init__(self, layer: BatchNormAct, torch_class: type[nn.Module]) -> None:
        norm = torch_class.__new__(torch_class)
        object.__setattr__(norm, "__dict__", _attributes_of_torch(layer))
        super().__init__(norm, _activation(layer))
        self.adds_into = str(layer._adds_into)
        self.training = self[1].training = layer.training

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize ``input`` [N, C, *], add ``residual``, and activate."""
        y = self[0](input)
        if residual is not None:
            y = added(y, residual, self.adds_into)
        activated: torch.Tensor = self[1](y)
        return activated


def _torch_class(layer: BatchNorm, name: str, any_dims: type[_BatchNorm] | None) -> type[nn.Module]:
    if isinstance(layer, BatchNormAct) and has_hooks(layer):
        raise RuntimeError(
            f"{name}: expected a layer without forward or backward hooks, which two modules "
            f"replace, got a {type(layer).__qualname__} with hooks; remove them"
        )
    # Of two modules, parametrizations would stay with neither.
    layer_class = type(layer) if isinstance(layer, BatchNormAct) else class_of(layer)
    if layer_class in _OF_ANY_DIMENSIONS:
        return _checked(any_dims, layer, name)
    if _goes_back(layer):
        return _original_class(layer, name)
    if layer_class in _TORCH:
        return _TORCH[layer_class]
    raise TypeError(
        f"{name}: expected a layer of normscope, got {named(type(layer))}, whose own "
        "members would be lost; replace it first"
    )


def _checked(any_dims: type[_BatchNorm] | None, layer: BatchNorm, name: str) -> type[nn.Module]:
    expected = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if any_dims not in expected:
        raise ValueError(
            f"any_dims: expected torch.nn.BatchNorm1d, 2d or 3d for {name}, a "
            f"{type(layer).__qualname__}, which takes inputs of any number of dimensions, "
            f"got {named(any_dims) if isinstance(any_dims, type) else any_dims!r}"
        )
    return any_dims


def _goes_back(layer: BatchNorm) -> bool:
    """Whether the layer was of a class to deploy, before ``convert``."""
    if isinstance(layer, BatchNormAct) or _ORIGINAL not in layer.__dict__:
        return False
    original = layer.__dict__[_ORIGINAL].layer_class
    return original is not nn.SyncBatchNorm and not issubclass(original, BatchNorm)


def _attributes_of_torch(layer: BatchNorm) -> dict[str, object]:
    """Those of torch's layer, in a dict of their own: what ``fuse`` made has the layer's."""
    own = {*_SETTINGS, *OWN_ATTRIBUTES, _COUNT, _ORIGINAL}
    return {key: value for key, value in layer.__dict__.items() if key not in own}


def _activation(layer: BatchNormAct) -> nn.Module:
    if layer.activation == "leaky_relu":
        return nn.LeakyReLU(layer.negative_slope)
    return _ACTIVATIONS[layer.activation]()


_ACTIVATIONS = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "hard_swish": nn.Hardswish,
}
