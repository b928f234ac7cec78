# SPDX-License-Identifier: Apache-2.0
"""Runs Python programs as a user starts them."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path


def output_of(*arguments: str, seconds: float, folder: Path | None = None) -> str:
    """Run Python, and return what it prints.

    Args:
        *arguments: Arguments of the interpreter.
        seconds: Time limit.
        folder: Working directory; None for this process's.

    Raises:
        AssertionError: If the program fails.
    """
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
        # torchrun sets this too: threads that share cores wait for each other.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def printed(*arguments: str, encoding: str = "utf-8") -> str:
    """Return what ``python -m normscope`` prints, run in this process."""
    from normscope.__main__ import main  # not every program needs torch

    output = io.BytesIO()
    text = io.TextIOWrapper(output, encoding, write_through=True)
    with contextlib.redirect_stdout(text):
        main([*arguments])
    return output.getvalue().decode(encoding)
