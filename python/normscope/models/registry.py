# SPDX-License-Identifier: Apache-2.0
"""The classes that ``convert`` gives to layers, and how to register further ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from normscope._binding.torch_private import TorchBatchNorm
from normscope.layers.batch_norm import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d
from normscope.layers.lazy import LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d

Layer = TypeVar("Layer", bound=TorchBatchNorm)
Attributes = Callable[[Layer], Mapping[str, Any]]


@dataclass(frozen=True)
class Conversion:
    """How the layers of a class are converted.

    Args:
        scoped_class: The class that they get.
        attributes: Computes additional attributes from the layer; None for none.
    """

    scoped_class: type[BatchNorm]
    attributes: Attributes[Any] | None = None

    def values_of(self, layer: TorchBatchNorm) -> dict[str, Any]:
        """Return the additional attributes of a layer.

        Raises:
            TypeError: If one is a tensor or a module, which torch.nn.Module stores elsewhere.
        """
        values = dict(self.attributes(layer)) if self.attributes else {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor | torch.nn.Module):
                raise TypeError(
                    f"attributes of {named(type(layer))}: expected plain values for layers, got "
                    f"{name}, a {type(value).__qualname__}"
                )
        return values


_CONVERSIONS: dict[type[torch.nn.Module], Conversion] = {
    torch.nn.BatchNorm1d: Conversion(BatchNorm1d),
    torch.nn.BatchNorm2d: Conversion(BatchNorm2d),
    torch.nn.BatchNorm3d: Conversion(BatchNorm3d),
    torch.nn.LazyBatchNorm1d: Conversion(LazyBatchNorm1d),
    torch.nn.LazyBatchNorm2d: Conversion(LazyBatchNorm2d),
    torch.nn.LazyBatchNorm3d: Conversion(LazyBatchNorm3d),
}

# By module of another library: the module of normscope that registers its classes. It is imported
# when a layer of that library is converted; the program has imported the library by then.
_LIBRARIES = {"timm.layers": "normscope.models.timm"}

_SCOPED_BASES: dict[type[torch.nn.Module], type[BatchNorm]] = {
    torch.nn.BatchNorm1d: BatchNorm1d,
    torch.nn.BatchNorm2d: BatchNorm2d,
    torch.nn.BatchNorm3d: BatchNorm3d,
}


def register_conversion(
    layer_class: type[Layer],
    scoped_class: type[BatchNorm],
    *,
    attributes: Attributes[Layer] | None = None,
) -> None:
    """Register how ``convert`` converts a class that derives from torch's batch normalization.

    A converted layer remains the same object: its class becomes ``scoped_class``, without a call of
    ``__init__``, and all its attributes are kept. ``revert`` restores ``layer_class``. This applies
    only to layers of exactly this class, because a derived class may add something.

    If ``layer_class`` calls ``super().forward``, ``scoped_class`` only has to derive from it and
    from normscope's class, in this order, as in the example. If it calls torch's function instead,
    ``scoped_class`` needs its own forward.

    Call this function at the top level of the module that defines ``scoped_class``: unpickling a
    converted model imports that module.

    Args:
        layer_class: The class that ``convert`` does not know.
        scoped_class: The class that its layers get. It derives from :class:`normscope.BatchNorm`,
            or from :class:`normscope.BatchNorm2d` if ``layer_class`` derives from
            torch.nn.BatchNorm2d, and so on. If it also derives from ``layer_class``, ``isinstance``
            gives the same results as before.
        attributes: A function of a layer that returns the attributes that only ``scoped_class``
            has, as a mapping of names to plain values, neither tensors nor modules. ``revert``
            removes them. None for no attributes.

    Raises:
        TypeError: If ``layer_class`` does not derive from torch's batch normalization, or derives
            from normscope's; or if ``scoped_class`` does not derive from the class named above.
        ValueError: If ``layer_class`` is already registered with another class or attributes.

    Example:
        >>> from normscope import BatchNorm2d, convert
        >>> class Scaled(torch.nn.BatchNorm2d):
        ...     gain = 2.0
        ...
        ...     def forward(self, input: torch.Tensor) -> torch.Tensor:
        ...         return self.gain * super().forward(input)
        >>> class ScopedScaled(Scaled, BatchNorm2d):
        ...     pass
        >>> register_conversion(Scaled, ScopedScaled)
        >>> layer = convert(Scaled(3), "slices:2")
        >>> type(layer).__name__, isinstance(layer, Scaled), str(layer.scope)
        ('ScopedScaled', True, 'slices:2')
    """
    _check_layer_class(layer_class)
    _check_scoped_class(layer_class, scoped_class)
    if attributes is not None and not callable(attributes):
        raise TypeError(
            f"attributes: expected a function of a layer, got {type(attributes).__qualname__}"
        )
    conversion = Conversion(scoped_class, attributes)
    known = _CONVERSIONS.setdefault(layer_class, conversion)
    if known != conversion:
        differs = "with other attributes " if known.scoped_class is scoped_class else ""
        raise ValueError(
            f"layer_class: expected one that is not registered yet, got {named(layer_class)}, "
            f"which is registered {differs}for {named(known.scoped_class)}"
        )


def conversion_of(layer_class: type[torch.nn.Module]) -> Conversion | None:
    """Return the conversion for layers of exactly this class; None if there is none."""
    if layer_class not in _CONVERSIONS:
        for library, adapter in _LIBRARIES.items():
            package = library.partition(".")[0]
            if layer_class.__module__.partition(".")[0] == package and library in sys.modules:
                importlib.import_module(adapter)
    return _CONVERSIONS.get(layer_class)


def is_name_of_layer(name: str) -> bool:
    """Return whether a class with this name has a conversion."""
    return any(layer_class.__name__ == name for layer_class in _CONVERSIONS)


def named(layer_class: type) -> str:
    """Return the name of a class for errors."""
    return f"{layer_class.__module__}.{layer_class.__qualname__}"


def _check_layer_class(layer_class: object) -> None:
    got, why = repr(layer_class), ""
    if isinstance(layer_class, type):
        got = named(layer_class)
        if issubclass(layer_class, BatchNorm):
            why = ", whose layers have a scope and need no conversion"
        elif issubclass(layer_class, TorchBatchNorm):
            return
    raise TypeError(
        "layer_class: expected a class that derives from torch's batch normalization, got "
        f"{got}{why}"
    )


def _check_scoped_class(layer_class: type[torch.nn.Module], scoped_class: object) -> None:
    wanted = next((s for t, s in _SCOPED_BASES.items() if issubclass(layer_class, t)), BatchNorm)
    if isinstance(scoped_class, type) and issubclass(scoped_class, wanted):
        return
    got = named(scoped_class) if isinstance(scoped_class, type) else repr(scoped_class)
    raise TypeError(
        f"scoped_class: expected a class that derives from normscope.{wanted.__name__} for layers "
        f"of {named(layer_class)}, got {got}"
    )
