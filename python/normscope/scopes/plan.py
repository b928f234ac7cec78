# SPDX-License-Identifier: Apache-2.0
"""A recommended scope for each layer, as a table and as JSON."""

from __future__ import annotations

import json
import math
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from normscope._binding import groups
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.scope import Scope
from normscope.models.selection import named_layers
from normscope.scopes.noise import IndependentValues

# A relative standard error above this causes a warning.
_LARGE_ERROR = 0.25


@dataclass(frozen=True)
class Candidate:
    """A scope that a layer may get, and the worth of its statistics under it.

    Args:
        scope: The text of a :class:`~normscope.Scope`.
        ranks: The number of ranks that share statistics.
        values: The independent values of a norm batch; None if they could not be measured.
        extrapolated: Whether ``values`` is extrapolated from a narrower scope.
    """

    scope: str
    ranks: int
    values: IndependentValues | None
    extrapolated: bool


@dataclass(frozen=True)
class LayerPlan:
    """The measurements of a layer, and the scope that it gets.

    Args:
        layer: The qualified name.
        channels: The number of channels.
        scope: The narrowest scope that reaches the wanted number.
        candidates: All scopes, from the narrowest to the widest.
        exchange_bytes: Bytes that a rank sends per exchange, if the layer exchanges.
        exchange_seconds: Seconds that an exchange of all ranks took, including the wait; None if
            there was none.
    """

    layer: str
    channels: int
    scope: str
    candidates: tuple[Candidate, ...]
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

    def might_do(self, wanted: float) -> Candidate | None:
        """Return the narrowest scope whose estimate, but not its whole interval, is sufficient.

        It was not chosen, unless it is the widest.
        """
        for each in self.candidates:
            if each.values is not None and each.values.lower < wanted <= each.values.value:
                return each
        return None


@dataclass(frozen=True)
class ScopePlan:
    """A scope for each layer and the measurements behind it, made by :func:`recommend_scopes`.

    ``print(plan)`` shows a table.

    Args:
        layers: The layers in the model's order, without those that had no input.
        independent_values: The wanted number of independent values.
        ranks: The number of ranks that the plan is made for.
        batches: The number of batches that were measured.
    """

    layers: tuple[LayerPlan, ...]
    independent_values: float
    ranks: int
    batches: int

    @property
    def scopes(self) -> dict[str, Scope]:
        """The scope of each layer, by its qualified name."""
        return {plan.layer: Scope(plan.scope) for plan in self.layers}

    @property
    def exchanges_per_step(self) -> int:
        """Exchanges per step, in forward and backward."""
        return 2 * sum(plan.spans_ranks for plan in self.layers)

    @property
    def bytes_per_step(self) -> int:
        """Bytes that a rank sends per step, in forward and backward."""
        return 2 * sum(plan.exchange_bytes for plan in self.layers if plan.spans_ranks)

    @property
    def warnings(self) -> list[str]:
        """Doubts about the plan, which :func:`recommend_scopes` issues as warnings."""
        wanted = self.independent_values
        if math.isinf(wanted):
            return []  # the user asked for world
        estimates = [
            (plan.layer or "model", plan.chosen.values)
            for plan in self.layers
            if plan.chosen.values is not None
        ]
        narrow = [layer for layer, values in estimates if values.value < wanted]
        vague = [layer for layer, values in estimates if values.relative_error > _LARGE_ERROR]
        texts = []
        if narrow:
            texts.append(
                f"not even world is worth {wanted:g} independent values in "
                f"{', '.join(narrow)}: more samples in a step would help"
            )
        if vague:
            texts.append(
                f"the standard error exceeds {_LARGE_ERROR:.0%} in {', '.join(vague)}: more "
                f"batches than {self.batches} would help"
            )
        return texts

    def apply(self, model: torch.nn.Module) -> None:
        """Give each layer of the plan its scope; other layers are not changed.

        Warns if the plan was made for another number of ranks.

        Raises:
            ValueError: If the model lacks a layer of the plan, or it is not a layer of normscope.
                Nothing has been changed then.
        """
        layers = dict(named_layers(model, BatchNorm, None, None))
        missing = [plan.layer for plan in self.layers if plan.layer not in layers]
        if missing:
            raise ValueError(
                f"model: expected layers of normscope called {', '.join(missing)}, got none"
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
            fields = json.loads(Path(path).read_text())
            return cls(**{**fields, "layers": tuple(map(_layer_of_json, fields["layers"]))})
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: expected a plan of recommend_scopes, got {error}") from error

    def __str__(self) -> str:
        """Return a table of the layers, with totals compared to those of scope ``world``."""
        headings = ("layer", "channels", "local", "scope", "worth", "90 % interval", "")
        rows = [headings, *(self._row(plan) for plan in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i in (0, 3) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        world_bytes = 2 * sum(plan.exchange_bytes for plan in self.layers)
        world_exchanges = 2 * len(self.layers)
        return "\n".join(
            [
                f"independent values of a norm batch; wanted {self.independent_values:g}, "
                f"{self.ranks} ranks, {self.batches} batches",
                *lines,
                f"per step {self.exchanges_per_step} exchanges and {self.bytes_per_step:,} bytes "
                f"of a rank; world in every layer: {world_exchanges} and {world_bytes:,}",
            ]
        )

    def _row(self, plan: LayerPlan) -> tuple[str, ...]:
        local, chosen = plan.candidates[0], plan.chosen
        values = chosen.values
        return (
            plan.layer or "model",
            str(plan.channels),
            "?" if local.values is None else f"{local.values.value:.1f}",
            plan.scope,
            "?" if values is None else f"{values.value:.1f}",
            "" if values is None or math.isnan(values.lower) else
            f"{values.lower:.1f} to {values.upper:.1f}",
            ", ".join(self._notes(plan)),
        )  # fmt: skip

    def _notes(self, plan: LayerPlan) -> list[str]:
        notes = []
        chosen, perhaps = plan.chosen, plan.might_do(self.independent_values)
        if perhaps is not None:
            notes.append(f"perhaps {'not reached' if perhaps is chosen else perhaps.scope}")
        if chosen.values is not None:
            if chosen.values.value < self.independent_values:
                notes.append("not reached")
            if chosen.values.relative_error > _LARGE_ERROR:
                notes.append("uncertain")
        return [*notes, "extrapolated"] if chosen.extrapolated else notes


def _layer_of_json(fields: dict[str, Any]) -> LayerPlan:
    candidates = tuple(
        Candidate(
            **{**each, "values": None if each["values"] is None
               else IndependentValues(**each["values"])}
        )
        for each in fields["candidates"]
    )  # fmt: skip
    return LayerPlan(**{**fields, "candidates": candidates})
