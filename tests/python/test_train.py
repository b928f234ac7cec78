# SPDX-License-Identifier: Apache-2.0
"""The example training script, and the part of it that README.md shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from programs import output_of
from rank_pool import module_of

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples/train.py"

DIGITS = 360  # held out

# The accuracy of guessing one of ten classes, plus five standard deviations.
CHANCE = 0.1 + 5 * (0.1 * 0.9 / DIGITS) ** 0.5

TIMEOUT_SECONDS = 120  # about twenty times the usual duration

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("modules", "scope", "epochs", "ranks"),
    [
        pytest.param(TORCHRUN, "world", 1, 2, id="two ranks, world"),
        # The scopes are recommended after an epoch.
        pytest.param(
            TORCHRUN, "recommended", 2, 2, id="two ranks, recommended", marks=pytest.mark.slow
        ),
        pytest.param((), "world", 1, 1, id="one process"),
    ],
)
def test_the_script_learns_and_its_checkpoint_loads_into_torch_s_layers(
    tmp_path: Path, modules: tuple[str, ...], scope: str, epochs: int, ranks: int
) -> None:
    path = tmp_path / "digits.pt"
    started = ["-m", *modules] if modules else []
    options = ["--device", "cpu", "--scope", scope, "--epochs", str(epochs), "--batch", "8"]

    output = output_of(
        *started, str(TRAIN), *options, "--checkpoint", str(path), seconds=TIMEOUT_SECONDS
    )

    told = re.search(r"^accuracy ([\d.]+) on (\d+) held-out digits \(ranks: (\d)\)$", output, re.M)
    assert told, output
    assert float(told[1]) > CHANCE
    assert (int(told[2]), int(told[3])) == (DIGITS, ranks)
    assert ("noise in the outputs" in output) == (scope == "recommended")
    network = module_of(str(TRAIN)).network()
    assert {type(layer).__module__.split(".")[0] for layer in network.modules()} == {"torch"}
    network.load_state_dict(torch.load(path))


def test_the_checkpoint_leaves_the_clone_clean() -> None:
    (checkpoint,) = re.findall(r'default=Path\("(.+)"\)', TRAIN.read_text())

    assert checkpoint in (ROOT / ".gitignore").read_text().splitlines()


def test_the_diff_in_the_readme_matches_the_script() -> None:
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    script = [line.strip().partition("  # ") for line in TRAIN.read_text().splitlines()]
    lines = [line for line, _, _ in script]

    shown = [
        line
        for line in diff.splitlines()
        if line[1:].strip() not in ("", "...") and not line.startswith("-")
    ]
    places, after = [], 0
    for line in shown:  # has to be in the order of the script
        places.append(lines.index(line[1:].partition("  # ")[0].strip(), after))
        after = places[-1] + 1
    added = [place for line, place in zip(shown, places, strict=True) if line.startswith("+")]

    assert [script[place][2][:1] for place in added] == ["1", "2", "3", "4"]
