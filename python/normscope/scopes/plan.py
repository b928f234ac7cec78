# SPDX-License-Identifier: Apache-2.0
"""A recommended scope for each layer, as a table and as JSON."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from normscope._binding import groups
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.scope import Scope
from normscope.models.selection import named_layers
from normscope.scopes.json_fields import read
from normscope.scopes.noise import LEAST_ELEMENTS, LEAST_SAMPLES, TRAINED_UPDATES

# A plan that sends more of the bytes of world says so in words, and why.
_NEARLY_ALL = 0.8

# The layers with the largest noise that the words name.
_NAMED = 3

# Noise moves while a model trains: the text asks for a new measurement after this many times the
# training so far.
_MEASURE_AGAIN = 10


@dataclass(frozen=True)
class Candidate:
    """A scope that a layer may get, and the noise of its statistics.

    Args:
        scope: The text of a :class:`~normscope.Scope`.
        ranks: The number of ranks that share statistics.
        noise: What the layer adds to the noise of the outputs, as a share of their variance;
            infinity if it could not be measured. 0 for ``world``.
        samples: The number of samples of the smallest norm batch.
        elements: The number of elements per channel of the smallest norm batch.
    """

    scope: str
    ranks: int
    noise: float
    samples: int
    elements: int


@dataclass(frozen=True)
class LayerPlan:
    """The measurements of a layer, and the scope that it gets.

    Args:
        layer: The qualified name.
        channels: The number of channels.
        scope: The scope that it gets.
        candidates: All scopes, from the narrowest to the widest.
        updates: The number of updates of the running statistics so far; None if there are none.
        exchange_bytes: Bytes that a rank sends per exchange, if the layer exchanges.
        exchange_seconds: Seconds that an exchange of all ranks took, including the wait; None if
            there was none.
    """

    layer: str
    channels: int
    scope: str
    candidates: tuple[Candidate, ...]
    updates: int | None
    exchange_bytes: int
    exchange_seconds: float | None

    @property
    def chosen(self) -> Candidate:
        """The candidate that was chosen."""
        return next(each for each in self.candidates if each.scope == self.scope)

    @property
    def spans_ranks(self) -> bool:
        """Whether the layer synchronizes, twice per step."""
        return self.chosen.ranks > 1

    @property
    def is_untrained(self) -> bool:
        """Whether the layer has had too few training steps, so that it gets ``world``."""
        return self.updates is not None and self.updates < TRAINED_UPDATES


@dataclass(frozen=True)
class ScopePlan:
    """A scope for each layer and the measurements behind it, made by :func:`recommend_scopes`.

    ``print(plan)`` shows a table.

    Args:
        layers: The layers in the model's order, without those that had no input.
        allowed: The limit for the noise of all layers, as a share of the outputs' variance.
        noise: The noise of the plan, the sum over its layers.
        standard_error: The standard error of ``noise``; 0 for a single batch.
        ranks: The number of ranks that the plan is made for.
        batches: The number of batches that were measured.
    """

    layers: tuple[LayerPlan, ...]
    allowed: float
    noise: float
    standard_error: float
    ranks: int
    batches: int

    @property
    def scopes(self) -> dict[str, Scope]:
        """The scope of each layer, by its qualified name."""
        return {plan.layer: Scope(plan.scope) for plan in self.layers}

    @property
    def noise_of_local(self) -> float:
        """The noise if all layers had the scope ``local``."""
        return sum(plan.candidates[0].noise for plan in self.layers)

    @property
    def updates(self) -> int | None:
        """The fewest updates of a layer's running statistics so far; None if there are none."""
        return min((plan.updates for plan in self.layers if plan.updates is not None), default=None)

    @property
    def exchanges_per_step(self) -> int:
        """Exchanges per step, in forward and backward."""
        return 2 * sum(plan.spans_ranks for plan in self.layers)

    @property
    def bytes_per_step(self) -> int:
        """Bytes that a rank sends per step, in forward and backward."""
        return 2 * sum(plan.exchange_bytes for plan in self.layers if plan.spans_ranks)

    @property
    def bytes_of_world(self) -> int:
        """Bytes that a rank sends per step if all layers have the scope ``world``."""
        return 2 * sum(plan.exchange_bytes for plan in self.layers)

    @property
    def warnings(self) -> list[str]:
        """Doubts about the plan, which :func:`recommend_scopes` issues as warnings."""
        texts = []
        untrained = [plan.layer or "model" for plan in self.layers if plan.is_untrained]
        if untrained:
            texts.append(
                f"{len(untrained)} of {len(self.layers)} layers have had fewer than "
                f"{TRAINED_UPDATES:g} training steps, and get world ({untrained[0]}, ...): the "
                "noise of initial weights says little about that of training; train with world "
                "first, then measure again"
            )
        small = [
            plan.layer or "model"
            for plan in self.layers
            if plan.candidates[-1].samples < LEAST_SAMPLES
            or plan.candidates[-1].elements < LEAST_ELEMENTS
        ]
        if small:
            texts.append(
                f"even world has fewer than {LEAST_ELEMENTS:g} elements per channel, or a single "
                f"sample, in {', '.join(small)}: more samples per step would help"
            )
        if self.batches == 1:
            texts.append("a single batch does not tell the error of the noise; measure several")
        return texts

    def apply(self, model: torch.nn.Module) -> None:
        """Give each layer of the plan its scope; other layers are not changed.

        Warns if the plan was made for another number of ranks.

        Raises:
            ValueError: If the model lacks a layer of the plan, it is not a layer of normscope, or
                it has another number of channels. Nothing has been changed then.
        """
        layers = dict(named_layers(model, BatchNorm, None, None))
        missing = [plan.layer for plan in self.layers if plan.layer not in layers]
        if missing:
            hint = next(
                (
                    f"; pass model.{wrapped}, the model in the wrapper"
                    for wrapped in ("module", "_orig_mod")
                    if all(f"{wrapped}.{name}" in layers for name in missing)
                ),
                "",
            )
            raise ValueError(
                f"model: expected layers of normscope called {', '.join(missing)}, got none{hint}"
            )
        for plan in self.layers:
            channels = layers[plan.layer].num_features
            if channels != plan.channels:
                raise ValueError(
                    f"model: expected {plan.channels} channels in {plan.layer or 'the model'}, for "
                    f"which the plan was made, got {channels}"
                )
        self._warn_of_other_ranks([layers[plan.layer] for plan in self.layers])
        for name, scope in self.scopes.items():
            layers[name].scope = scope

    def _warn_of_other_ranks(self, layers: list[BatchNorm]) -> None:
        names = {layer.group_name for layer in layers}
        # A single process may stand for any number of ranks.
        sizes = {groups.size_of(groups.named(name)) for name in names}
        others = sorted(sizes - {1, self.ranks})
        if others:
            warnings.warn(
                f"plan: made for {self.ranks} ranks, and applied among "
                f"{', '.join(map(str, others))}, where its scopes were not measured",
                stacklevel=3,
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ScopePlan:
        """Read a plan that ``save`` has written.

        Raises:
            ValueError: If the file holds no plan.
        """
        try:
            plan = read(cls, json.loads(Path(path).read_text()))
            for layer in plan.layers:
                if layer.scope not in (each.scope for each in layer.candidates):
                    raise ValueError(f"scope {layer.scope!r} of {layer.layer}, not a candidate")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected a plan of recommend_scopes, got {error}") from error
        return plan

    def __str__(self) -> str:
        """Return a table of the layers, with totals compared to those of scope ``world``."""
        headings = ("layer", "channels", "elements", "noise of local", "scope", "noise")
        rows = [headings, *(_row(plan) for plan in self.layers)]
        local, noise = _percent(self.noise_of_local), _percent(self.noise)
        rows.append(("all layers", "", "", local, "", noise))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i in (0, 4) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join(
            [
                f"noise in the outputs, in % of their variance: {_percent(self.allowed)} allowed, "
                f"{self.ranks} ranks, {self.batches} batches",
                *lines,
                f"per step {self.exchanges_per_step} exchanges and {self.bytes_per_step:,} bytes "
                f"sent by a rank; world in every layer: {2 * len(self.layers)} and "
                f"{self.bytes_of_world:,}",
                *self._words(),
            ]
        )

    def _words(self) -> Iterable[str]:
        """Say what the numbers mean, if it is not the usual."""
        yield from (f"{text[0].upper()}{text[1:]}." for text in self.warnings)
        if self.updates is not None and self.updates >= TRAINED_UPDATES:
            yield (
                f"Measured after {self.updates:,} steps; noise changes while a model trains: "
                f"measure again after {_MEASURE_AGAIN * self.updates:,}."
            )
        takes_nearly_all = self.bytes_per_step > _NEARLY_ALL * self.bytes_of_world
        if self.ranks > 1 and takes_nearly_all and self.noise_of_local > self.allowed:
            noisiest = sorted(self.layers, key=lambda plan: -plan.candidates[0].noise)[:_NAMED]
            names = ", ".join(
                f"{plan.layer or 'model'} ({_percent(plan.candidates[0].noise)} %)"
                for plan in noisiest
            )
            yield (
                "Nearly every layer needs world: with local in all of them, the noise would be "
                f"{_percent(self.noise_of_local)} % of the outputs' variance. The largest "
                f"contributions are {names}."
            )


def plan_of(plan: ScopePlan | str | os.PathLike[str]) -> ScopePlan:
    """Return a plan, which is loaded if it is a path."""
    return plan if isinstance(plan, ScopePlan) else ScopePlan.load(plan)


def _row(plan: LayerPlan) -> tuple[str, ...]:
    local, chosen = plan.candidates[0], plan.chosen
    return (
        plan.layer or "model",
        str(plan.channels),
        str(local.elements),
        _percent(local.noise),
        plan.scope,
        _percent(chosen.noise),
    )


def _percent(share: float) -> str:
    return "?" if math.isinf(share) else f"{100 * share:.1f}"
