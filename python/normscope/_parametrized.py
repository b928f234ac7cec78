# SPDX-License-Identifier: Apache-2.0
"""Layers that torch.nn.utils.parametrize has given a class of their own."""

from __future__ import annotations

import torch
from torch.nn.utils import parametrize

# What a new class gets by itself.
_OF_EVERY_CLASS = ("__dict__", "__weakref__", "__doc__")


def class_of(layer: torch.nn.Module) -> type[torch.nn.Module]:
    """The layer's class, without its parametrizations."""
    return parametrize.type_before_parametrizations(layer)


def set_class(layer: torch.nn.Module, layer_class: type[torch.nn.Module]) -> None:
    """Change the layer's class, and keep its parametrizations.

    torch derives a class from the layer's and puts a property into it for each tensor. Copies of
    the layer share that class, so that this one gets another with the same properties, which
    ``remove_parametrizations`` undoes as it would have undone torch's.
    """
    if not parametrize.is_parametrized(layer):
        layer.__class__ = layer_class
        return
    members = {key: m for key, m in vars(type(layer)).items() if key not in _OF_EVERY_CLASS}
    name = f"Parametrized{layer_class.__name__}"
    layer.__class__ = type(name, (layer_class,), members)
