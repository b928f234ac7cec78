# SPDX-License-Identifier: Apache-2.0
"""A graph module that keeps the module tree of the model that it was made from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import reduce_graph_module

Replaced = Mapping[torch.nn.Module, torch.nn.Module]

# The attributes that state_dict reads. By itself, torch.fx keeps only what the graph uses.
_OF_STATE = (
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class FusedModule(fx.GraphModule):
    """A torch.fx.GraphModule with all modules, parameters and buffers of its root, used or not."""

    def __init__(
        self,
        root: torch.nn.Module | dict[str, Any],
        graph: fx.Graph,
        class_name: str = "FusedModule",
    ) -> None:
        super().__init__(root, graph, class_name)
        assert isinstance(root, torch.nn.Module)
        for attribute in _OF_STATE:
            self.__dict__[attribute] = root.__dict__[attribute]

    def _deepcopy_init(self) -> Callable[..., None]:
        return FusedModule.__init__

    def __reduce__(self) -> tuple[Any, ...]:
        _, (body, imports) = super().__reduce__()
        return _unpickled, (body, imports, type(self).__name__)


def _unpickled(body: dict[str, Any], imports: str, class_name: str) -> FusedModule:
    graph = reduce_graph_module(dict(body), imports).graph
    assert isinstance(graph, fx.Graph)
    root = torch.nn.Module()
    root.__dict__.update({name: body[name] for name in (*_OF_STATE, "training")})
    return FusedModule(root, copy.deepcopy(graph), class_name)  # the graph already has an owner


def tree_with(model: torch.nn.Module, replaced: Replaced) -> torch.nn.Module:
    """Return the model's module tree with some modules replaced; all others are shared.

    A module that contains a replaced one becomes a plain torch.nn.Module, which cannot be called:
    the original forward refers to the module before its replacement. It shares the parameter and
    buffer dicts of the original: a tensor that is replaced in one is replaced in both.
    """
    copies: dict[torch.nn.Module, torch.nn.Module] = dict(replaced)

    def copied(module: torch.nn.Module) -> torch.nn.Module:
        if module not in copies:
            children = {name: m and copied(m) for name, m in module._modules.items()}
            same = all(m is module._modules[name] for name, m in children.items())
            copies[module] = module if same and module is not model else _shell(module, children)
        return copies[module]

    return copied(model)


def _shell(module: torch.nn.Module, children: dict[str, torch.nn.Module | None]) -> torch.nn.Module:
    shell = torch.nn.Module()
    shell.__dict__.update(module.__dict__)
    shell.__dict__["_modules"] = children
    return shell
