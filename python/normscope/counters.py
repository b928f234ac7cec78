# SPDX-License-Identifier: Apache-2.0
"""What synchronization costs."""

from typing import NamedTuple

from normscope import _library


class CommunicationCounters(NamedTuple):
    """What this process has sent since it started.

    Attributes:
        calls: Exchanges: one for each synchronized forward, backward and double backward, one where
            the ranks of a process group agree on a scope or a batch size at first use, and one for
            each step of :func:`normscope.joined`.
        bytes: Payload of this rank's messages, whatever carries them.
        seconds: Time in the exchanges, waiting for other ranks included.
    """

    calls: int
    bytes: int
    seconds: float


def communication_counters() -> CommunicationCounters:
    """Read the counters; what a piece of work has cost is the difference around it.

    Example:
        >>> before = communication_counters()
        >>> communication_counters().calls - before.calls
        0
    """
    return CommunicationCounters(*_library.communication_counters())
