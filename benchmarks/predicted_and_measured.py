# SPDX-License-Identifier: Apache-2.0
"""Prints predicted and measured times of the exchanges of layers next to each other.

Start it like a training, with the same number of ranks on each host, and with the file that
`python -m normscope measure` wrote on these machines:

    torchrun --nproc-per-node 4 benchmarks/predicted_and_measured.py costs.json

Or let it make hosts out of network namespaces on this machine, and measure the parameters there:

    python benchmarks/predicted_and_measured.py --hosts 2 --ranks 4 --rate 1gbit
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed

import limited_hosts
import normscope
from normscope._binding import ops
from normscope._binding.groups import gather
from normscope.costs import Costs
from normscope.costs.measurement import joined_launch

CHANNELS = (16, 64, 256, 1024, 4096)
ROUNDS = 21
STEPS = 10  # per round
STEPS_BEFORE = 3

# A prediction counts as right if the ratio of measured to predicted time is in this range.
GOAL = (1 / 1.3, 1.3)


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured time of a layer's exchange.

    Args:
        scope: Scope of the layer.
        channels: Number of channels of the layer.
        predicted: Seconds by the model of docs/scaling.md.
        measured: Seconds on the slowest rank; the median over the rounds.
    """

    scope: str
    channels: int
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured time divided by predicted time."""
        return self.measured / self.predicted

    @property
    def is_right(self) -> bool:
        """Whether the ratio is within the goal."""
        return GOAL[0] <= self.ratio <= GOAL[1]


def compare(costs: Costs, scopes: Sequence[str], rounds: int = ROUNDS) -> list[Comparison]:
    """Predict and measure each scope with each number of channels; all ranks call this together.

    Raises:
        ValueError: If hosts have different numbers of ranks, or ranks that are not consecutive.
    """
    hosts, ranks_per_host = hosts_of_launch()
    found = []
    for scope in scopes:
        for channels in CHANNELS:
            [layer] = normscope.costs.predict(
                [("layer", channels, scope)],
                hosts=hosts,
                ranks_per_host=ranks_per_host,
                costs=costs,
            ).layers
            if layer.ranks > 1:
                measured = max(gather(exchange_seconds_of_layer(scope, channels, rounds)))
                found.append(Comparison(scope, channels, layer.seconds / 2, measured))
    return found


def measure_and_compare(
    scopes: Sequence[str], rounds: int
) -> tuple[Costs, list[tuple[str, int, float, float]]]:
    """Measure the parameters, then compare; return both, the comparisons as tuples."""
    torch.set_num_threads(1)
    costs = normscope.costs.measure(rounds=rounds)
    found = compare(costs, scopes, rounds)
    return costs, [(one.scope, one.channels, one.predicted, one.measured) for one in found]


def hosts_of_launch() -> tuple[int, int]:
    """Return the number of hosts, and the number of ranks on each."""
    hosts = gather(ops.settings().host)
    count = len(set(hosts))
    each = len(hosts) // count
    expected = [hosts[rank - rank % each] for rank in range(len(hosts))]
    if len(hosts) % count or hosts != expected:
        raise ValueError(
            f"ranks: expected the same number of consecutive ranks on each of {count} hosts, got "
            "another layout"
        )
    return count, each


def exchange_seconds_of_layer(scope: str, channels: int, rounds: int) -> float:
    """Return this rank's median seconds per exchange in the forward and backward of a layer."""
    layer = normscope.BatchNorm1d(channels, scope=scope)
    x = torch.randn(2, channels, requires_grad=True)

    def seconds(steps: int) -> float:
        before = normscope.training.communication_counters()
        for _ in range(steps):
            layer(x).sum().backward()
        after = normscope.training.communication_counters()
        calls = after.calls - before.calls
        return (after.seconds - before.seconds) / calls if calls else 0.0

    seconds(STEPS_BEFORE)  # the group is made, and the ranks agree on the scope
    return statistics.median(seconds(STEPS) for _ in range(rounds))


def table(comparisons: Sequence[Comparison]) -> str:
    """Return a table with a row per comparison, and the number of right predictions."""
    lines = [f"{'scope':12}{'channels':>9}{'predicted, us':>15}{'measured, us':>14}{'ratio':>8}"]
    lines += [
        f"{each.scope:12}{each.channels:9}{each.predicted * 1e6:15.1f}{each.measured * 1e6:14.1f}"
        f"{each.ratio:8.2f}"
        for each in comparisons
    ]
    right = sum(each.is_right for each in comparisons)
    return "\n".join([*lines, f"{right} of {len(comparisons)} within 30 %"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare on all ranks; rank 0 prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "costs", type=Path, nargs="?", help="the file from `python -m normscope measure`"
    )
    limited_hosts.add_arguments(parser, hosts=None)
    parser.add_argument("--scopes", nargs="+", default=["node", "world"])
    parser.add_argument("--backend", default="gloo", help="a backend of torch.distributed")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    chosen = parser.parse_args(arguments)
    if (chosen.costs is None) == (chosen.hosts is None):
        parser.error("expected a file of costs, or --hosts")
    if chosen.hosts is not None:
        task = (measure_and_compare, chosen.scopes, chosen.rounds)
        costs, fields = limited_hosts.run_on_hosts(
            parser, chosen, *task, seconds=limited_hosts.QUIET_SECONDS
        )[0]
        comparisons = [Comparison(*each) for each in fields]
        report(comparisons, chosen.json, f"{limited_hosts.described(chosen)}\n{costs}\n")
        return
    torch.set_num_threads(1)
    with joined_launch(chosen.backend):
        comparisons = compare(Costs.load(chosen.costs), chosen.scopes, chosen.rounds)
        if distributed.get_rank() == 0:
            report(comparisons, chosen.json)


def report(comparisons: Sequence[Comparison], file: Path | None, title: str = "") -> None:
    """Print a table, and write the numbers into a file if one is given."""
    print(title + table(comparisons))
    if file is not None:
        rows = [dataclasses.asdict(each) for each in comparisons]
        file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
