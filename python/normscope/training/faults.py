# SPDX-License-Identifier: Apache-2.0
"""Tools for ranks that fail or hang."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from normscope._binding import groups, ops
from normscope._binding.torch_private import DistBackendError

# What the errors of backends say about connections.
_OF_BACKENDS = re.compile("gloo|[Cc]onnection|[Tt]imed? ?out|NCCL|UCC")

_SECONDS_OF_AN_END = 1.0


def status(process: int | None = None) -> str:
    """Report where the ranks are, for every group in which a process on this host exchanges.

    The process need not respond: its state is read from memory that it shares. Over shared memory
    the report covers all ranks. Over other transports it covers the process itself, and those other
    ranks that have published their state: a rank does so if a call takes longer than half of
    ``NORMSCOPE_WARN_AFTER`` (default 30 seconds), or of the time limit if that is shorter.
    Exchanges on a device are not reported.

    Args:
        process: The process id; None for this process.

    Returns:
        One line per group. Ranks in the same state are listed together, and ranks that do not wait
        come first. "" if the process has exchanged nothing. A line for each file that has the name
        of a group's memory and is skipped, because it is something else.

    Raises:
        RuntimeError: If there is no such process, or this one may not inspect it.

    Example:
        >>> status()
        ''
    """
    text, _ = ops.status_of_process(os.getpid() if process is None else process)
    return text


@contextmanager
def fail_fast() -> Iterator[None]:
    """Tell the other ranks about any exception that leaves the block.

    They raise immediately, with its text, in the exchange that they wait in or reach next, and not
    at their time limit. Afterwards no rank can exchange in these groups any more; the process
    groups themselves are not affected. Exceptions raised by an exchange are already known to the
    other ranks.

    A message of the program itself, such as the buffers that DistributedDataParallel sends, may
    break because of another rank. If a rank of this host is known to have failed or died, the error
    of the backend leaves the block as one that names it.

    Raises:
        torch.distributed.DistBackendError: From an error of Gloo or another backend, if another
            rank has failed or died.

    Example:
        >>> with fail_fast():
        ...     pass  # a training step
    """
    try:
        yield
    except BaseException as error:
        fault = _fault_behind(error)
        reason = fault or ops.reason_of(error)
        # The groups of layers too, which may not have exchanged anything yet.
        for name in groups.names_of_layers():
            ops.fail_exchanges(reason, group_name=name)
        if fault:
            raise DistBackendError(f"{fault}, and then a message of the program failed") from error
        raise


def _fault_behind(error: BaseException) -> str:
    """Return what has happened to another rank, if that explains an error; "" if not."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not _OF_BACKENDS.search(text):
        return ""
    # The system closes the connections of a process before it has ended.
    deadline = time.monotonic() + _SECONDS_OF_AN_END
    _, fault = ops.status_of_process(os.getpid())
    while not fault and time.monotonic() < deadline:
        time.sleep(_SECONDS_OF_AN_END / 50)
        _, fault = ops.status_of_process(os.getpid())
    return "" if fault in text else fault
