# SPDX-License-Identifier: Apache-2.0
"""Who shares statistics on a number of hosts that is not there: scopes resolved without ranks.

The rules are those of core/resolution.cpp, which resolves scopes where there are ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from normscope.exchange_times import HostCounts
from normscope.scope import Scope


@dataclass(frozen=True)
class HostLayout:
    """Consecutive ranks on hosts that hold as many each.

    Args:
        hosts: How many.
        ranks_per_host: On each.
    """

    hosts: int
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        """On all hosts."""
        return self.hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """By its number, from 0."""
        return rank // self.ranks_per_host


def resolved(scope: Scope, layout: HostLayout, samples: int | None) -> Scope:
    """The scope that ``norm_batch:M`` comes to; any other as it is.

    Raises:
        ValueError: If the samples of a rank matter, and are not known.
    """
    if not scope.depends_on_samples:
        return scope
    if samples is None:
        raise ValueError(
            f"samples: expected how many a rank has in a step, since a layer has scope {scope}, "
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
    """For each rank the lowest one that it shares with.

    Raises:
        ValueError: If the scope needs ranks that there are not, as it is an error in training.
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
    """How a scope divides the ranks.

    Args:
        leaders: Of each rank, as :func:`leaders_of` has them.
        groups: Ranks on each host of the groups of two ranks and more; those alike once.
        sharing: The most groups that use the link of one host to others at the same time.
    """

    leaders: tuple[int, ...]
    groups: tuple[HostCounts, ...]
    sharing: int


def division_of(scope: Scope, layout: HostLayout) -> Division:
    """How the scope divides the ranks.

    Raises:
        ValueError: As :func:`leaders_of` does.
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
