# SPDX-License-Identifier: Apache-2.0
"""A graph whose module tree is that of the model that it was made of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import reduce_graph_module

Replaced = Mapping[torch.nn.Module, torch.nn.Module]

# What state_dict goes by. torch.fx keeps of these what the graph uses.
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
    return FusedModule(root, copy.deepcopy(graph), class_name)  # the graph has an owner already


def tree_with(model: torch.nn.Module, replaced: Replaced) -> torch.nn.Module:
    """The model's tree with other modules in some places; all others are the model's own.

    What contains one of those is a plain torch.nn.Module, which cannot be called: its forward
    speaks of the module that was there before. It has the parameters and buffers of the original,
    as the same dicts, so that what replaces a tensor in one of them does so in both.
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
