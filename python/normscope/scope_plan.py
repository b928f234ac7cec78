# SPDX-License-Identifier: Apache-2.0
"""A scope for each layer: what a recommendation says, as a table and as JSON."""

from __future__ import annotations

import json
import math
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from normscope import _process_group
from normscope._layers import named_layers
from normscope.independent_values import IndependentValues
from normscope.modules import BatchNorm
from normscope.scope import Scope

# A larger standard error than this share is warned of.
_LARGE_ERROR = 0.25


@dataclass(frozen=True)
class Candidate:
    """A scope that a layer may get, and what its statistics would be worth.

    Args:
        scope: As :class:`~normscope.Scope` spells it.
        ranks: That share.
        values: Of a norm batch; None where it could not be measured.
        extrapolated: Whether it follows from that of a narrower scope.
    """

    scope: str
    ranks: int
    values: IndependentValues | None
    extrapolated: bool


@dataclass(frozen=True)
class LayerPlan:
    """What was measured in a layer, and the scope that it gets.

    Args:
        layer: Qualified name.
        channels: Of its input.
        scope: The narrowest that reaches the wanted number.
        candidates: From the narrowest to the widest.
        exchange_bytes: That a rank sends in an exchange, if the layer makes any.
        exchange_seconds: That an exchange of all ranks took, waiting included; None where there
            was none.
    """

    layer: str
    channels: int
    scope: str
    candidates: tuple[Candidate, ...]
    exchange_bytes: int
    exchange_seconds: float | None

    @property
    def chosen(self) -> Candidate:
        """The candidate whose scope it gets."""
        return next(each for each in self.candidates if each.scope == self.scope)

    @property
    def spans_ranks(self) -> bool:
        """Whether it then synchronizes, twice a step."""
        return self.chosen.ranks > 1

    def might_do(self, wanted: float) -> Candidate | None:
        """The narrowest scope whose interval reaches on both sides of the wanted number.

        It was not chosen, unless it is the widest.
        """
        for each in self.candidates:
            if each.values is not None and each.values.lower < wanted <= each.values.value:
                return each
        return None


@dataclass(frozen=True)
class ScopePlan:
    """A scope for each layer, and what it was chosen from; :func:`recommend_scopes` makes it.

    ``print(plan)`` shows a table.

    Args:
        layers: In the model's order; those that had no input are not among them.
        independent_values: That were wanted.
        ranks: That were there, or stood for.
        batches: That were looked at.
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
        """Forward and backward."""
        return 2 * sum(plan.spans_ranks for plan in self.layers)

    @property
    def bytes_per_step(self) -> int:
        """That a rank sends, forward and backward."""
        return 2 * sum(plan.exchange_bytes for plan in self.layers if plan.spans_ranks)

    @property
    def warnings(self) -> list[str]:
        """What there is to say against the plan; :func:`recommend_scopes` warns of it."""
        wanted = self.independent_values
        if math.isinf(wanted):
            return []  # whatever was measured: world is what was asked for
        narrow = [
            plan.layer or "model"
            for plan in self.layers
            if plan.chosen.values is not None and plan.chosen.values.value < wanted
        ]
        vague = [
            plan.layer or "model"
            for plan in self.layers
            if plan.chosen.values is not None and plan.chosen.values.relative_error > _LARGE_ERROR
        ]
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
        """Give each layer its scope; others stay as they are.

        Warns where the layers train among another number of ranks than the plan was made for.

        Raises:
            ValueError: If the model has no layer of normscope of a name of the plan. Nothing has
                changed then.
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
        groups = {_process_group.named(name) for name in {layer.group_name for layer in layers}}
        # One process alone may stand for any number of ranks.
        others = sorted({_process_group.size_of(group) for group in groups} - {1, self.ranks})
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
        """Read what ``save`` wrote.

        Raises:
            ValueError: If the file holds no plan.
        """
        try:
            fields = json.loads(Path(path).read_text())
            return cls(**{**fields, "layers": tuple(map(_layer_of_json, fields["layers"]))})
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: expected a plan of recommend_scopes, got {error}") from error

    def __str__(self) -> str:
        """A table of the layers, with totals beside those of scope ``world``."""
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
