# SPDX-License-Identifier: Apache-2.0
"""Shows what late ranks cost: a layer that synchronizes waits twice for the slowest rank.

The times of passes are log-normal and independent, from a seed. Exchanges themselves take no time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from normscope.stragglers import expected_maximum, simulate_waiting

RANKS_PER_HOST = 8


@dataclass(frozen=True)
class Setting:
    """Parameters of a simulation.

    Args:
        layers: Number of layers; each has a pass forward and one backward.
        ranks: Number of ranks.
        spread: Standard deviation of the time of a pass, as a share of its mean.
        steps: Number of steps to average over.
        seed: Seed of the times.
    """

    layers: int = 50
    ranks: int = 1000
    spread: float = 0.1
    steps: int = 20
    seed: int = 0


def groups_of(scopes: str, setting: Setting) -> list[Sequence[int] | None]:
    """Return the leader of every rank, for each pass of a step.

    Args:
        scopes: ``local``, ``node``, ``group:K`` or ``world`` for this scope in all layers;
            ``3 x world``, for example, for ``world`` in three evenly spaced layers and ``local`` in
            the others.
        setting: Parameters of the simulation.

    Raises:
        ValueError: If ``scopes`` is none of these.
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
    """Simulate steps.

    Returns:
        By what share a step is longer than without spread; and the share of it that a rank waits.
    """
    waiting = simulate_waiting(
        groups_of(scopes, setting),
        setting.ranks,
        setting.spread,
        steps=setting.steps,
        seed=setting.seed,
    )
    passes = 2 * setting.layers
    # A rank that does not compute waits, in a layer or for the gradients.
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
