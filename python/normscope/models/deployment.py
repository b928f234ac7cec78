# SPDX-License-Identifier: Apache-2.0
"""Convert a model to torch's own layers, for tools that know no others."""

from __future__ import annotations

import torch
from torch import nn

from normscope._binding.torch_private import TorchBatchNorm, children_of, has_hooks
from normscope.layers.activated import (
    MODULES,
    OWN_ATTRIBUTES,
    BatchNormAct,
    BatchNormAct1d,
    BatchNormAct2d,
    BatchNormAct3d,
)
from normscope.layers.batch_norm import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d
from normscope.layers.lazy import LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d
from normscope.models.conversion import (
    _ORIGINAL,
    _SETTINGS,
    _STATE,
    _original_class,
    _revert_layer,
)
from normscope.models.derived import class_of, set_class
from normscope.models.fusion import split
from normscope.models.registry import named
from normscope.models.selection import named_layers
from normscope.models.sync import SyncBatchNorm

_TORCH: dict[type[nn.Module], type[nn.Module]] = {
    BatchNorm1d: nn.BatchNorm1d,
    BatchNorm2d: nn.BatchNorm2d,
    BatchNorm3d: nn.BatchNorm3d,
    LazyBatchNorm1d: nn.LazyBatchNorm1d,
    LazyBatchNorm2d: nn.LazyBatchNorm2d,
    LazyBatchNorm3d: nn.LazyBatchNorm3d,
    BatchNormAct1d: nn.BatchNorm1d,
    BatchNormAct2d: nn.BatchNorm2d,
    BatchNormAct3d: nn.BatchNorm3d,
}
_OF_ANY_DIMENSIONS = (BatchNorm, BatchNormAct, SyncBatchNorm)


def to_torch(model: nn.Module, any_dims: type[TorchBatchNorm] | None = None) -> nn.Module:
    """Replace the classes of normscope's layers by torch's, in place, to deploy the model.

    Unlike ``revert``, this works no matter how the layers got into the model: through ``convert``,
    or directly as classes of normscope. In evaluation the model computes the same values as before,
    to the bit. In training, its layers no longer share statistics.

    Each layer remains the same object, with its parameters, buffers, hooks and names in
    ``state_dict``. The exception is :class:`~normscope.BatchNormAct`: it is replaced by a
    :class:`~normscope.models.BatchNormThenActivation` with the same parameters and buffers, whose
    names in ``state_dict`` become those of a torch.nn.Sequential (``norm.weight`` becomes
    ``norm.0.weight``). Sequences that ``convert`` has fused get their class back. An error names
    the layer, and nothing has been changed.

    Args:
        model: The model, or a single layer.
        any_dims: The class for layers that take inputs with any number of dimensions, such as
            :class:`~normscope.SyncBatchNorm`: torch.nn.BatchNorm1d, 2d or 3d. Tools that fuse and
            quantize layers do not know torch.nn.SyncBatchNorm either.

    Returns:
        The model; if it is a BatchNormAct itself, its replacement.

    Raises:
        TypeError: If a layer's class is not known here, because its additions would be lost.
        ValueError: If ``any_dims`` is needed and is missing or not one of those classes.
        RuntimeError: If a BatchNormAct has hooks.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), BatchNorm2d(8), torch.nn.ReLU())
        >>> type(to_torch(model)[1]) is torch.nn.BatchNorm2d
        True
    """
    layers = [
        (layer, _torch_class(layer, class_of(layer), name or "model", any_dims))
        for name, layer in named_layers(model, BatchNorm, include=None, exclude=None)
    ]
    split(model)
    replaced: dict[nn.Module | None, nn.Module] = {}
    for layer, torch_class in layers:
        if isinstance(layer, BatchNormAct):
            replaced[layer] = BatchNormThenActivation(layer, torch_class)
        elif _goes_back(layer, class_of(layer)):
            _revert_layer(layer, torch_class)
        else:
            object.__setattr__(layer, "__dict__", _attributes_of_torch(layer))
            set_class(layer, torch_class)
    for module in list(model.modules()):
        children = children_of(module)
        for name, child in children.items():
            children[name] = replaced.get(child, child)
    return replaced.get(model, model)


class BatchNormThenActivation(nn.Sequential):
    """torch's layer and an activation: :func:`~normscope.to_torch` replaces a BatchNormAct by it.

    The layer is ``[0]`` and the activation ``[1]``. Tools that trace a model see these two, with an
    addition between them if there is a residual.

    Args:
        layer: The layer that provides parameters, buffers, activation and mode.
        torch_class: The class of torch's layer.

    Shape:
        - Input: [N, C, *]
        - Residual: same as the input, or broadcastable with it
        - Output: same as the input

    Example:
        >>> from normscope import BatchNormAct2d
        >>> [type(module).__name__ for module in to_torch(BatchNormAct2d(8, activation="silu"))]
        ['BatchNorm2d', 'SiLU']
    """

    def __init__(self, layer: BatchNormAct, torch_class: type[nn.Module]) -> None:
        norm = torch_class.__new__(torch_class)
        object.__setattr__(norm, "__dict__", _attributes_of_torch(layer))
        super().__init__(norm, _activation(layer))
        self.training = self[1].training = layer.training

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize ``input`` [N, C, *], add ``residual``, and activate."""
        y = self[0](input)
        if residual is not None:
            y = y + residual
        activated: torch.Tensor = self[1](y)
        return activated


def _torch_class(
    layer: BatchNorm,
    layer_class: type[nn.Module],
    name: str,
    any_dims: type[TorchBatchNorm] | None,
) -> type[nn.Module]:
    if issubclass(layer_class, BatchNormAct) and class_of(layer) is not type(layer):
        raise TypeError(
            f"{name}: expected a layer that two modules can replace, got {named(type(layer))}; "
            "call to_torch before fully_shard, replicate or a parametrization change its class"
        )
    if issubclass(layer_class, BatchNormAct) and has_hooks(layer):
        raise RuntimeError(
            f"{name}: expected a layer without forward or backward hooks, which two modules "
            f"replace, got a {type(layer).__qualname__} with hooks; remove them"
        )
    if layer_class in _OF_ANY_DIMENSIONS:
        return _checked(any_dims, layer, name)
    if _goes_back(layer, layer_class):
        return _original_class(layer, layer_class, name)
    if layer_class in _TORCH:
        return _TORCH[layer_class]
    raise TypeError(
        f"{name}: expected a layer of normscope, got {named(type(layer))}, whose own "
        "members would be lost; replace it first"
    )


def _checked(any_dims: type[TorchBatchNorm] | None, layer: BatchNorm, name: str) -> type[nn.Module]:
    expected = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if any_dims not in expected:
        raise ValueError(
            f"any_dims: expected torch.nn.BatchNorm1d, 2d or 3d for {name}, a "
            f"{type(layer).__qualname__}, which takes inputs of any number of dimensions, "
            f"got {named(any_dims) if isinstance(any_dims, type) else any_dims!r}"
        )
    return any_dims


def _goes_back(layer: BatchNorm, layer_class: type[nn.Module]) -> bool:
    """Return whether the class before ``convert`` can be deployed."""
    if issubclass(layer_class, BatchNormAct) or _ORIGINAL not in layer.__dict__:
        return False
    original = layer.__dict__[_ORIGINAL].layer_class
    return original is not nn.SyncBatchNorm and not issubclass(original, BatchNorm)


def _attributes_of_torch(layer: BatchNorm) -> dict[str, object]:
    """Return the attributes of torch's layer in a new dict."""
    own = {*_SETTINGS, *OWN_ATTRIBUTES, *_STATE, _ORIGINAL}
    return {key: value for key, value in layer.__dict__.items() if key not in own}


def _activation(layer: BatchNormAct) -> nn.Module:
    arguments = (layer.negative_slope,) if layer.activation == "leaky_relu" else ()
    return MODULES[layer.activation](*arguments)
