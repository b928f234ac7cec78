# SPDX-License-Identifier: Apache-2.0
"""Give the layers of a model a scope, and take it away again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from normscope import _process_group
from normscope.modules import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d
from normscope.scope import Scope

Model = TypeVar("Model", bound=torch.nn.Module)
Patterns = str | Iterable[str]

_SCOPED: dict[type[_BatchNorm], type[BatchNorm]] = {
    torch.nn.BatchNorm1d: BatchNorm1d,
    torch.nn.BatchNorm2d: BatchNorm2d,
    torch.nn.BatchNorm3d: BatchNorm3d,
    torch.nn.SyncBatchNorm: BatchNorm,
} | {scoped: scoped for scoped in (BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d)}

# What a scoped layer has and torch's has not.
_ATTRIBUTES = ("scope", "slice_stats", "group_name", "layer_name")
_ORIGINAL = "_original"


@dataclass(frozen=True)
class _Original:
    """What a layer was before its conversion."""

    layer_class: type[_BatchNorm]
    attributes: dict[str, Any]


def convert(
    model: Model,
    scope: Scope | str = "world",
    include: Patterns | None = None,
    exclude: Patterns | None = None,
) -> Model:
    """Give the batch normalization layers of a model a scope, in place.

    A layer stays the object that it is and changes its class alone: parameters, buffers, hooks,
    flags, dtype, device and every reference to it stay. Layers that have a scope already get the
    new one. Each layer learns its qualified name, by which errors call it.

    Args:
        model: The model, or a layer itself.
        scope: Who shares statistics.
        include: Patterns of qualified names (as in fnmatch: ``"backbone.*"``); None for all.
        exclude: Patterns of qualified names that are left as they are; None for none.

    Returns:
        The model.

    Raises:
        TypeError: If a layer's class derives from torch's batch normalization but is not known
            here, since what it adds would be lost. It is named; nothing has been converted then.
        ValueError: If the scope is malformed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> convert(model, "slices:4")[1].scope
        Scope(text='slices:4')
    """
    scope = Scope(str(scope))
    layers = list(_batch_norms(model, _tuple(include), _tuple(exclude)))
    for name, layer in layers:
        if type(layer) not in _SCOPED:
            raise TypeError(
                f"{name or 'model'}: expected a layer of torch.nn or normscope, got "
                f"{type(layer).__module__}.{type(layer).__qualname__}, whose forward would be "
                "lost; exclude it, or convert it by hand"
            )
    for name, layer in layers:
        _convert_layer(layer, scope, name)
    return model


def revert(model: Model) -> Model:
    """Undo ``convert``: the layers get the classes and scopes back that they had before.

    Example:
        >>> layer = torch.nn.BatchNorm2d(8)
        >>> type(revert(convert(layer))) is torch.nn.BatchNorm2d
        True
    """
    for layer in model.modules():
        if isinstance(layer, BatchNorm) and _ORIGINAL in layer.__dict__:
            _revert_layer(layer)
    return model


def _tuple(patterns: Patterns | None) -> tuple[str, ...] | None:
    return (
        (patterns,)
        if isinstance(patterns, str)
        else (None if patterns is None else tuple(patterns))
    )


def _batch_norms(
    model: torch.nn.Module, include: tuple[str, ...] | None, exclude: tuple[str, ...] | None
) -> Iterator[tuple[str, _BatchNorm]]:
    """The chosen layers, each once, with their qualified names."""
    for name, module in model.named_modules():
        included = include is None or _matches(name, include)
        if isinstance(module, _BatchNorm) and included and not _matches(name, exclude or ()):
            yield name, module


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _convert_layer(layer: _BatchNorm, scope: Scope, name: str) -> None:
    attributes = layer.__dict__
    if _ORIGINAL not in attributes:
        # torch.nn.SyncBatchNorm has a group; a scoped layer keeps its name.
        sync_group = _process_group.name_of(attributes.pop("process_group", None))
        kept = {key: attributes[key] for key in _ATTRIBUTES if key in attributes}
        attributes.setdefault("group_name", sync_group)
        attributes[_ORIGINAL] = _Original(type(layer), kept)
        layer.__class__ = _SCOPED[type(layer)]
    assert isinstance(layer, BatchNorm)
    layer.set_scope(
        scope,
        slice_stats=attributes.get("slice_stats", "pooled"),
        group_name=attributes["group_name"],
        layer_name=name,
    )


def _revert_layer(layer: BatchNorm) -> None:
    attributes = layer.__dict__
    original: _Original = attributes.pop(_ORIGINAL)
    scoped = {key: attributes.pop(key) for key in _ATTRIBUTES}
    attributes.update(original.attributes)
    layer.__class__ = original.layer_class  # type: ignore[assignment]
    if original.layer_class is torch.nn.SyncBatchNorm:
        attributes["process_group"] = _process_group.named(scoped["group_name"])
