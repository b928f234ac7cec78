# SPDX-License-Identifier: Apache-2.0
"""Environment variables with values that cannot be understood."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from rank_pool import RankPool, connected_group, error_of
from torch import distributed

import normscope

# A bad value of each variable, and what the error says was expected. NORMSCOPE_NODE is any text.
BAD = {
    "NORMSCOPE_KERNELS": ("fastest", "one of reference baseline"),
    "NORMSCOPE_DEVICE_KERNELS": ("own", "torch or nothing"),
    "NORMSCOPE_SHARED_MEMORY": ("no", "0 or 1"),
    "NORMSCOPE_PEER_MEMORY": ("yes", "0 or 1"),
    "NORMSCOPE_TIMEOUT": ("5 minutes", "seconds from 0.001 to 1e9"),
    "NORMSCOPE_WARN_AFTER": ("soon", "0, or seconds from 0.001 to 1e9"),
    "NORMSCOPE_DETECT_NON_FINITE": ("true", "0 or 1"),
    "NORMSCOPE_EXACT_GRAPHS": ("yes", "0 or 1"),
    "NORMSCOPE_CHECK": ("2", "0 or 1"),
    "NORMSCOPE_FORCE_SYNC": ("on", "0 or 1"),
}

# Forks, because an import of torch takes seconds.
IMPORTS = """
import os, sys
import torch
for name, value in zip(sys.argv[1::2], sys.argv[2::2]):
    if os.fork() == 0:
        os.environ[name] = value
        try:
            import normscope
            print("imported", flush=True)
        except ValueError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def assert_names(text: str, name: str) -> None:
    value, expected = BAD[name]
    assert f"{name}: expected {expected}" in text
    assert f'got "{value}"' in text


def test_an_import_refuses_a_value_that_it_cannot_understand() -> None:
    pairs = [text for name, (value, _) in BAD.items() for text in (name, value)]
    environment = {name: value for name, value in os.environ.items() if name not in BAD}

    result = subprocess.run(
        [sys.executable, "-c", IMPORTS, *pairs],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    for name, line in zip(BAD, result.stdout.splitlines(), strict=True):
        assert_names(line, name)


def rank_1_has_a_bad_value() -> list[tuple[str, float]]:
    """Return what the first exchange of a new group raises, for each variable, and how soon."""
    answers = []
    for name, (value, _) in BAD.items():
        layer = normscope.BatchNorm1d(3)
        layer.process_group = connected_group([0, 1])
        before = os.environ.get(name)
        if distributed.get_rank() == 1:
            os.environ[name] = value
        begin = time.monotonic()
        error = error_of(partial(layer, torch.randn(4, 3)), Exception)
        answers.append((error, time.monotonic() - begin))
        distributed.barrier()
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
        # A new group of the same ranks can exchange.
        layer.process_group = connected_group([0, 1])
        layer(torch.randn(4, 3))
    return answers


def test_a_bad_value_of_one_rank_is_told_to_all(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    limit_seconds = 60.0
    answers = ranks.run(
        2, rank_1_has_a_bad_value, environment=environment, group_seconds=limit_seconds
    )

    for of_rank_0, of_rank_1, name in zip(*answers, BAD, strict=True):
        assert_names(of_rank_1[0], name)
        assert_names(of_rank_0[0], name)
        assert "rank 1 failed: " in of_rank_0[0]
        assert max(of_rank_0[1], of_rank_1[1]) < limit_seconds / 2


def test_the_documentation_lists_every_variable() -> None:
    root = Path(__file__).parents[2]
    listed = re.findall(
        r"^\| `(NORMSCOPE_[A-Z_]+)=", (root / "docs/environment.md").read_text(), re.M
    )

    assert sorted(listed) == sorted([*BAD, "NORMSCOPE_NODE"])
    source = (root / "normscope/core/environment.cpp").read_text()
    assert set(re.findall(r"NORMSCOPE_[A-Z_]+(?=\")", source)) == set(listed)
    for folder in ("normscope", "python"):
        for path in (root / folder).rglob("*"):
            if path.suffix in (".cpp", ".h", ".py") and path.name != "environment.cpp":
                assert not re.search(r'(getenv|environ.*)\(\s*"NORMSCOPE_', path.read_text()), path
