# SPDX-License-Identifier: Apache-2.0
"""Fuse layers with the additions and activations that follow them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from normscope._fused_module import FusedModule, tree_with
from normscope._pairs import FUSED, Pair, pairs_of
from normscope._traced import has_hooks, traced
from normscope.activated import OWN_ATTRIBUTES, BatchNormAct
from normscope.modules import BatchNorm

# Packages whose modules wrap another module and call it in special ways.
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo")

_OWN_STATE = (
    "state_dict",
    "load_state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
    "get_extra_state",
    "set_extra_state",
)

_NAMES_SHOWN = 5


def fuse(model: nn.Module) -> fx.GraphModule:
    """Fuse each layer of normscope with the activation that follows it.

    The model is traced with torch.fx. If a layer of normscope is followed by ReLU, ReLU6,
    LeakyReLU, SiLU or Hardswish, or by an addition and then one of these, they become a single call
    of a :class:`~normscope.BatchNormAct`. The activation may be a module, a function or a method,
    in place or not; the addition may be ``+``, ``+=``, torch.add or a method. The result computes
    the same as the model, in training and in evaluation, and its layers exchange in the same order
    on all ranks. A layer is not fused if it is called more than once, or if another part of the
    model uses one of the intermediate values.

    The model is not changed and can still be used. The result shares all its parameters, buffers
    and modules: optimizers, schedules and checkpoints work for both. A layer and its fused
    counterpart are two objects with one state, including scope and mode. Modules that contain a
    fused layer keep their names and state, but cannot be called. Python values that a forward
    reads, such as numbers and flags, are fixed to their current values.

    Fuse after ``convert``, and before the model is wrapped for data parallelism or compiled. An
    error names the module, and nothing has been changed. Parts of the model can still be fused
    separately.

    Args:
        model: A model with layers of normscope that torch.fx can trace. Arguments of its forward
            that are None by default have to stay None.

    Returns:
        A torch.fx.GraphModule with the modules of the model. If nothing can be fused, it computes
        the same as the model, and a warning is issued.

    Raises:
        TypeError: If the model is a layer itself, or a part of it is wrapped, compiled, or
            overrides how its state is saved.
        ValueError: If a layer is lazy and has seen no input.
        RuntimeError: If forward cannot be traced, differs between training and evaluation, or does
            something that a graph would drop, such as no_grad; if one of the modules to fuse has
            hooks; or if a layer is already fused with another activation.

    Example:
        >>> import torch
        >>> from normscope import convert
        >>> layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
        >>> model = convert(torch.nn.Sequential(*layers), "slices:4")
        >>> fused = fuse(model)
        >>> fused.get_submodule("1").activation
        'relu'
        >>> x = torch.randn(4, 3, 6, 6)
        >>> torch.equal(fused(x), model(x))
        True
    """
    _check_modules(model)
    graph = traced(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    pairs = pairs_of(graph, modules)
    if not pairs:
        warnings.warn(_nothing_fused(model), stacklevel=2)
    layers = {modules[str(pair.layer.target)]: pair for pair in pairs}
    _check_pairs(pairs, modules)
    _check_state(model, layers)
    for pair in pairs:
        pair.merge()
    tree = tree_with(model, {layer: _fused(layer, pair) for layer, pair in layers.items()})
    graph.lint()
    return FusedModule(tree, graph, type(model).__name__)


def _check_modules(model: nn.Module) -> None:
    if isinstance(model, BatchNorm):
        raise TypeError(
            "model: expected one whose forward calls layers, got the layer "
            f"{type(model).__qualname__} itself"
        )
    for name, module in model.named_modules():
        bases = (base.__module__ for base in type(module).__mro__)
        if module._compiled_call_impl or any(base.startswith(_WRAPPERS) for base in bases):
            raise TypeError(
                f"{name or 'model'}: expected a model before it is wrapped or compiled, got a "
                f"{type(module).__qualname__}; fuse first, and wrap the result"
            )
        if isinstance(module, BatchNorm) and isinstance(module, LazyModuleMixin):
            raise ValueError(
                f"{name or 'model'}: expected a layer that has seen an input, got a "
                f"{type(module).__qualname__} that has not; run the model once"
            )


def _check_pairs(pairs: Iterable[Pair], modules: dict[str, nn.Module]) -> None:
    for pair in pairs:
        for node in (pair.layer, pair.activation_node):
            if node.op == "call_module" and has_hooks(modules[str(node.target)]):
                raise RuntimeError(
                    f"{node.target}: expected a module without forward or backward hooks, got a "
                    f"{type(modules[str(node.target)]).__qualname__} with hooks, which would see "
                    "other values once it is fused; remove them, and add them to the fused layer"
                )
        before = modules[str(pair.layer.target)].__dict__
        for key, value in _settings(pair).items():
            if before.get(key, value) != value:
                raise RuntimeError(
                    f"{pair.layer.target}: expected {key.strip('_')} {before[key]}, with which the "
                    f"layer was fused before, got {value}; fuse a copy.deepcopy of the model"
                )


def _check_state(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Refuse models whose state would be lost.

    Modules that contain a fused layer are replaced by plain modules, without their own class.
    """
    for name, module in _containing(model, set(layers)):
        for attribute in _OWN_STATE:
            if getattr(type(module), attribute) is not getattr(nn.Module, attribute):
                raise TypeError(
                    f"{name or 'model'}: expected a module with the {attribute} of "
                    f"torch.nn.Module, got a {type(module).__qualname__} with its own, which would "
                    "be lost; fuse the parts of it instead"
                )


def _containing(model: nn.Module, layers: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    yield "", model
    for name, module in model.named_modules(remove_duplicate=False):
        if module in layers:
            parents = name.split(".")[:-1]
            for parent in accumulate(parents, "{}.{}".format):
                yield parent, model.get_submodule(parent)


def _settings(pair: Pair) -> dict[str, Any]:
    values = (pair.activation, pair.negative_slope, pair.adds_into)
    return dict(zip(OWN_ATTRIBUTES, values, strict=True))


def _fused(layer: nn.Module, pair: Pair) -> BatchNormAct:
    """Return a second object of the fused class that shares the attribute dict of the layer.

    A copy of the dict would share the tensors, but not what is assigned later: the mode, the number
    of elements seen, a scope that a schedule sets on the original layer.
    """
    layer.__dict__.update(_settings(pair))
    fused_class = FUSED[type(layer)]
    fused = fused_class.__new__(fused_class)
    object.__setattr__(fused, "__dict__", layer.__dict__)
    return fused


def _nothing_fused(model: nn.Module) -> str:
    text = (
        "fuse: expected layers of normscope that an activation follows, got none in "
        f"{type(model).__name__}"
    )
    plain = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, BatchNorm)
    ]
    if not plain:
        return text
    shown = ", ".join(plain[:_NAMES_SHOWN]) + (", ..." if len(plain) > _NAMES_SHOWN else "")
    return f"{text}; normscope.convert it first, which gives a scope to {shown}"
