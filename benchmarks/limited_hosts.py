# SPDX-License-Identifier: Apache-2.0
"""Ranks for benchmarks on hosts that are network namespaces of this machine, with links of a rate.

This needs root, or a kernel that lets everyone make user namespaces. The links lack the latency of
a real network.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

from hosts import Hosts

QUIET_SECONDS = 300.0  # until an exchange counts as one that hangs


def add_arguments(parser: argparse.ArgumentParser, hosts: int | None) -> None:
    """Let the command line say which hosts are wanted."""
    parser.add_argument("--hosts", type=int, default=hosts, help="namespaces")
    parser.add_argument("--ranks", type=int, default=4, help="of each host")
    parser.add_argument(
        "--rate", help="of each host's link, as tc has it: 1gbit (default: no limit)"
    )


def run_on_hosts(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    task: Callable[..., Any],
    *arguments: object,
    seconds: float,
) -> list[Any]:
    """Run a task on every rank, and return what the ranks return.

    Args:
        parser: Ends the program if this machine makes no namespaces.
        options: Of :func:`add_arguments`.
        task: What every rank calls; a function of a module.
        *arguments: Of the task.
        seconds: Until the run counts as one that hangs.
    """
    with Hosts(options.hosts) as hosts, contextlib.ExitStack() as stack:
        if not hosts.isolated:
            parser.exit(1, f"this machine makes no namespaces: {hosts.why_not_isolated}\n")
        for host in range(options.hosts if options.rate else 0):
            stack.enter_context(hosts.link_of_rate(host, options.rate))
        run = stack.enter_context(
            hosts.begun(
                [options.ranks] * options.hosts,
                task,
                *arguments,
                group_seconds=QUIET_SECONDS,
                hang_seconds=seconds,
            )
        )
        return run.results()


def described(options: argparse.Namespace) -> str:
    """The hosts in words."""
    return f"{options.hosts} hosts of {options.ranks} ranks, rate {options.rate or 'not limited'}"
