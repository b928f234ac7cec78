# SPDX-License-Identifier: Apache-2.0
"""Layers in the graphs of torch.fx."""

from __future__ import annotations

import warnings
from typing import cast

import torch
from torch import fx


def call_of_module(
    module: torch.nn.Module, x: fx.Proxy, *arguments: object, mask: object = None
) -> torch.Tensor:
    """Put a call of a layer into the graph that ``x`` is of, as it is done for torch.nn's layers.

    A tracer goes into modules of other libraries, and there is no list to join: so their forward
    has to answer for itself.

    The quantization of torch.ao passes over what it does not know; that is warned of.

    Args:
        module: The layer.
        x: Its input.
        arguments: What else its forward takes.
        mask: The keyword of that name; None for none.

    Raises:
        TypeError: If the layer itself is traced, where a graph has no name for it; or if its class
            has a forward of its own, which the call would run inside of what it does besides.
        NameError: If the model that is traced does not have the layer.
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
            "with its own, of which a graph would do a part twice; trace with a torch.fx.Tracer "
            "whose is_leaf_module is True for it"
        )
    if any(base.__module__.startswith("torch.ao.") for base in type(tracer).__mro__):
        warnings.warn(
            f"{name}: torch.ao.quantization fuses and quantizes torch's layers alone, and got a "
            f"{type(module).__name__} of normscope, which it leaves as it is; give it "
            "normscope.to_torch(model)",
            stacklevel=2,
        )
    keywords = {} if mask is None else {"mask": mask}
    call = tracer.create_proxy("call_module", name, (x, *arguments), keywords)
    return cast("torch.Tensor", call)
