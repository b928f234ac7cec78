# SPDX-License-Identifier: Apache-2.0
"""Counters for the cost of synchronization."""

from typing import NamedTuple

from normscope._binding import ops


class CommunicationCounters(NamedTuple):
    """The exchanges of this process since it started.

    Attributes:
        calls: Exchanges: one for each synchronized forward, backward and double backward, one each
            time the ranks of a process group agree on a scope or a batch size at first use, and one
            for each message of a function, such as :func:`normscope.joined` in each step,
            :func:`normscope.sync_running_stats` or :func:`normscope.recommend_scopes`.
        bytes: Payload of this rank's messages, over any transport.
        seconds: Time spent in exchanges, including the wait for other ranks.
    """

    calls: int
    bytes: int
    seconds: float


def communication_counters() -> CommunicationCounters:
    """Read the counters; the difference of two readings is the cost of the work in between.

    Example:
        >>> before = communication_counters()
        >>> communication_counters().calls - before.calls
        0
    """
    return CommunicationCounters(*ops.communication_counters())
