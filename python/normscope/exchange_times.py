# SPDX-License-Identifier: Apache-2.0
"""How long an exchange takes, by the ways in which ranks can sum.

The formulas are those of Thakur, Rabenseifner and Gropp (2005), over two kinds of links: within a
host and between hosts. Nothing here knows torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from normscope.costs import SLOT_BYTES, Costs, LinkCosts, padded_bytes

# How many of the ranks of a group each host holds, in the order of the ranks.
HostCounts = tuple[int, ...]

TWO_LEVEL = "two-level"
# Between hosts, and what each piece ends with (docs/decisions/0030).
_TWO_LEVEL_BYTES = 131072
_TRAILER_BYTES = 16

ALGORITHMS = ("flat", "ring", "tree", TWO_LEVEL)


def exchange_seconds(
    size: int,
    counts: HostCounts,
    costs: Costs,
    algorithm: str | None = None,
    sharing: int = 1,
) -> float:
    """The time of one all-reduce of the library, no rank being late.

    Args:
        size: Bytes of a rank's message.
        counts: Ranks of the group on each of its hosts; neighbours are on one host.
        costs: The parameters.
        algorithm: How ranks of several hosts sum. None: as the library does, which is
            ``two-level`` over a backend for the host, and the backend's own algorithm over NCCL
            (``frame_bytes`` 0). ``two-level``: the ranks of a host add in shared memory, one rank
            of each host sums by the backend's own algorithm, and the result goes back. ``flat``:
            one rank receives from every other and answers. ``ring``. ``tree``: recursive
            doubling, or halving and doubling, whichever is faster. A group on one host always
            uses shared memory.
        sharing: Groups that use the link between a host and the others at the same time.

    Raises:
        ValueError: If the algorithm is not one of these, or the costs that it needs are None.

    Example:
        >>> ethernet = Costs.ethernet_25g()
        >>> ring = exchange_seconds(5152, (8,) * 10, ethernet, "ring")
        >>> exchange_seconds(5152, (8,) * 10, ethernet) < ring
        True
    """
    check_algorithm(algorithm)
    if sum(counts) <= 1:
        return 0.0
    if len(counts) == 1:
        return _through_shared_memory(size, counts[0], costs)
    far, near = links(costs)
    if algorithm is None:
        algorithm = TWO_LEVEL if costs.frame_bytes else costs.algorithm
    if algorithm != TWO_LEVEL:
        return _over_backend(size, counts, costs, algorithm, (far, near), sharing)
    most, leaders = max(counts), (1,) * len(counts)
    if most == 1:
        return _over_backend(size, counts, costs, costs.algorithm, (far, near), sharing)
    seconds = 0.0
    for begin in range(0, size, _TWO_LEVEL_BYTES):
        piece = min(size - begin, _TWO_LEVEL_BYTES)
        seconds += _to_leader_and_back(piece, most, costs) + _over_backend(
            piece + _TRAILER_BYTES, leaders, costs, costs.algorithm, (far, near), sharing
        )
    return seconds


def check_algorithm(algorithm: str | None) -> None:
    """See that it is one of those.

    Raises:
        ValueError: If it is not.
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(
            f"algorithm: expected None or one of {', '.join(ALGORITHMS)}, got {algorithm}"
        )


def links(costs: Costs) -> tuple[LinkCosts, LinkCosts]:
    """The backend's messages between hosts, and within a host.

    Raises:
        ValueError: If those between hosts were not measured.
    """
    far = costs.between_hosts
    if far is None:
        raise ValueError(
            "costs: expected between_hosts, since ranks of several hosts share statistics, got "
            "None; measure on two hosts or more, or give values of yours, as "
            "dataclasses.replace(costs, between_hosts=normscope.LinkCosts(30e-6, 8 / 25e9))"
        )
    return far, costs.within_host or far


def _through_shared_memory(size: int, ranks: int, costs: Costs) -> float:
    point = costs.on_host(ranks)
    return math.ceil(size / SLOT_BYTES) * point.latency + size * point.seconds_per_byte


def _to_leader_and_back(size: int, ranks: int, costs: Costs) -> float:
    """The leader waits for the ranks of its host and adds; they wait for it and copy."""
    adding, copying = costs.on_host(ranks), costs.on_host(2)
    return 2 * adding.latency + size * (adding.seconds_per_byte + copying.seconds_per_byte)


def _over_backend(
    size: int,
    counts: HostCounts,
    costs: Costs,
    algorithm: str,
    links: tuple[LinkCosts, LinkCosts],
    sharing: int,
) -> float:
    far, near = links
    far = LinkCosts(far.latency, far.seconds_per_byte * sharing)
    seconds = BACKEND_SECONDS[algorithm]
    added = costs.seconds_per_byte_added
    padded = padded_bytes(size, costs.frame_bytes)
    return backend_call_seconds(padded, costs) + seconds(padded, counts, far, near, added)


def backend_call_seconds(size: int, costs: Costs) -> float:
    """What an all-reduce of the backend takes beside its messages."""
    return costs.call + size * costs.seconds_per_byte_copied


def flat_seconds(
    size: int, counts: HostCounts, far: LinkCosts, near: LinkCosts, added: float
) -> float:
    """The first rank takes every other's message, one after the other, adds, and answers each."""
    others_near, others_far = counts[0] - 1, sum(counts[1:])
    messages = 2 * (others_near * _message(near, size) + others_far * _message(far, size))
    return messages + (others_near + others_far) * size * added


def ring_seconds(
    size: int, counts: HostCounts, far: LinkCosts, near: LinkCosts, added: float
) -> float:
    """A p-th part goes around twice; of p hops as many leave a host as there are hosts.

    Latencies add up along the way around; all links carry parts at once, as fast as the slowest.
    """
    ranks, hosts = sum(counts), len(counts)
    crossing = hosts / ranks if hosts > 1 else 0.0
    latency = crossing * far.latency + (1 - crossing) * near.latency
    slowest = max(
        far.seconds_per_byte if hosts > 1 else 0.0,
        near.seconds_per_byte if max(counts) > 1 else 0.0,
    )
    part = size / ranks
    return (ranks - 1) * (2 * (latency + part * slowest) + part * added)


def tree_seconds(
    size: int, counts: HostCounts, far: LinkCosts, near: LinkCosts, added: float
) -> float:
    """The faster of recursive doubling, for short messages, and of halving and doubling."""
    return min(
        doubling_seconds(size, counts, far, near, added),
        halving_seconds(size, counts, far, near, added),
    )


def doubling_seconds(
    size: int, counts: HostCounts, far: LinkCosts, near: LinkCosts, added: float
) -> float:
    """Partners at distances 1, 2, 4, ... swap whole messages."""
    steps = sum(
        _message(_shared(far, near, crossing), size) + size * added
        for crossing in _crossings(counts)
    )
    return steps + _folding(size, counts, far, near, added)


def halving_seconds(
    size: int, counts: HostCounts, far: LinkCosts, near: LinkCosts, added: float
) -> float:
    """Partners swap halves, quarters, ... and then give back the sums (Rabenseifner 2004).

    Halves go the farthest.
    """
    steps, part = 0.0, float(size)
    for crossing in reversed(_crossings(counts)):
        part /= 2
        steps += 2 * _message(_shared(far, near, crossing), part) + part * added
    return steps + _folding(size, counts, far, near, added)


BackendSeconds = Callable[[int, HostCounts, LinkCosts, LinkCosts, float], float]
BACKEND_SECONDS: dict[str, BackendSeconds] = {
    "flat": flat_seconds,
    "ring": ring_seconds,
    "tree": tree_seconds,
}


def _message(link: LinkCosts, size: float) -> float:
    return link.latency + size * link.seconds_per_byte


def _shared(far: LinkCosts, near: LinkCosts, crossing: int) -> LinkCosts:
    """The link of a step in which so many ranks of a host send to other hosts."""
    if crossing == 0:
        return near
    return LinkCosts(far.latency, far.seconds_per_byte * crossing)


def _folding(size: int, counts: HostCounts, far: LinkCosts, near: LinkCosts, added: float) -> float:
    """Ranks beyond a power of two give theirs to a neighbour before, and get the sum after."""
    ranks = sum(counts)
    surplus = ranks - _power_below(ranks)
    if surplus == 0:
        return 0.0
    hosts = _host_of_rank(counts)
    crosses = any(hosts[2 * i] != hosts[2 * i + 1] for i in range(surplus))
    return 2 * _message(far if crosses else near, size) + size * added


def _power_below(ranks: int) -> int:
    return 1 << (ranks.bit_length() - 1)


def _host_of_rank(counts: HostCounts) -> list[int]:
    return [host for host, count in enumerate(counts) for _ in range(count)]


@lru_cache(maxsize=1024)
def _crossings(counts: HostCounts) -> tuple[int, ...]:
    """For distances 1, 2, 4, ...: the most ranks of a host whose partner is on another host."""
    hosts = _host_of_rank(counts)
    ranks = len(hosts)
    power = _power_below(ranks)
    surplus = ranks - power
    hosts = hosts[1 : 2 * surplus : 2] + hosts[2 * surplus :]
    most = []
    for distance in (1 << i for i in range(power.bit_length() - 1)):
        crossing = [0] * len(counts)
        for rank, host in enumerate(hosts):
            crossing[host] += hosts[rank ^ distance] != host
        most.append(max(crossing))
    return tuple(most)
