# SPDX-License-Identifier: Apache-2.0
"""Starts ranks by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


class RanksFailedError(RuntimeError):
    """A rank ended in an error; it stands above, on standard error."""


def launch(script: str, processes: int, arguments: list[str], port: int | None) -> None:
    """Runs `script`, a file beside this one, in `processes` ranks, and waits for all of them.

    torchrun ends the other ranks as soon as one has failed. An exception that a signal handler
    raises during the wait ends all of them.

    Args:
        script: file name.
        processes: number of ranks on this host.
        arguments: for the script.
        port: where ranks meet; without it, a free one.

    Raises:
        RanksFailedError: if a rank failed.
    """
    meeting = (
        ["--standalone"] if port is None else ["--master-addr=127.0.0.1", f"--master-port={port}"]
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
        *meeting,
        str(Path(__file__).with_name(script)),
        *arguments,
    ]
    # Without a value torchrun sets 1 and says so; the ranks choose their threads themselves.
    # A thread that spins while it waits for others takes the core that they are waiting for.
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **os.environ}
    # In a session of its own Ctrl-C reaches this process alone, and torchrun once, from here.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        status = process.wait()
    except BaseException:
        # torchrun ends the ranks on SIGTERM; killed, it would leave them running.
        process.terminate()
        process.wait()
        raise
    if status != 0:
        raise RanksFailedError(f"{script}: a rank failed, its error stands above")
