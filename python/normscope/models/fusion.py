# SPDX-License-Identifier: Apache-2.0
"""Sequences whose layers also apply the activations that follow them.

Only the class of the torch.nn.Sequential changes. Each call of it decides anew which layers can
apply their activations, so that layers and activations can be replaced, hooked and called like any
others.
"""

from __future__ import annotations

import copyreg
from collections.abc import Container
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Proxy

from normscope._binding import ops
from normscope._binding.torch_private import (
    children_of,
    has_any_global_hook,
    has_hooks,
    is_compiled,
)
from normscope.layers.activated import MODULES, activation_of
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.ending import Activated, Activation
from normscope.models.derived import class_of, set_class


class FusedSequential(nn.Sequential):
    """A torch.nn.Sequential in which marked layers apply the activations that follow them."""

    original: ClassVar[type[nn.Sequential]] = nn.Sequential

    def forward(self, input: Any) -> Any:  # noqa: ANN401 - torch's
        """Call the modules in order, without the activations that layers apply."""
        is_left_to_compiler = torch.compiler.is_compiling() and not ops.activations_are_in_ops()
        if is_left_to_compiler or isinstance(input, Proxy) or has_any_global_hook():
            return super().forward(input)  # type: ignore[no-untyped-call]
        modules = list(self)
        following: list[nn.Module | None] = [*modules[1:], None]
        is_applied = False
        for module, after in zip(modules, following, strict=True):
            if is_applied:
                is_applied = False
                continue
            activation = None if after is None else _applicable(module, after)
            if activation is None:
                input = module(input)
            else:
                assert isinstance(module, BatchNorm)
                input = module._train(input, None, Activated(*activation))
                is_applied = True
        return input

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
        """Name a class that can be imported: this one, or the original of a derived one."""
        reduced: Any = super().__reduce_ex__(protocol)
        create, arguments, *state = reduced
        if create is copyreg.__newobj__ and type(self) is not FusedSequential:  # type: ignore[attr-defined]
            create, arguments = _new, (self.original,)
        return create, arguments, *state


def fuse(model: nn.Module, layers: Container[nn.Module]) -> None:
    """Let those of the layers that precede an activation in a torch.nn.Sequential apply it."""
    for sequence in model.modules():
        if not isinstance(sequence, nn.Sequential) or not _calls_in_order(sequence):
            continue
        children = [child for child in children_of(sequence).values() if child is not None]
        pairs = [(layer, after) for layer, after in pairwise(children) if layer in layers]
        fusible = [layer for layer, after in pairs if type(after) in MODULES.values()]
        for layer in fusible:
            layer.__dict__["_applies_activation"] = True
        if fusible and not isinstance(sequence, FusedSequential):
            set_class(sequence, _fused_class(class_of(sequence)))  # type: ignore[arg-type]


def split(model: nn.Module) -> None:
    """Undo :func:`fuse`."""
    for module in model.modules():
        module.__dict__.pop("_applies_activation", None)
        if isinstance(module, FusedSequential):
            set_class(module, module.original)


def _applicable(layer: nn.Module, after: nn.Module) -> tuple[Activation, float] | None:
    """Return the activation that the layer can apply now; None if both have to be called."""
    if (
        isinstance(layer, BatchNorm)
        and layer._applies_activation
        and layer.training
        and type(layer).forward is BatchNorm.forward
        and "forward" not in vars(layer)
        and not has_hooks(layer)
        and not is_compiled(layer)
        and not is_compiled(after)
    ):
        return activation_of(after)
    return None


def _calls_in_order(sequence: nn.Sequential) -> bool:
    own = type(sequence)
    forward = nn.Sequential.forward
    return (
        own.forward in (forward, FusedSequential.forward)
        and own.__iter__ is nn.Sequential.__iter__
        and "forward" not in vars(sequence)
    )


# By the class that it derives from.
_fused_classes: dict[type[nn.Sequential], type[FusedSequential]] = {nn.Sequential: FusedSequential}


def _fused_class(original: type[nn.Sequential]) -> type[FusedSequential]:
    if original not in _fused_classes:
        name, bases = f"Fused{original.__name__}", (FusedSequential, original)
        _fused_classes[original] = type(name, bases, {"original": original})
    return _fused_classes[original]


def _new(original: type[nn.Sequential]) -> FusedSequential:
    fused_class = _fused_class(original)
    return fused_class.__new__(fused_class)
