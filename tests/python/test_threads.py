# SPDX-License-Identifier: Apache-2.0
"""The kernels run on torch's threads, as many as torch.set_num_threads allows."""

import subprocess
import sys

import pytest

# Prints the number of threads that a training forward starts in a new process.
STEP = """
import os, sys, torch, normscope
torch.set_num_threads(int(sys.argv[1]))
layer = normscope.BatchNorm2d(64, scope="local")
x = torch.empty(8, 64, 32, 32)
before = len(os.listdir("/proc/self/task"))
layer(x)
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_step_runs_on_as_many_threads_as_torch_allows(threads: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", STEP, str(threads)], capture_output=True, text=True, check=True
    )

    assert int(result.stdout) == threads - 1
