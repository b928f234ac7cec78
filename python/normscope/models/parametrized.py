# SPDX-License-Identifier: Apache-2.0
"""Layers whose class torch.nn.utils.parametrize has replaced."""

from __future__ import annotations

import torch
from torch.nn.utils import parametrize

# Members that Python adds to every new class.
_OF_EVERY_CLASS = ("__dict__", "__weakref__", "__doc__")


def class_of(layer: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the layer's class without its parametrizations."""
    return parametrize.type_before_parametrizations(layer)


def set_class(layer: torch.nn.Module, layer_class: type[torch.nn.Module]) -> None:
    """Change the layer's class and keep its parametrizations.

    torch derives a class from the layer's class, with a property for each parametrized tensor.
    Copies of the layer share that class, and must not change. This layer therefore gets a new class
    with the same properties. ``remove_parametrizations`` handles it in the same way as torch's.
    """
    if not parametrize.is_parametrized(layer):
        layer.__class__ = layer_class
        return
    members = {key: m for key, m in vars(type(layer)).items() if key not in _OF_EVERY_CLASS}
    name = f"Parametrized{layer_class.__name__}"
    layer.__class__ = type(name, (layer_class,), members)
