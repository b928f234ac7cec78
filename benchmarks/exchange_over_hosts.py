#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time a layer's exchange between hosts, and a flat all-reduce of the same bytes over Gloo.

The hosts are network namespaces (limited_hosts.py).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter

import torch
from torch import distributed

import limited_hosts
import normscope
from normscope._binding import groups, ops

KIBIBYTES = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Measured:
    """Medians over the rounds; each round counts with the mean over the ranks.

    Args:
        size: Bytes of the message.
        ours: Seconds of an exchange of normscope.
        flat: Seconds of an all-reduce.
        ratio: Median of flat / ours within a round; above 1, normscope is faster.
    """

    size: int
    ours: float
    flat: float
    ratio: float


def channels_of(size: int) -> int:
    """Return the number of channels whose message has about the given bytes."""
    header = ops.message_bytes(0)
    return max(1, round((size - header) / (ops.message_bytes(1) - header)))


def time_exchanges(
    sizes: list[int], rounds: int, calls: int
) -> tuple[str, list[tuple[int, list[tuple[float, float]]]]]:
    """Time both on this rank; every rank calls this.

    Returns:
        The transport of the exchanges; and for each size the message's bytes and, for each round,
        the seconds of an exchange and of an all-reduce.
    """
    results = []
    for size in sizes:
        channels = channels_of(size)
        layer = normscope.BatchNorm1d(channels)
        x = torch.randn(2, channels)
        layer(x)
        before = normscope.training.communication_counters().bytes
        layer(x)
        sent = normscope.training.communication_counters().bytes - before
        message = torch.zeros(sent // 8, dtype=torch.float64)
        of_rounds = [_one_round(layer, x, message, calls, turn) for turn in range(rounds + 1)]
        results.append((sent, of_rounds[1:]))
    return ops.transport(groups.name_in_use(None)), results


def _one_round(
    layer: normscope.BatchNorm1d, x: torch.Tensor, message: torch.Tensor, calls: int, turn: int
) -> tuple[float, float]:
    """Time an exchange and an all-reduce; every other round begins with the all-reduce."""
    if turn % 2:
        flat = _seconds_of_all_reduces(message, calls)
        return _seconds_of_exchanges(layer, x, calls), flat
    return _seconds_of_exchanges(layer, x, calls), _seconds_of_all_reduces(message, calls)


def _seconds_of_exchanges(layer: normscope.BatchNorm1d, x: torch.Tensor, calls: int) -> float:
    """Return the seconds per exchange, without the layer's computation."""
    distributed.barrier()
    before = normscope.training.communication_counters().seconds
    for _ in range(calls):
        layer(x)
    return (normscope.training.communication_counters().seconds - before) / calls


def _seconds_of_all_reduces(message: torch.Tensor, calls: int) -> float:
    distributed.barrier()
    begin = perf_counter()
    for _ in range(calls):
        distributed.all_reduce(message)
    return (perf_counter() - begin) / calls


def summarize(of_ranks: list[list[tuple[int, list[tuple[float, float]]]]]) -> list[Measured]:
    """Summarize the times of the ranks."""
    summary = []
    for of_size in zip(*of_ranks, strict=True):
        rounds = list(zip(*(times for _, times in of_size), strict=True))
        ours = [fmean(time for time, _ in one) for one in rounds]
        flat = [fmean(time for _, time in one) for one in rounds]
        ratio = median(f / o for f, o in zip(flat, ours, strict=True))
        summary.append(Measured(of_size[0][0], median(ours), median(flat), ratio))
    return summary


def main() -> None:
    """Measure with the options of the command line, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    limited_hosts.add_arguments(parser, hosts=2)
    parser.add_argument("--kibibytes", type=int, nargs="+", default=KIBIBYTES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=20, help="in each round")
    options = parser.parse_args()

    sizes = [1024 * size for size in options.kibibytes]
    answers = limited_hosts.run_on_hosts(
        parser,
        options,
        time_exchanges,
        sizes,
        options.rounds,
        options.calls,
        seconds=limited_hosts.QUIET_SECONDS * len(sizes),
    )
    print(f"{limited_hosts.described(options)}, over {answers[0][0]}")
    print(f"{'bytes':>10}{'normscope us':>14}{'flat Gloo us':>14}{'flat / normscope':>18}")
    for one in summarize([results for _, results in answers]):
        print(f"{one.size:>10}{1e6 * one.ours:>14.0f}{1e6 * one.flat:>14.0f}{one.ratio:>18.2f}")


if __name__ == "__main__":
    main()
