# SPDX-License-Identifier: Apache-2.0
"""The layers of a model, chosen by qualified name."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

import torch

Layer = TypeVar("Layer", bound=torch.nn.Module)
Patterns = str | Iterable[str]

_NAMES_SHOWN = 5


def check_model(model: object) -> None:
    """Raise unless ``model`` is one."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got a {type(model).__name__}")


def named_layers(
    model: torch.nn.Module,
    layer_class: type[Layer],
    include: Patterns | None,
    exclude: Patterns | None,
) -> list[tuple[str, Layer]]:
    """Return the layers of a class that the patterns select by qualified name, each once."""
    check_model(model)
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, layer_class)]
    return selected(layers, include, exclude)


def selected(
    layers: list[tuple[str, Layer]], include: Patterns | None, exclude: Patterns | None
) -> list[tuple[str, Layer]]:
    """Return those of the layers that the patterns select by name."""
    if not layers:
        return []
    names = [name for name, _ in layers]
    included = names if include is None else _matching("include", include, names)
    excluded = _matching("exclude", () if exclude is None else exclude, names)
    chosen = set(included) - set(excluded)
    return [(name, layer) for name, layer in layers if name in chosen]


def _matching(argument: str, patterns: Patterns, names: list[str]) -> list[str]:
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        patterns = [patterns]
    patterns = list(patterns)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{argument}: expected patterns of names, got {patterns}")
    matches = {pattern: [n for n in names if fnmatchcase(n, pattern)] for pattern in patterns}
    without = [pattern for pattern in patterns if not matches[pattern]]
    if without:
        shown = ", ".join(map(repr, names[:_NAMES_SHOWN]))
        more = ", ..." if len(names) > _NAMES_SHOWN else ""
        raise ValueError(
            f"{argument}: expected patterns that match a layer's name ({shown}{more}), got "
            + ", ".join(map(repr, without))
        )
    return [name for found in matches.values() for name in found]


def layers_in_training(
    model: torch.nn.Module,
    layer_class: type[Layer],
    include: Patterns | None,
    exclude: Patterns | None,
) -> list[tuple[str, Layer]]:
    """Return the layers of :func:`named_layers`, those in evaluation only if they are included."""
    layers = named_layers(model, layer_class, include, exclude)
    return [(name, m) for name, m in layers if include is not None or m.training]
