# SPDX-License-Identifier: Apache-2.0
"""Scopes that follow measurements during training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from normscope import _library, _process_group
from normscope._layers import Patterns, input_of, named_layers
from normscope.independent_values import PartMoments, independent_values
from normscope.modules import BatchNorm
from normscope.recommendation import DEFAULT_INDEPENDENT_VALUES
from normscope.schedule import kept
from normscope.scope import Scope

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.utils.hooks import RemovableHandle

# Weight of a new measurement in the moving average.
_MOMENTUM = 0.3

# A layer only switches to a narrower scope that reaches this multiple of the wanted number.
_HYSTERESIS = 1.5


class AdaptiveScope:
    """Measures layers repeatedly during training, and changes their scopes if necessary.

    Used like :class:`ProgressiveScope`: create it before the first step, call ``step()`` after each
    step of the optimizer on every rank, and save its state in the checkpoint. All layers start with
    ``world``. In every ``every``-th step the ranks exchange the moments of the layers' inputs, in
    one small exchange. Each layer then gets the narrowest scope whose norm batch is worth the
    wanted number of independent values, measured as by :func:`recommend_scopes`. A scope becomes
    wider as soon as necessary, but narrower only if the narrower one exceeds the number by half.
    All ranks always agree: they follow rank 0.

    The moments are taken from the forwards of the training itself: measuring needs no additional
    forward. A compiled graph does not expose the inputs of its layers, and is not measured. If a
    layer runs several times in a step, the call with the fewest elements counts. A layer keeps its
    scope if its input on some rank has no elements or is not finite.

    Args:
        model: A model with layers of normscope (for DistributedDataParallel, its ``module``).
        independent_values: The number that a norm batch should be worth, at least 2.
        every: Steps from one measurement to the next; the first is at the first step.
        include: Patterns of qualified names, as for :func:`set_scope`.
        exclude: As for :func:`set_scope`; excluded layers keep their scope.
        process_group: The ranks that the layers' ``world`` means; None for the default group. With
            a single rank or no group there is nothing to choose.

    Raises:
        ValueError: If the wanted number or ``every`` is too small; further as :func:`set_scope`
            raises it.

    Example:
        >>> from normscope import BatchNorm1d
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), BatchNorm1d(8))
        >>> scopes = AdaptiveScope(model, every=50)
        >>> model(torch.randn(16, 4)).sum().backward()
        >>> scopes.step()
        >>> scopes.scopes
        {'1': Scope(text='world')}
    """

    def __init__(
        self,
        model: torch.nn.Module,
        independent_values: float = DEFAULT_INDEPENDENT_VALUES,
        every: int = 100,
        include: Patterns | None = None,
        exclude: Patterns | None = None,
        *,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if not independent_values >= 2:
            raise ValueError(f"independent_values: expected at least 2, got {independent_values}")
        if every < 1:
            raise ValueError(f"every: expected at least 1, got {every}")
        self._layers = dict(named_layers(model, BatchNorm, kept(include), kept(exclude)))
        if not self._layers:
            raise ValueError(
                "model: expected layers of normscope (normscope.convert makes them), got "
                f"{type(model).__qualname__}, which has none"
            )
        self._wanted = float(independent_values)
        self._every = every
        self._group = _process_group.in_use(process_group)
        self._ranks = 1 if self._group is None else self._group.size()
        self._sizes = [size for size in range(1, self._ranks) if self._ranks % size == 0]
        self._last_step = 0
        self._noise: dict[str, list[float]] = {}
        self._history: list[tuple[int, dict[str, str]]] = []
        self._moments: dict[str, PartMoments] = {}
        self._hooks: list[RemovableHandle] = []
        for layer in self._layers.values():
            layer.scope = Scope.world()
        self._note()
        self._watch_if_due()

    @property
    def scopes(self) -> dict[str, Scope]:
        """The current scope of each layer."""
        return {name: layer.scope for name, layer in self._layers.items()}

    @property
    def history(self) -> list[tuple[int, dict[str, str]]]:
        """All changes so far, as the step from which they applied and the scopes of all layers."""
        return list(self._history)

    @property
    def independent_values(self) -> dict[str, float]:
        """The number that one rank's batch was worth at the last measurement, for each layer."""
        return {name: 2 / noise[0] for name, noise in self._noise.items() if noise[0] > 0}

    def step(self) -> None:
        """Count a step of the training; if a measurement is due, measure and choose scopes."""
        if self._hooks:
            self._forget_hooks()
            self._measure()
            self._choose()
        self._last_step += 1
        self._watch_if_due()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the measurements, and the scopes of the layers."""
        return {
            "last_step": self._last_step,
            "ranks": self._ranks,
            "noise": {name: list(values) for name, values in self._noise.items()},
            "scopes": {name: str(scope) for name, scope in self.scopes.items()},
            "history": [(step, dict(scopes)) for step, scopes in self._history],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state; if the number of ranks has changed, all layers start with ``world``.

        Raises:
            ValueError: If the state does not have the layers of this model.
        """
        scopes = state_dict.get("scopes")
        if not isinstance(scopes, Mapping) or set(scopes) != set(self._layers):
            raise ValueError(
                f"state_dict: expected scopes of {', '.join(self._layers)}, got {scopes!r}"
            )
        self._last_step = int(state_dict["last_step"])
        self._history = [(step, dict(of_step)) for step, of_step in state_dict["history"]]
        # With another number of ranks there are other scopes, and the measurements do not apply.
        is_of_these = state_dict["ranks"] == self._ranks
        self._noise = (
            {name: list(values) for name, values in state_dict["noise"].items()}
            if is_of_these
            else {}
        )
        for name, scope in scopes.items():
            self._layers[name].scope = scope if is_of_these else Scope.world()
        self._forget_hooks()
        self._watch_if_due()

    def _watch_if_due(self) -> None:
        if self._ranks == 1 or self._last_step % self._every != 0:
            return
        self._moments = {}
        for name, layer in self._layers.items():
            look = _Look(name, self._moments)
            self._hooks.append(layer.register_forward_hook(look, with_kwargs=True))

    def _forget_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _measure(self) -> None:
        """Update the noise of all layers in one exchange; without input on a rank it stays."""
        assert self._group is not None
        own = [
            self._moments.get(name, PartMoments.of_nothing(layer.num_features))
            for name, layer in self._layers.items()
        ]
        message = torch.cat([moments.rows.flatten() for moments in own])
        rows = _library.gather(message, self._group.group_name, "AdaptiveScope")
        sizes = [moments.rows.numel() for moments in own]
        of_layers = zip(self._layers.items(), rows.split(sizes, dim=1), strict=True)
        for (name, layer), of_ranks in of_layers:
            ranks = PartMoments(of_ranks[None])
            if int((ranks.counts > 0).sum()) < self._ranks:
                continue
            new = [_noise_of(ranks, layer.eps, size) for size in self._sizes]
            if not all(map(math.isfinite, new)):
                continue
            old = self._noise.get(name, new)
            self._noise[name] = [
                before + _MOMENTUM * (now - before) for before, now in zip(old, new, strict=True)
            ]

    def _choose(self) -> None:
        """Set the scopes from rank 0's numbers: processors may round them differently."""
        assert self._group is not None
        own = [self._choice(name, layer) for name, layer in self._layers.items()]
        rows = _library.gather(
            torch.tensor(own, dtype=torch.float64), self._group.group_name, "AdaptiveScope, choice"
        )
        for layer, size in zip(self._layers.values(), rows[0].long().tolist(), strict=True):
            layer.scope = _scope_of(size, self._ranks)
        self._note()

    def _choice(self, name: str, layer: BatchNorm) -> int:
        """Return the number of ranks that should share statistics."""
        now = next(
            (size for size in self._sizes if layer.scope == _scope_of(size, self._ranks)),
            self._ranks,
        )
        noise = self._noise.get(name)
        if noise is None:
            return now
        for size, squared_error in zip(self._sizes, noise, strict=True):
            wanted = self._wanted * (_HYSTERESIS if size < now else 1)
            if squared_error * wanted <= 2:
                return size
        return self._ranks

    def _note(self) -> None:
        scopes = {name: str(scope) for name, scope in self.scopes.items()}
        if not self._history or self._history[-1][1] != scopes:
            # A choice applies from the step after the one in which it was measured.
            self._history.append((self._last_step + 1 if self._history else 0, scopes))


class _Look:
    """A hook that records the moments of a layer's input.

    In a copy of the layer, or one that was loaded from a file, the hook does nothing.
    """

    def __init__(self, name: str = "", moments: dict[str, PartMoments] | None = None) -> None:
        self._name = name
        self._moments = moments

    def __call__(
        self, layer: BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any], _y: object
    ) -> None:
        # A graph compiled now would keep recording after the hook is removed.
        if self._moments is None or not layer.training or torch.compiler.is_compiling():
            return
        x, mask = input_of(layer, args, kwargs)
        moments = PartMoments.of(x, mask=mask)
        before = self._moments.get(self._name)
        if before is None or moments.counts.item() < before.counts.item():
            self._moments[self._name] = moments

    def __reduce__(self) -> tuple[type[_Look], tuple[()]]:
        return _Look, ()


def _noise_of(ranks: PartMoments, eps: float, size: int) -> float:
    """Return the squared relative error of the variance over ``size`` ranks."""
    values = independent_values(ranks, eps, size)
    assert values is not None
    return 2 / values.value


def _scope_of(size: int, ranks: int) -> Scope:
    if size == 1:
        return Scope.local()
    return Scope.world() if size == ranks else Scope.group(size)
