# SPDX-License-Identifier: Apache-2.0
"""Runs benchmarks on hosts that are network namespaces of this machine, with links of a given rate.

This needs root, or a kernel that allows user namespaces. The links lack the latency of a real
network.
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

QUIET_SECONDS = 300.0  # an exchange that takes longer is taken to hang


def add_arguments(parser: argparse.ArgumentParser, hosts: int | None) -> None:
    """Add the options that describe the hosts.

    Args:
        parser: Gets the options.
        hosts: Default number of hosts.
    """
    parser.add_argument("--hosts", type=int, default=hosts, help="number of namespaces")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks on each host")
    parser.add_argument(
        "--rate", help="rate of each host's link in tc's notation: 1gbit (default: no limit)"
    )


def run_on_hosts(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    task: Callable[..., Any],
    *arguments: object,
    seconds: float,
) -> list[Any]:
    """Run a task on every rank, and return the results of the ranks.

    Args:
        parser: Parser that ends the program if this machine cannot make namespaces.
        options: Values of the options of :func:`add_arguments`.
        task: Function at the top of a module, which every rank calls.
        *arguments: Arguments of the task.
        seconds: Time after which the run is taken to hang.
    """
    with Hosts(options.hosts) as hosts, contextlib.ExitStack() as stack:
        if not hosts.isolated:
            parser.exit(1, f"this machine cannot make namespaces: {hosts.why_not_isolated}\n")
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
    """Return a description of the hosts."""
    rate = options.rate or "not limited"
    return f"{options.hosts} hosts with {options.ranks} ranks each, rate {rate}"
