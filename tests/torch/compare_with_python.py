# SPDX-License-Identifier: Apache-2.0
"""Has a C++ program and Python take the same step of a layer, and compares what becomes of it.

usage: compare_with_python.py <python_counterpart>

Checkpoints pass both ways; outputs, gradients and running statistics have the same bits.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import normscope

SCOPES = ("local", "slices:2")


def in_python(
    layer: normscope.BatchNorm2d, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Takes the step; outputs and gradients by name."""
    x = inputs["x"].clone().requires_grad_()
    y = layer(x)
    y.backward(inputs["dy"])
    gradients = {"dx": x.grad, "dweight": layer.weight.grad, "dbias": layer.bias.grad}
    return {"y": y.detach(), **{name: grad for name, grad in gradients.items() if grad is not None}}


def expect_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raises where names differ, or a bit does."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def compare(program: str, scope: str, folder: Path) -> None:
    """One step with one scope."""
    torch.manual_seed(0)
    layer = normscope.BatchNorm2d(3, scope=scope)
    net = torch.nn.Sequential(layer)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    # Far from zero, where sums in another order would differ.
    inputs = {"x": torch.randn(4, 3, 5, 6) + 1000, "dy": torch.randn(4, 3, 5, 6)}
    start, given, outputs, end = (str(folder / name) for name in ("start", "in", "out", "end"))
    torch.save(dict(net.state_dict()), start)
    torch.save(inputs, given)

    subprocess.run([program, scope, start, given, outputs, end], check=True)

    expect_equal(dict(torch.load(outputs)), in_python(layer, inputs))
    theirs = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    theirs.load_state_dict(dict(torch.load(end)))
    expect_equal(dict(theirs.state_dict()), dict(net.state_dict()))


def main() -> None:
    """Compares scope by scope."""
    for scope in SCOPES:
        with tempfile.TemporaryDirectory() as folder:
            compare(sys.argv[1], scope, Path(folder))


if __name__ == "__main__":
    main()
