#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the pip options to install a torch that is suitable for this machine.

PyPI's torch for Linux includes gigabytes of CUDA libraries. For a machine without an NVIDIA device
the CPU build is better, which has a separate index. `NORMSCOPE_TORCH_INDEX` selects another index;
if it is empty, only pip's own configuration is used.
"""

import os
import shutil
import urllib.error
import urllib.request

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REACH_TIMEOUT_SECONDS = 5


def is_reachable(index: str) -> bool:
    """Return whether the index responds; if it does not, pip would retry for minutes."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=REACH_TIMEOUT_SECONDS):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def torch_pip_options() -> str:
    """Return the options in one line, empty if PyPI or pip's configuration is sufficient."""
    chosen = os.environ.get("NORMSCOPE_TORCH_INDEX")
    if chosen is not None:
        return f"--extra-index-url {chosen}" if chosen else ""
    if shutil.which("nvidia-smi") or not is_reachable(CPU_INDEX):
        return ""
    return f"--extra-index-url {CPU_INDEX}"


if __name__ == "__main__":
    print(torch_pip_options())
