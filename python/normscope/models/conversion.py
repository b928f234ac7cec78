# SPDX-License-Identifier: Apache-2.0
"""Convert the layers of a model to normscope's, and back."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from normscope._binding import groups
from normscope._binding.torch_private import TorchBatchNorm
from normscope.layers.batch_norm import MADE, STATE, BatchNorm, prepare_torch
from normscope.layers.scope import Scope
from normscope.models.derived import class_of, set_class
from normscope.models.fusion import fuse as fuse_activations
from normscope.models.fusion import split
from normscope.models.registry import Conversion, conversion_of, is_name_of_layer, named
from normscope.models.selection import Patterns, check_model, named_layers, selected

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=torch.nn.Module)

# The attributes that only a scoped layer has.
_SETTINGS = ("_scope", "slice_stats", "group_name", "layer_name")
_STATE = (*STATE, "_applies_activation")
_ORIGINAL = "_original"


@dataclass(frozen=True)
class _Original:
    """The class and settings of a layer before its conversion."""

    layer_class: type[torch.nn.Module]
    settings: dict[str, Any]
    added: tuple[str, ...] = ()  # the attributes that register_conversion adds


def convert(
    model: Model,
    scope: Scope | str = "world",
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    *,
    process_group: ProcessGroup | DeviceMesh | None = None,
    fuse: bool = False,
) -> Model:
    """Give the batch normalization layers of a model a scope, in place.

    Each layer remains the same object; only its class changes. Parameters, buffers, hooks, flags,
    dtype, device and all references to it are kept. Layers that already have a scope get the new
    one, including those of classes that derive from normscope's. Parametrizations are kept, those
    of ``torch.nn.utils.parametrize`` as well as the older ones. torch's lazy layers stay lazy until
    their first input. Each layer stores its qualified name, which errors mention.

    Args:
        model: The model, or a single layer.
        scope: Who shares statistics.
        include: Patterns of qualified names (as in fnmatch: ``"backbone.*"``); None for all.
        exclude: Patterns of qualified names that are left unchanged; None for none.
        process_group: The ranks that the scope refers to, or a mesh of one dimension. With None,
            each layer keeps its group: a torch.nn.SyncBatchNorm its own, all others the default.
        fuse: Whether a torch.nn.Sequential lets a layer also apply the activation that directly
            follows it, in training and in a single op, as a :class:`~normscope.BatchNormAct` does:
            a ReLU, ReLU6, LeakyReLU, SiLU or Hardswish of torch.nn. Only the class of the sequence
            changes. Each of its calls decides anew: modules that have hooks, a forward of their own
            or other classes by then are called one after the other.

    Returns:
        The model. If no layer was selected, it is unchanged, and a warning is issued.

    Raises:
        TypeError: If a layer's class derives from torch's batch normalization but is neither known
            here nor through :func:`~normscope.register_conversion`. Everything that it adds would
            be lost: a forward, other methods, isinstance checks. Or if torch.jit has compiled a
            layer in training mode. The error names the layer, and no layer has been converted.
        ValueError: If the scope is malformed, a pattern matches no layer, or this process is not in
            a group. No layer has been converted then either.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> convert(model, "slices:4")[1].scope
        Scope(text='slices:4')
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> y = convert(model, "slices:4", fuse=True)(torch.randn(4, 8, 3, 3))
        >>> "BatchNorm" in y.grad_fn.name()  # and no ReLU
        True
    """
    scope = Scope(str(scope))
    given = groups.name_of(process_group)
    check_model(model)
    candidates = [(n, m) for n, m in model.named_modules() if _is_candidate(m)]
    layers = selected(candidates, include, exclude)
    if not layers:
        warnings.warn(
            f"convert: expected batch normalization layers to convert, got none in "
            f"{type(model).__qualname__}",
            stacklevel=2,
        )
    conversions = [
        (layer, name, *_conversion(layer, name), given or _group_name_of(layer))
        for name, layer in layers
    ]
    for layer, name, scoped_class, added, group_name in conversions:
        scoped = _converted(layer, scoped_class, added)
        scoped.scope = scope
        scoped.layer_name = name
        scoped.group_name = group_name
        prepare_torch(scoped)
    if fuse:
        fuse_activations(model, {layer for _, layer in layers})
    return model


def revert(model: Model) -> Model:
    """Undo ``convert``: restore the original classes, scopes and activations of the layers.

    Changes made by training are kept. A lazy layer that has seen an input becomes the class that
    torch would have given it.

    Raises:
        TypeError: If the class of a layer has been changed since. No layer has been reverted then.
        RuntimeError: If a torch.nn.SyncBatchNorm has a process group that is not in this process.
            No layer has been reverted then either.

    Example:
        >>> layer = torch.nn.BatchNorm2d(8)
        >>> type(revert(convert(layer))) is torch.nn.BatchNorm2d
        True
    """
    layers = [
        (layer, _original_class(layer, class_of(layer), name))
        for name, layer in named_layers(model, BatchNorm, include=None, exclude=None)
        if _ORIGINAL in layer.__dict__
    ]
    split(model)
    for layer, original_class in layers:
        _revert_layer(layer, original_class)
    return model


def _is_candidate(module: torch.nn.Module) -> TypeGuard[TorchBatchNorm]:
    """Return whether ``convert`` has to convert or to refuse a module."""
    return isinstance(module, TorchBatchNorm) or (
        isinstance(module, torch.jit.ScriptModule)
        and module.training
        and is_name_of_layer(module.original_name)
    )


def _conversion(layer: TorchBatchNorm, name: str) -> tuple[type[BatchNorm], dict[str, Any]]:
    """Return the class that a layer gets or keeps, and the attributes that it gets."""
    if isinstance(layer, BatchNorm):
        return class_of(layer), {}  # type: ignore[return-value]
    layer_class = class_of(layer)
    if issubclass(layer_class, torch.jit.ScriptModule):
        raise TypeError(
            f"{name or 'model'}: expected a layer of torch.nn or normscope, got one in training "
            "that torch.jit has compiled, which cannot get a scope; convert the model before "
            f"torch.jit.trace, or leave it out with exclude={name!r}"
        )
    conversion = conversion_of(layer_class)
    if conversion is not None:
        return conversion.scoped_class, conversion.values_of(layer)
    bases = (base for base in layer_class.__mro__ if issubclass(base, TorchBatchNorm))
    base = next(b for b in bases if b is TorchBatchNorm or (_is_torchs(b) and conversion_of(b)))
    of_base = conversion_of(base) or Conversion(BatchNorm)
    added = "forward" if layer_class.forward is not base.forward else "members"
    raise TypeError(
        f"{name or 'model'}: expected a layer of torch.nn or normscope, got "
        f"{named(layer_class)}, whose own {added} would be lost; derive it from normscope."
        f"{of_base.scoped_class.__name__} instead of torch.nn.{base.__name__}, say what becomes of "
        f"it with normscope.register_conversion, or leave it out with exclude={name!r}"
    )


def _group_name_of(layer: TorchBatchNorm) -> str | None:
    """Return the name of a layer's group. A torch.nn.SyncBatchNorm stores the group itself."""
    if isinstance(layer, BatchNorm):
        return layer.group_name
    return groups.name_of(vars(layer).get("process_group"))


def _converted(
    layer: TorchBatchNorm, scoped_class: type[BatchNorm], added: dict[str, Any]
) -> BatchNorm:
    attributes = layer.__dict__
    if _ORIGINAL in attributes:
        assert isinstance(layer, BatchNorm)
        return layer
    settings = {key: attributes[key] for key in (*_SETTINGS, *added) if key in attributes}
    if not isinstance(layer, BatchNorm):
        attributes["slice_stats"] = "pooled"
        attributes["_made"] = next(MADE)
        attributes.pop("process_group", None)
    attributes.update(added)
    attributes[_ORIGINAL] = _Original(class_of(layer), settings, tuple(added))
    set_class(layer, scoped_class)
    assert isinstance(layer, BatchNorm)
    return layer


def _original_class(
    layer: BatchNorm, layer_class: type[torch.nn.Module], name: str
) -> type[torch.nn.Module]:
    """Return the class that ``revert`` gives a converted layer, whose class is ``layer_class``."""
    original: type[torch.nn.Module] = layer.__dict__[_ORIGINAL].layer_class
    if issubclass(original, LazyModuleMixin) and not isinstance(layer, LazyModuleMixin):
        assert original.cls_to_become is not None
        original = original.cls_to_become
    conversion = conversion_of(original)
    if layer_class is not (conversion.scoped_class if conversion else original):
        raise TypeError(
            f"{name or 'model'}: expected the class that convert gave it, got "
            f"{named(type(layer))}; undo first what has changed it"
        )
    if issubclass(original, torch.nn.SyncBatchNorm):
        try:
            groups.named(layer.group_name)
        except Exception as error:
            raise RuntimeError(
                f"{name or 'model'}: expected its process group, {layer.group_name}, in this "
                "process, got none; set its process_group to None first"
            ) from error
    return original


def _revert_layer(layer: BatchNorm, original_class: type[torch.nn.Module]) -> None:
    attributes = layer.__dict__
    if issubclass(original_class, torch.nn.SyncBatchNorm):
        attributes["process_group"] = groups.named(layer.group_name)
    if not issubclass(original_class, BatchNorm):
        for key in (*_SETTINGS, *_STATE):
            attributes.pop(key, None)
    original: _Original = attributes.pop(_ORIGINAL)
    for key in original.added:
        attributes.pop(key, None)
    if issubclass(original_class, BatchNorm):
        layer.scope = original.settings["_scope"]  # which recomputations may ask for the other
    attributes.update(original.settings)
    set_class(layer, original_class)


def _is_torchs(layer_class: type[torch.nn.Module]) -> bool:
    return layer_class.__module__.startswith("torch.")
