# SPDX-License-Identifier: Apache-2.0
"""Shows what late ranks cost: a layer that synchronizes waits for the slowest of them, twice.

Times of passes are log-normal and independent, from a seed; exchanges themselves take no time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from normscope.stragglers import expected_maximum, simulate_waiting

RANKS_PER_HOST = 8


@dataclass(frozen=True)
class Setting:
    """What is simulated.

    Args:
        layers: With a pass forward and one backward each.
        ranks: How many.
        spread: Standard deviation of a pass, as a share of its mean.
        steps: To take the mean over.
        seed: Of the times.
    """

    layers: int = 50
    ranks: int = 1000
    spread: float = 0.1
    steps: int = 20
    seed: int = 0


def groups_of(scopes: str, setting: Setting) -> list[Sequence[int] | None]:
    """For each pass of a step, the leader of every rank.

    Args:
        scopes: ``local``, ``node``, ``group:K`` or ``world`` in all layers, or ``3 x world`` and
            the like for so many layers, evenly spaced, and ``local`` in the others.
        setting: What is simulated.

    Raises:
        ValueError: If it is none of these.
    """
    count, _, scope = scopes.rpartition(" x ")
    wide = int(count) if count else setting.layers
    if not 0 < wide <= setting.layers:
        raise ValueError(f"scopes: expected up to {setting.layers} layers, got {scopes}")
    leaders = _leaders(scope, setting.ranks)
    places = {i * setting.layers // wide for i in range(wide)}
    forward = [leaders if layer in places else None for layer in range(setting.layers)]
    return [*forward, *reversed(forward)]


def _leaders(scope: str, ranks: int) -> list[int] | None:
    if scope == "local":
        return None
    name, _, number = scope.partition(":")
    size = {"world": ranks, "node": RANKS_PER_HOST}.get(scope)
    if name == "group" and number.isdecimal():
        size = int(number)
    if not size:
        raise ValueError(f"scopes: expected local, node, group:K or world, got {scope}")
    return [rank - rank % size for rank in range(ranks)]


def row(scopes: str, setting: Setting) -> tuple[float, float]:
    """How much longer a step takes than without spread, and the share of it that a rank waits."""
    waiting = simulate_waiting(
        groups_of(scopes, setting),
        setting.ranks,
        setting.spread,
        steps=setting.steps,
        seed=setting.seed,
    )
    passes = 2 * setting.layers
    # What a rank does not compute, it waits: in layers, or for the last gradients.
    return waiting.step / passes - 1, 1 - passes / waiting.step


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=Setting.layers)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1000, 10_000])
    parser.add_argument("--spread", type=float, nargs="+", default=[0.02, 0.1, 0.3])
    parser.add_argument(
        "--scopes",
        nargs="+",
        default=["local", "1 x group:4", "group:4", "node", "1 x world", "5 x world", "world"],
    )
    parser.add_argument("--steps", type=int, default=Setting.steps)
    parser.add_argument("--seed", type=int, default=Setting.seed)
    chosen = parser.parse_args(arguments)
    print(f"{chosen.layers} layers; a step is longer than without spread by (a rank waits for)")
    for spread in chosen.spread:
        heading = f"spread {spread:g}"
        print(f"\n{heading:20}" + "".join(f"{f'{ranks:,} ranks':>18}" for ranks in chosen.ranks))
        for scopes in chosen.scopes:
            cells = []
            for ranks in chosen.ranks:
                setting = Setting(chosen.layers, ranks, spread, chosen.steps, chosen.seed)
                longer, waits = row(scopes, setting)
                cells.append(f"{f'{longer:.1%} ({waits:.1%})':>18}")
            print(f"{scopes:20}{''.join(cells)}", flush=True)
        maxima = [expected_maximum(ranks, spread) - 1 for ranks in chosen.ranks]
        print(f"{'world, in theory':20}" + "".join(f"{maximum:>17.1%} " for maximum in maxima))


if __name__ == "__main__":
    main()
