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
from normscope._parametrized import class_of, set_class
from normscope.activated import OWN_ATTRIBUTES, BatchNormAct
from normscope.modules import BatchNorm
from normscope.registry import Conversion, conversion_of, named
from normscope.scope import Scope

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=torch.nn.Module)

# What a scoped layer has and torch's has not.
_SETTINGS = ("_scope", "slice_stats", "group_name", "layer_name")
_COUNT = "elements_seen"
_ORIGINAL = "_original"


@dataclass(frozen=True)
class _Original:
    """What a layer was before its conversion."""

    layer_class: type[torch.nn.Module]
    settings: dict[str, Any]
    added: tuple[str, ...] = ()  # by register_conversion's attributes


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
    new one, those of a class that derives from normscope's too. Parametrizations stay, those of
    ``torch.nn.utils.parametrize`` and its older forms. torch's lazy layers stay lazy until their
    first input. Each layer learns its qualified name, by which errors call it.

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
        TypeError: If a layer's class derives from torch's batch normalization but is neither known
            here nor from :func:`~normscope.register_conversion`, since all that it adds would be
            lost: a forward, other methods, its own name in isinstance. It is named; nothing has
            been converted then.
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
    conversions = [_conversion(layer, name) for name, layer in layers]
    for (name, layer), (scoped_class, added) in zip(layers, conversions, strict=True):
        scoped = _converted(layer, scoped_class, added)
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


def _conversion(layer: _BatchNorm, name: str) -> tuple[type[BatchNorm], dict[str, Any]]:
    """The class that a layer gets, or keeps, and the attributes that it gets with it."""
    if isinstance(layer, BatchNorm):
        return class_of(layer), {}  # type: ignore[return-value]
    layer_class = class_of(layer)
    conversion = conversion_of(layer_class)
    if conversion is not None:
        return conversion.scoped_class, conversion.values_of(layer)
    bases = (base for base in layer_class.__mro__ if issubclass(base, _BatchNorm))
    base = next(b for b in bases if b is _BatchNorm or (_is_torchs(b) and conversion_of(b)))
    of_base = conversion_of(base) or Conversion(BatchNorm)
    added = "forward" if layer_class.forward is not base.forward else "members"
    raise TypeError(
        f"{name or 'model'}: expected a layer of torch.nn or normscope, got "
        f"{named(layer_class)}, whose own {added} would be lost; derive it from normscope."
        f"{of_base.scoped_class.__name__} instead of torch.nn.{base.__name__}, say what becomes of "
        f"it with normscope.register_conversion, or leave it out with exclude={name!r}"
    )


def _converted(
    layer: _BatchNorm, scoped_class: type[BatchNorm], added: dict[str, Any]
) -> BatchNorm:
    attributes = layer.__dict__
    if _ORIGINAL in attributes:
        assert isinstance(layer, BatchNorm)
        return layer
    settings = {key: attributes[key] for key in (*_SETTINGS, *added) if key in attributes}
    if not isinstance(layer, BatchNorm):
        attributes["slice_stats"] = "pooled"
        # torch.nn.SyncBatchNorm has a group; a scoped layer keeps its name.
        attributes["group_name"] = _process_group.name_of(attributes.get("process_group"))
        attributes.pop("process_group", None)
    attributes.update(added)
    attributes[_ORIGINAL] = _Original(class_of(layer), settings, tuple(added))
    set_class(layer, scoped_class)
    assert isinstance(layer, BatchNorm)
    return layer


def _original_class(layer: BatchNorm, name: str) -> type[torch.nn.Module]:
    """The class that ``revert`` gives a converted layer."""
    original: type[torch.nn.Module] = layer.__dict__[_ORIGINAL].layer_class
    if issubclass(original, LazyModuleMixin) and not isinstance(layer, LazyModuleMixin):
        assert original.cls_to_become is not None
        original = original.cls_to_become
    conversion = conversion_of(original)
    if class_of(layer) is (conversion.scoped_class if conversion else original):
        return original
    fused = isinstance(layer, BatchNormAct) and not issubclass(original, BatchNormAct)
    advice = (
        ", which normscope.fuse made; revert the model that was fused"
        if fused
        else "; undo first what has changed it"
    )
    raise TypeError(
        f"{name or 'model'}: expected the class that convert gave it, got "
        f"{named(type(layer))}{advice}"
    )


def _revert_layer(layer: BatchNorm, original_class: type[torch.nn.Module]) -> None:
    attributes = layer.__dict__
    if OWN_ATTRIBUTES[0] in attributes and not isinstance(layer, BatchNormAct):
        attributes = {key: attributes[key] for key in attributes if key not in OWN_ATTRIBUTES}
        object.__setattr__(layer, "__dict__", attributes)  # those that it had are the fused layer's
    if issubclass(original_class, torch.nn.SyncBatchNorm):
        attributes["process_group"] = _process_group.named(layer.group_name)
    if not issubclass(original_class, BatchNorm):
        for key in (*_SETTINGS, _COUNT):
            attributes.pop(key, None)
    original: _Original = attributes.pop(_ORIGINAL)
    for key in original.added:
        attributes.pop(key, None)
    attributes.update(original.settings)
    set_class(layer, original_class)


def _is_torchs(layer_class: type[torch.nn.Module]) -> bool:
    return layer_class.__module__.startswith("torch.")
