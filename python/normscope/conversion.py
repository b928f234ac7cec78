# SPDX-License-Identifier: Apache-2.0
"""Give the layers of a model a scope, and take it away again."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from normscope import _process_group
from normscope._layers import Patterns, named_layers
from normscope.activated import OWN_ATTRIBUTES, BatchNormAct
from normscope.lazy import LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d
from normscope.modules import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d
from normscope.scope import Scope

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=torch.nn.Module)

_SCOPED: dict[type[torch.nn.Module], type[BatchNorm]] = {
    torch.nn.BatchNorm1d: BatchNorm1d,
    torch.nn.BatchNorm2d: BatchNorm2d,
    torch.nn.BatchNorm3d: BatchNorm3d,
    torch.nn.SyncBatchNorm: BatchNorm,
    torch.nn.LazyBatchNorm1d: LazyBatchNorm1d,
    torch.nn.LazyBatchNorm2d: LazyBatchNorm2d,
    torch.nn.LazyBatchNorm3d: LazyBatchNorm3d,
}

# What a scoped layer has and torch's has not.
_SETTINGS = ("_scope", "slice_stats", "group_name", "layer_name")
_COUNT = "elements_seen"
_ORIGINAL = "_original"


@dataclass(frozen=True)
class _Original:
    """What a layer was before its conversion."""

    layer_class: type[torch.nn.Module]
    settings: dict[str, Any]


def convert(
    model: Model,
    scope: Scope | str = "world",
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    *,
    process_group: ProcessGroup | DeviceMesh | None = None,
) -> Model:
    """Give the batch normalization layers of a model a scope, in place.

    A layer stays the object that it is and changes its class alone: parameters, buffers, hooks,
    flags, dtype, device and every reference to it stay. Layers that have a scope already get the
    new one, those of a class that derives from normscope's too. torch's lazy layers stay lazy until
    their first input. Each layer learns its qualified name, by which errors call it.

    Args:
        model: The model, or a layer itself.
        scope: Who shares statistics.
        include: Patterns of qualified names (as in fnmatch: ``"backbone.*"``); None for all.
        exclude: Patterns of qualified names that are left as they are; None for none.
        process_group: The ranks that the scope speaks of, or a mesh of one dimension; None leaves
            each layer the group that it has: of a torch.nn.SyncBatchNorm its own, else the default.

    Returns:
        The model. Where no layer was chosen it is as it was, with a warning.

    Raises:
        TypeError: If a layer's class derives from torch's batch normalization but is not known
            here, since all that it adds would be lost: a forward, other methods, its own name in
            isinstance. It is named; nothing has been converted then.
        ValueError: If the scope is malformed, a pattern matches no layer, or this process is not in
            the group.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> convert(model, "slices:4")[1].scope
        Scope(text='slices:4')
    """
    scope = Scope(str(scope))
    group_name = _process_group.name_of(process_group)
    layers = named_layers(model, _BatchNorm, include, exclude)
    if not layers:
        warnings.warn(
            f"convert: expected batch normalization layers to convert, got none in "
            f"{type(model).__qualname__}",
            stacklevel=2,
        )
    scoped_classes = [_scoped_class(layer, name) for name, layer in layers]
    for (name, layer), scoped_class in zip(layers, scoped_classes, strict=True):
        scoped = _converted(layer, scoped_class)
        scoped.scope = scope
        scoped.layer_name = name
        if group_name is not None:
            scoped.group_name = group_name
    return model


def revert(model: Model) -> Model:
    """Undo ``convert``: the layers get the classes and scopes back that they had before.

    What training has changed stays. A lazy layer that has seen an input by now becomes what torch
    would have made of it. Of a model and what ``fuse`` has made of it, the model can be reverted;
    the fused layers then keep their scopes.

    Raises:
        TypeError: If the class of a layer has been changed since, or ``fuse`` has put an activation
            into it; nothing has been reverted then.
        RuntimeError: If a torch.nn.SyncBatchNorm had a process group that is not in this process.

    Example:
        >>> layer = torch.nn.BatchNorm2d(8)
        >>> type(revert(convert(layer))) is torch.nn.BatchNorm2d
        True
    """
    layers = [
        (layer, _original_class(layer, name))
        for name, layer in named_layers(model, BatchNorm, include=None, exclude=None)
        if _ORIGINAL in layer.__dict__
    ]
    for layer, original_class in layers:
        _revert_layer(layer, original_class)
    return model


def _scoped_class(layer: _BatchNorm, name: str) -> type[BatchNorm]:
    """The class that a layer gets, or keeps."""
    if isinstance(layer, BatchNorm):
        return type(layer)
    if type(layer) in _SCOPED:
        return _SCOPED[type(layer)]
    base = next(known for known in type(layer).__mro__ if known in _SCOPED or known is _BatchNorm)
    added = "forward" if type(layer).forward is not base.forward else "members"
    advice = _SCOPED.get(base, BatchNorm).__name__
    raise TypeError(
        f"{name or 'model'}: expected a layer of torch.nn or normscope, got "
        f"{_named(type(layer))}, whose own {added} would be lost; derive it from normscope."
        f"{advice} instead of torch.nn.{base.__name__}, or leave it out with exclude={name!r}"
    )


def _converted(layer: _BatchNorm, scoped_class: type[BatchNorm]) -> BatchNorm:
    attributes = layer.__dict__
    if _ORIGINAL in attributes:
        assert isinstance(layer, BatchNorm)
        return layer
    settings = {key: attributes[key] for key in _SETTINGS if key in attributes}
    if not settings:
        attributes["slice_stats"] = "pooled"
        # torch.nn.SyncBatchNorm has a group; a scoped layer keeps its name.
        attributes["group_name"] = _process_group.name_of(attributes.get("process_group"))
        attributes.pop("process_group", None)
    attributes[_ORIGINAL] = _Original(type(layer), settings)
    layer.__class__ = scoped_class
    assert isinstance(layer, BatchNorm)
    return layer


def _original_class(layer: BatchNorm, name: str) -> type[torch.nn.Module]:
    """The class that ``revert`` gives a converted layer."""
    original: type[torch.nn.Module] = layer.__dict__[_ORIGINAL].layer_class
    if issubclass(original, LazyModuleMixin) and not isinstance(layer, LazyModuleMixin):
        assert original.cls_to_become is not None
        original = original.cls_to_become
    if isinstance(layer, BatchNormAct) and not issubclass(original, BatchNormAct):
        raise TypeError(
            f"{name or 'model'}: expected the class that convert gave it, got "
            f"{_named(type(layer))}, which normscope.fuse made; revert the model that was fused"
        )
    if type(layer) is not _SCOPED.get(original, original):
        raise TypeError(
            f"{name or 'model'}: expected the class that convert gave it, got "
            f"{_named(type(layer))}; undo first what has changed it"
        )
    return original


def _revert_layer(layer: BatchNorm, original_class: type[torch.nn.Module]) -> None:
    attributes = layer.__dict__
    if OWN_ATTRIBUTES[0] in attributes and not isinstance(layer, BatchNormAct):
        attributes = {key: attributes[key] for key in attributes if key not in OWN_ATTRIBUTES}
        object.__setattr__(layer, "__dict__", attributes)  # those that it had are the fused layer's
    if original_class is torch.nn.SyncBatchNorm:
        attributes["process_group"] = _process_group.named(layer.group_name)
    if not issubclass(original_class, BatchNorm):
        for key in (*_SETTINGS, _COUNT):
            attributes.pop(key, None)
    attributes.update(attributes.pop(_ORIGINAL).settings)
    layer.__class__ = original_class  # type: ignore[assignment]


def _named(layer_class: type[torch.nn.Module]) -> str:
    return f"{layer_class.__module__}.{layer_class.__qualname__}"
