# SPDX-License-Identifier: Apache-2.0
"""Runs the same training step of a layer in a C++ program and in Python, and compares the results.

usage: compare_with_python.py <python_counterpart>

Checkpoints can be exchanged in both directions. Outputs, gradients and running statistics have the
same bits. Both recommend the same scopes, from the same values.
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
    """Run the step, and return outputs and gradients by name."""
    x = inputs["x"].clone().requires_grad_()
    y = layer(x)
    y.backward(inputs["dy"])
    gradients = {"dx": x.grad, "dweight": layer.weight.grad, "dbias": layer.bias.grad}
    return {"y": y.detach(), **{name: grad for name, grad in gradients.items() if grad is not None}}


def expect_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raise if a name or a bit differs."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def compare(program: str, scope: str, folder: Path) -> None:
    """Compare one step with one scope."""
    torch.manual_seed(0)
    layer = normscope.BatchNorm2d(3, scope=scope)
    net = torch.nn.Sequential(layer)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    # Far from zero, so that sums in a different order would differ.
    inputs = {"x": torch.randn(4, 3, 5, 6) + 1000, "dy": torch.randn(4, 3, 5, 6)}
    start, given, outputs, end = (str(folder / name) for name in ("start", "in", "out", "end"))
    torch.save(dict(net.state_dict()), start)
    torch.save(inputs, given)

    subprocess.run([program, scope, start, given, outputs, end], check=True)

    expect_equal(dict(torch.load(outputs)), in_python(layer, inputs))
    theirs = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    theirs.load_state_dict(dict(torch.load(end)))
    expect_equal(dict(theirs.state_dict()), dict(net.state_dict()))


def recommended(plan: normscope.ScopePlan) -> str:
    """Return the text that the program prints for a plan."""
    lines = [f"{plan.noise.hex()} {plan.ranks} {plan.batches} {plan.bytes_per_step}"]
    for layer in plan.layers:
        noise = " ".join(candidate.noise.hex() for candidate in layer.candidates)
        lines.append(f"{layer.layer} {layer.channels} {layer.scope} {noise}")
    return "\n".join(lines)


def in_same_notation(text: str) -> list[list[str]]:
    """Split the text into words, with hexadecimal numbers in Python's notation."""
    return [
        [float.fromhex(word).hex() if "0x" in word else word for word in line.split()]
        for line in text.splitlines()
    ]


def compare_plans(program: str, folder: Path) -> None:
    """Compare the plans for two layers, with parts of batches that stand for four ranks."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(normscope.BatchNorm2d(3), normscope.BatchNorm2d(3))
    inputs = torch.randn(6, 8, 3, 5, 6) + torch.randn(6, 8, 3, 1, 1)
    given = str(folder / "in")
    torch.save({"x": inputs}, given)

    got = subprocess.run([program, given], check=True, capture_output=True, text=True).stdout

    expected = recommended(normscope.recommend_scopes(net, list(inputs), ranks=4))
    if in_same_notation(got) != in_same_notation(expected):
        raise AssertionError(f"expected the plan\n{expected}\ngot\n{got}")


def main() -> None:
    """Compare a step for each scope, and a plan."""
    for scope in SCOPES:
        with tempfile.TemporaryDirectory() as folder:
            compare(sys.argv[1], scope, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        compare_plans(sys.argv[1], Path(folder))


if __name__ == "__main__":
    main()
