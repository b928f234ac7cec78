# SPDX-License-Identifier: Apache-2.0
"""Resolves scopes for hosts that need not exist: which ranks would share statistics."""

from __future__ import annotations

from dataclasses import dataclass

from normscope import _library
from normscope.exchange_times import HostCounts
from normscope.scope import Scope


@dataclass(frozen=True)
class HostLayout:
    """Hosts with the same number of consecutive ranks on each.

    Args:
        hosts: Number of hosts.
        ranks_per_host: Number of ranks on each host.
    """

    hosts: int
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True)
class Division:
    """Groups into which a scope divides the ranks.

    Args:
        scope: The scope; for ``norm_batch:M``, the scope that it resolves to.
        groups: For each group of two or more ranks, the number of its ranks on each host; equal
            groups are listed once.
        sharing: Largest number of groups that use the link of one host at the same time.
    """

    scope: str
    groups: tuple[HostCounts, ...]
    sharing: int


def division_of(scope: Scope, layout: HostLayout, samples: int | None) -> Division:
    """Return the groups into which a scope divides the ranks.

    Raises:
        ValueError: If the scope needs more ranks than there are, as in training; or if it depends
            on the samples per rank, and ``samples`` is None.
    """
    if scope.depends_on_samples and samples is None:
        raise ValueError(
            f"samples: expected the samples per rank and step, since a layer has scope {scope}, "
            "got None"
        )
    hosts = [rank // layout.ranks_per_host for rank in range(layout.ranks)]
    resolved, leaders = _library.divide_ranks(scope.text, samples or 0, hosts)
    counts: dict[int, dict[int, int]] = {}
    for host, leader in zip(hosts, leaders, strict=True):
        of_host = counts.setdefault(leader, {})
        of_host[host] = of_host.get(host, 0) + 1
    groups: dict[HostCounts, None] = {}
    crossing: dict[int, int] = {}
    for of_host in counts.values():
        group = tuple(of_host.values())
        if sum(group) > 1:
            groups[group] = None
        if len(of_host) > 1:
            for host in of_host:
                crossing[host] = crossing.get(host, 0) + 1
    return Division(resolved, tuple(groups), max(crossing.values(), default=1))
