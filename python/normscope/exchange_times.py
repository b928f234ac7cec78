# SPDX-License-Identifier: Apache-2.0
"""Models the time of an exchange, for each algorithm by which ranks can sum.

The formulas are those of Thakur, Rabenseifner and Gropp (2005), with two kinds of links: within a
host and between hosts. This module does not use torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from normscope.costs import SLOT_BYTES, Costs, LinkCosts, padded_bytes

# The number of a group's ranks on each host, in the order of the ranks.
HostCounts = tuple[int, ...]

TWO_LEVEL = "two-level"
# The largest piece that is sent between hosts, and the trailer of each piece (docs/decisions/0030).
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
    """Return the seconds of one all-reduce of the library if no rank is late.

    Args:
        size: Bytes of a rank's message.
        counts: Number of the group's ranks on each of its hosts; ranks of a host are consecutive.
        costs: The cost parameters.
        algorithm: How ranks of several hosts sum. None: as the library does, which is
            ``two-level`` over a CPU backend, and the backend's own algorithm over NCCL
            (``frame_bytes`` 0). ``two-level``: the ranks of a host add in shared memory, one rank
            of each host sums by the backend's own algorithm, and the result goes back. ``flat``:
            one rank receives from every other and answers. ``ring``: each part goes around all
            ranks twice. ``tree``: recursive doubling, or halving and doubling, whichever is faster.
            A group on one host always uses shared memory.
        sharing: Number of groups that use the link between a host and the others at the same time.

    Raises:
        ValueError: If the algorithm is unknown, or a cost that it needs is None.

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
    """Check the name of an algorithm.

    Raises:
        ValueError: If it is neither None nor one of ``ALGORITHMS``.
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(
            f"algorithm: expected None or one of {', '.join(ALGORITHMS)}, got {algorithm}"
        )


def links(costs: Costs) -> tuple[LinkCosts, LinkCosts]:
    """Return the costs of the backend's messages between hosts, and within a host.

    Raises:
        ValueError: If the messages between hosts were not measured.
    """
    far = costs.between_hosts
    if far is None:
        raise ValueError(
            "costs: expected between_hosts, since ranks of several hosts share statistics, got "
            "None; measure on two hosts or more, or give your own values, for example by "
            "dataclasses.replace(costs, between_hosts=normscope.LinkCosts(30e-6, 8 / 25e9))"
        )
    return far, costs.within_host or far


def _through_shared_memory(size: int, ranks: int, costs: Costs) -> float:
    point = costs.on_host(ranks)
    return math.ceil(size / SLOT_BYTES) * point.latency + size * point.seconds_per_byte


def _to_leader_and_back(size: int, ranks: int, costs: Costs) -> float:
    """Return the seconds in which a leader adds its host's messages, and the others copy the sum.

    Each side waits for the other once.
    """
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
    """Return the seconds of an all-reduce of the backend without its messages."""
    return costs.call + size * costs.seconds_per_byte_copied


def flat_seconds(
    size: int, counts: HostCounts, far: LinkCosts, near: LinkCosts, added: float
) -> float:
    """Return the seconds of a flat all-reduce.

    The first rank receives the messages of the others one after the other, adds them, and answers
    each.
    """
    others_near, others_far = counts[0] - 1, sum(counts[1:])
    messages = 2 * (others_near * _message(near, size) + others_far * _message(far, size))
    return messages + (others_near + others_far) * size * added


def ring_seconds(
    size: int, counts: HostCounts, far: LinkCosts, near: LinkCosts, added: float
) -> float:
    """Return the seconds of a ring all-reduce.

    Of p ranks, each sends a p-th part of the message around the ring twice. One hop per host
    crosses to another host. Latencies add up around the ring. All links send at once, at the speed
    of the slowest.
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
    """Return the seconds of recursive doubling or of halving and doubling, whichever is faster.

    Recursive doubling is faster for short messages.
    """
    return min(
        doubling_seconds(size, counts, far, near, added),
        halving_seconds(size, counts, far, near, added),
    )


def doubling_seconds(
    size: int, counts: HostCounts, far: LinkCosts, near: LinkCosts, added: float
) -> float:
    """Return the seconds of recursive doubling.

    Partners at distances 1, 2, 4, ... swap whole messages.
    """
    steps = sum(
        _message(_shared(far, near, crossing), size) + size * added
        for crossing in _crossings(counts)
    )
    return steps + _folding(size, counts, far, near, added)


def halving_seconds(
    size: int, counts: HostCounts, far: LinkCosts, near: LinkCosts, added: float
) -> float:
    """Return the seconds of recursive halving and doubling (Rabenseifner 2004).

    Partners swap halves, then quarters, and so on, and return the sums in reverse order. The most
    distant partners swap the halves.
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
    """Return the link of a step in which ``crossing`` ranks of a host send to other hosts."""
    if crossing == 0:
        return near
    return LinkCosts(far.latency, far.seconds_per_byte * crossing)


def _folding(size: int, counts: HostCounts, far: LinkCosts, near: LinkCosts, added: float) -> float:
    """Return the seconds that ranks beyond a power of two add.

    Each of them sends its message to a neighbour before the tree, and gets the sum after it.
    """
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
    """Return how many ranks of a host have their partner on another host, for each distance.

    The distances are 1, 2, 4, ...; each number is that of the host with the most such ranks.
    """
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
