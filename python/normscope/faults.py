# SPDX-License-Identifier: Apache-2.0
"""What a program can do about ranks that fail or hang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from normscope import _library, _process_group


def status(process: int | None = None) -> str:
    """Say where the ranks are of every group that a process of this host exchanges in.

    The process need not answer: this reads memory that it shows. Over shared memory that tells of
    all ranks; over other transports of its own, and of the others what they have published, which
    they do once a call is ``NORMSCOPE_WARN_AFTER`` seconds old (30). On a device it tells nothing.

    Args:
        process: Its id; None for this process.

    Returns:
        A line for each group, with its ranks by what they do, those first that do not wait; "" if
        the process has exchanged nothing.

    Raises:
        RuntimeError: If there is no such process, or this one may not look into it.

    Example:
        >>> status()
        ''
    """
    return _library.status_of_process(os.getpid() if process is None else process)


@contextmanager
def fail_fast() -> Iterator[None]:
    """Tell the peers of any exception that leaves the block, whatever raised it.

    They raise at once, with its text, in the exchange that they wait in or come to next, instead of
    at their time limit. The groups' exchanges are over then, on all ranks; the process groups
    themselves are not touched. Exceptions that exchanges have raised are known to the peers.

    Example:
        >>> with fail_fast():
        ...     pass  # a training step
    """
    try:
        yield
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        _library.fail_all_exchanges(reason)
        # The default group, if it has not met yet.
        if group := _process_group.name_in_use(None):
            _library.fail_exchange("world", group, reason)
        raise
