# SPDX-License-Identifier: Apache-2.0
"""Resolves scopes for hosts that need not exist: which ranks would share statistics.

The rules are those of core/resolution.cpp, which resolves the scopes of running ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host, from 0."""
        return rank // self.ranks_per_host


def resolved(scope: Scope, layout: HostLayout, samples: int | None) -> Scope:
    """Return the scope that ``norm_batch:M`` resolves to; other scopes are returned unchanged.

    Raises:
        ValueError: If the scope depends on the samples per rank, and ``samples`` is None.
    """
    if not scope.depends_on_samples:
        return scope
    if samples is None:
        raise ValueError(
            f"samples: expected the samples per rank and step, since a layer has scope {scope}, "
            "got None"
        )
    wanted = _number(scope)
    if samples // wanted >= 2:
        return Scope.slices(samples // wanted)
    if samples >= wanted:
        return Scope.local()
    needed = -(-wanted // samples)
    return Scope.world() if needed >= layout.ranks else Scope.group(needed)


def leaders_of(scope: Scope, layout: HostLayout) -> list[int]:
    """Return for each rank the lowest rank that it shares statistics with.

    Raises:
        ValueError: If the scope needs more ranks than there are, as in training.
    """
    alone = list(range(layout.ranks))
    if layout.ranks == 1 or scope.is_of_one_rank:
        return alone
    kind = scope.text.partition(":")[0]
    if kind == "world":
        return [0] * layout.ranks
    if kind == "node":
        return [rank - rank % layout.ranks_per_host for rank in alone]
    if kind == "group":
        size = _number(scope)
        if size > layout.ranks:
            raise ValueError(
                f"scope: {scope}: expected at most the {layout.ranks} ranks there are, got {size}"
            )
        return [rank - rank % size for rank in alone]
    leaders = alone
    for text in scope.text.partition(":")[2].split("/"):
        members = [int(rank) for rank in text.split(",")]
        if max(members) >= layout.ranks:
            raise ValueError(
                f"scope: {scope}: expected ranks below {layout.ranks}, got {max(members)}"
            )
        for rank in members:
            leaders[rank] = min(members)
    return leaders


@dataclass(frozen=True)
class Division:
    """Groups into which a scope divides the ranks.

    Args:
        leaders: Leader of each rank, see :func:`leaders_of`.
        groups: For each group of two or more ranks, the number of its ranks on each host; equal
            groups are listed once.
        sharing: Largest number of groups that use the link of one host at the same time.
    """

    leaders: tuple[int, ...]
    groups: tuple[HostCounts, ...]
    sharing: int


def division_of(scope: Scope, layout: HostLayout) -> Division:
    """Return the groups into which a scope divides the ranks.

    Raises:
        ValueError: See :func:`leaders_of`.
    """
    leaders = leaders_of(scope, layout)
    counts: dict[int, dict[int, int]] = {}
    for rank, leader in enumerate(leaders):
        of_host = counts.setdefault(leader, {})
        host = layout.host_of(rank)
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
    return Division(tuple(leaders), tuple(groups), max(crossing.values(), default=1))


def _number(scope: Scope) -> int:
    return int(scope.text.partition(":")[2])
