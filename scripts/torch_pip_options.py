#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the pip options that fetch a torch that suits this machine.

PyPI's torch for Linux brings gigabytes of CUDA libraries. A machine without an NVIDIA device is
served better by the CPU build, which has an index of its own. `NORMSCOPE_TORCH_INDEX` names another
index, or none when it is empty; then pip's own configuration decides alone.
"""

import os
import shutil
import urllib.error
import urllib.request

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REACH_TIMEOUT_SECONDS = 5


def is_reachable(index: str) -> bool:
    """Whether the index answers: pip would retry for minutes where it does not."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=REACH_TIMEOUT_SECONDS):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def torch_pip_options() -> str:
    """Return the options as one line, which is empty where PyPI or pip's configuration will do."""
    chosen = os.environ.get("NORMSCOPE_TORCH_INDEX")
    if chosen is not None:
        return f"--extra-index-url {chosen}" if chosen else ""
    if shutil.which("nvidia-smi") or not is_reachable(CPU_INDEX):
        return ""
    return f"--extra-index-url {CPU_INDEX}"


if __name__ == "__main__":
    print(torch_pip_options())
