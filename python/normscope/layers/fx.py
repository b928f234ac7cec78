# SPDX-License-Identifier: Apache-2.0
"""Layers in torch.fx graphs."""

from __future__ import annotations

import warnings
from typing import cast

import torch
from torch import fx


def call_of_module(
    module: torch.nn.Module, x: fx.Proxy, *arguments: object, mask: object = None
) -> torch.Tensor:
    """Add a call of a layer to the graph of ``x``, as torch.fx does for the layers of torch.nn.

    A tracer traces into the modules of other libraries, and has no list of exceptions to register
    with: the forward itself has to add the call.

    Warns under torch.ao.quantization, which ignores layers that it does not know.

    Raises:
        TypeError: If the layer itself is traced, because a graph has no name for its root; or if
            its class overrides forward, because the graph would then run the layer's whole forward
            in place of the inner one, and the overriding part twice.
        NameError: If the traced model does not contain the layer.
    """
    tracer = cast("fx.Tracer", x.tracer)
    name = tracer.path_of_module(module)
    if not name:
        raise TypeError(
            f"root: expected a model that has the layer, got the layer itself, a "
            f"{type(module).__name__}; trace torch.nn.Sequential(layer)"
        )
    if type(module).forward.__module__.partition(".")[0] != "normscope":
        raise TypeError(
            f"{name}: expected a layer with a forward of normscope, got a {type(module).__name__} "
            "with its own, part of which a graph would run twice; trace with a torch.fx.Tracer "
            "whose is_leaf_module returns True for it"
        )
    if any(base.__module__.startswith("torch.ao.") for base in type(tracer).__mro__):
        warnings.warn(
            f"{name}: torch.ao.quantization only fuses and quantizes torch's own layers, and got a "
            f"{type(module).__name__} of normscope, which it leaves unchanged; give it "
            "normscope.to_torch(model)",
            stacklevel=2,
        )
    keywords = {} if mask is None else {"mask": mask}
    call = tracer.create_proxy("call_module", name, (x, *arguments), keywords)
    return cast("torch.Tensor", call)
