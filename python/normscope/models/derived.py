# SPDX-License-Identifier: Apache-2.0
"""Layers whose class torch has replaced by one that it derived from it while the program ran.

torch.nn.utils.parametrize derives a class for each layer, which has a property for each
parametrized tensor; fully_shard and replicate of torch.distributed derive one for each class.
"""

from __future__ import annotations

import sys
from weakref import WeakValueDictionary

import torch

# Members that Python adds to every new class.
_OF_EVERY_CLASS = ("__dict__", "__weakref__", "__doc__")

# By bases: the classes with several, which layers can share.
_shared: WeakValueDictionary[tuple[type, ...], type] = WeakValueDictionary()


def class_of(layer: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the layer's class before torch derived others from it."""
    layer_class = type(layer)
    while _is_derived(layer_class):
        layer_class = layer_class.__bases__[-1]
    return layer_class


def set_class(layer: torch.nn.Module, layer_class: type[torch.nn.Module]) -> None:
    """Change the layer's class; what torch derived from the old one, it gets of the new one.

    Copies of a parametrized layer share its class, which must not change: the layer gets a new
    class with the same properties. ``remove_parametrizations`` handles it in the same way as
    torch's.
    """
    layer.__class__ = _derived_again(type(layer), layer_class)


def _is_derived(layer_class: type) -> bool:
    """Return whether the class is one of torch that its module does not have."""
    module = sys.modules.get(layer_class.__module__)
    of_torch = layer_class.__module__.startswith("torch.")
    return of_torch and getattr(module, layer_class.__name__, None) is not layer_class


def _derived_again(derived: type, layer_class: type[torch.nn.Module]) -> type[torch.nn.Module]:
    if not _is_derived(derived):
        return layer_class
    *others, own = derived.__bases__
    base = _derived_again(own, layer_class)
    members = {key: m for key, m in vars(derived).items() if key not in _OF_EVERY_CLASS}
    name = derived.__name__.removesuffix(own.__name__) + base.__name__
    if not others:
        return type(name, (base,), members)
    _shared[derived.__bases__] = derived  # for the way back
    bases = (*others, base)
    return _shared.setdefault(bases, type(name, bases, members))
