# SPDX-License-Identifier: Apache-2.0
"""Scopes that change during training."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from normscope._binding import groups
from normscope._binding.torch_private import is_compiled, recompile_limit
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.count import ran_in_graph
from normscope.layers.scope import Scope
from normscope.models.selection import Patterns, check_model, named_layers, selected

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def set_scope(
    model: torch.nn.Module,
    scope: Scope | str,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
) -> None:
    """Change the scope of layers, at any time between two steps of the training.

    All ranks have to make the same change at the same step. Nothing else changes: each layer keeps
    its process group, its rule for slices and its name. A compiled model is recompiled when it
    first runs with a scope. A backward uses the scope of its forward. So does a recomputation, if
    the thread that runs the forwards calls this function.

    Args:
        model: A model with layers of normscope, or a single layer.
        scope: Who shares statistics from now on.
        include: Patterns of qualified names (as in fnmatch: ``"backbone.*"``); None for all.
        exclude: Patterns of qualified names that are left unchanged; None for none.

    Raises:
        ValueError: If the scope is malformed, the model has no layer of normscope, or a pattern
            matches none of them. Nothing has been changed then.

    Example:
        >>> from normscope import BatchNorm1d
        >>> model = torch.nn.Sequential(BatchNorm1d(8), BatchNorm1d(8))
        >>> set_scope(model, "local", exclude="0")
        >>> [str(layer.scope) for layer in model]
        ['world', 'local']
    """
    scope = Scope(str(scope))
    layers = named_layers(model, BatchNorm, None, None)
    if not layers:
        raise ValueError(
            "model: expected layers of normscope (normscope.convert makes them), got "
            f"{type(model).__qualname__}, which has none"
        )
    for _, layer in selected(layers, include, exclude):
        layer.scope = scope


class ProgressiveScope:
    """A schedule that widens, or otherwise changes, the scope during training.

    From step ``milestones[i]`` on, the layers have ``scopes[i]``. It is used like an
    ``lr_scheduler``: create it before the first step, which gives the layers ``scopes[0]``; call
    ``step()`` after each step of the optimizer, on every rank; and save its state in the
    checkpoint. To give layers different schedules, use several ``ProgressiveScope`` with different
    patterns.

    Narrow scopes need little communication, and their noise regularizes; wide scopes give
    statistics that are close to those of evaluation. This is our interpretation of the progressive
    batch normalization of Qin et al. (2019), whose schedule is not public.

    Args:
        model: A model with layers of normscope.
        scopes: The scopes, in order.
        milestones: The step at which each scope begins: first 0, then increasing.
        include: Patterns of qualified names, as for :func:`set_scope`.
        exclude: As for :func:`set_scope`.

    Warns if the model is compiled and there are more scopes than ``torch.compile`` compiles it for.

    Raises:
        ValueError: If there is not one milestone for each scope, or they do not begin with 0 or do
            not increase; further as :func:`set_scope` raises it.

    Example:
        >>> from normscope import BatchNorm1d
        >>> layer = BatchNorm1d(8)
        >>> schedule = ProgressiveScope(layer, ["local", "group:2", "world"], [0, 500, 1000])
        >>> for _ in range(500):
        ...     schedule.step()
        >>> str(layer.scope)
        'group:2'
    """

    def __init__(
        self,
        model: torch.nn.Module,
        scopes: Sequence[Scope | str],
        milestones: Sequence[int],
        include: Patterns | None = None,
        exclude: Patterns | None = None,
    ) -> None:
        check_model(model)
        self._scopes = [Scope(str(scope)) for scope in scopes]
        self._milestones = list(milestones)
        _check_milestones(self._scopes, self._milestones)
        self._model = model
        self._include = _kept(include)
        self._exclude = _kept(exclude)
        self._last_step = 0
        self._has_warned = False
        self._warn_of_recompilations(stacklevel=3)
        self._apply()

    @classmethod
    def doubling(
        cls,
        model: torch.nn.Module,
        total_steps: int,
        include: Patterns | None = None,
        exclude: Patterns | None = None,
        *,
        process_group: ProcessGroup | DeviceMesh | None = None,
    ) -> ProgressiveScope:
        """Use ``local``, ``group:2``, ``group:4``, ..., ``world`` for equal parts of the steps.

        Args:
            model: A model with layers of normscope.
            total_steps: The steps of the whole training.
            include: Patterns of qualified names, as for :func:`set_scope`.
            exclude: As for :func:`set_scope`.
            process_group: The ranks that the layers' ``world`` means, or a mesh of one dimension;
                None for the default group, or for a single rank if there is none.

        Raises:
            ValueError: If there are fewer steps than scopes; further as :func:`set_scope` raises
                it.

        Example:
            >>> from normscope import BatchNorm1d
            >>> str(ProgressiveScope.doubling(BatchNorm1d(8), total_steps=1000).scope)
            'local'
        """
        scopes = _doubling_scopes(groups.size_of(process_group))
        if total_steps < len(scopes):
            raise ValueError(
                f"total_steps: expected at least {len(scopes)}, one for each of "
                f"{', '.join(scopes)}, got {total_steps}"
            )
        milestones = [i * total_steps // len(scopes) for i in range(len(scopes))]
        return cls(model, scopes, milestones, include, exclude)

    @property
    def scope(self) -> Scope:
        """The current scope of the layers."""
        return self._scopes[bisect_right(self._milestones, self._last_step) - 1]

    def step(self) -> None:
        """Count a step of the training, and change the scope if the next one begins."""
        before = self.scope
        if self._last_step < self._milestones[-1]:
            self._warn_of_recompilations(stacklevel=3)
        self._last_step += 1
        if self.scope != before:
            self._apply()

    def state_dict(self) -> dict[str, int]:
        """Return the position in the schedule, without the schedule itself.

        A checkpoint can thus be used with another number of ranks, for which ``doubling`` has
        other scopes.
        """
        return {"last_step": self._last_step}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Restore the position in the schedule, and set the scope of the layers.

        Raises:
            ValueError: If it is not the state of a schedule.
        """
        last_step = state_dict.get("last_step") if isinstance(state_dict, Mapping) else None
        if not isinstance(last_step, int) or last_step < 0:
            raise ValueError(
                "state_dict: expected last_step, an int of at least 0, got " + repr(state_dict)
            )
        self._last_step = last_step
        self._apply()

    def _warn_of_recompilations(self, stacklevel: int) -> None:
        """Warn once if torch.compile will not compile the model for all scopes."""
        if self._has_warned or not any(map(_runs_compiled, self._model.modules())):
            return
        limit, count = recompile_limit(), len(set(self._scopes))
        if count > limit:
            self._has_warned = True
            warnings.warn(
                f"scopes: expected at most {limit} for a compiled model, which torch compiles once "
                f"for each, got {count}; torch._dynamo.config.recompile_limit sets this limit",
                stacklevel=stacklevel,
            )

    def _apply(self) -> None:
        set_scope(self._model, self.scope, self._include, self._exclude)


def _runs_compiled(module: torch.nn.Module) -> bool:
    """Return whether torch.compile has compiled the module, or a layer's last call."""
    return is_compiled(module) or (isinstance(module, BatchNorm) and ran_in_graph(module))


def _check_milestones(scopes: list[Scope], milestones: list[int]) -> None:
    if not scopes or len(milestones) != len(scopes):
        raise ValueError(
            f"milestones: expected one for each scope, and at least one, got {milestones} for "
            f"{[str(scope) for scope in scopes]}"
        )
    increasing = all(a < b for a, b in pairwise(milestones))
    if milestones[0] != 0 or not increasing:
        raise ValueError(f"milestones: expected 0 and then increasing steps, got {milestones}")


def _doubling_scopes(ranks: int) -> list[str]:
    groups = [f"group:{2**i}" for i in range(1, ranks.bit_length()) if 2**i < ranks]
    return ["local", *groups, *(["world"] if ranks > 1 else [])]


def _kept(patterns: Patterns | None) -> Patterns | None:
    """Return the patterns in a form that can be iterated over more than once."""
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        return patterns
    return tuple(patterns)
