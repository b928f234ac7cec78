# SPDX-License-Identifier: Apache-2.0
"""The kernels run on torch's threads, as many as torch.set_num_threads allows, with equal bits."""

from programs import output_of

# Prints the number of threads that a new process has started after a training forward on up to one,
# two and three of them, and whether their outputs have the same bits.
STEPS = """
import os, torch, normscope
layer = normscope.BatchNorm2d(64, scope="local")
x = torch.randn(8, 64, 32, 32)
before = len(os.listdir("/proc/self/task"))
outputs = []
for threads in (1, 2, 3):
    torch.set_num_threads(threads)
    outputs.append(layer(x))
    print(len(os.listdir("/proc/self/task")) - before)
print(all(torch.equal(y, outputs[0]) for y in outputs))
"""


def test_a_step_has_equal_bits_on_as_many_threads_as_torch_allows() -> None:
    assert output_of("-c", STEPS, seconds=60).split() == ["0", "1", "2", "True"]
