# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all Python tests."""

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import synchronized_kernels  # noqa: F401 - registers them if they are wanted
import torch
from rank_pool import KERNELS, RankPool
from torch import distributed

# The graphs that torch keeps on disk may be those of an earlier build of the library.
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"


@pytest.fixture(autouse=True)
def independent() -> None:
    """Each test draws the same numbers and finds no compiled graphs, whichever ran before it."""
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:  # whose import takes seconds
        torch.compiler.reset()  # torch limits the number of graphs for the same code


@pytest.fixture
def quiet_compiler() -> Iterator[None]:
    """No warnings by the compiler itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of ranks that the whole session shares."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pools(ranks: RankPool) -> Iterator[dict[str, RankPool]]:
    """The pools of ranks with each of KERNELS that the whole session shares."""
    others = {kind: RankPool(KERNELS[kind]) for kind in KERNELS if kind != "own"}
    yield {"own": ranks, **others}
    for pool in others.values():
        pool.close()


@pytest.fixture(scope="session")
def devices() -> Iterator[RankPool]:
    """Ranks that know the device of tests, by all kinds of kernels, shared by the whole session."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(params=["shared memory", "gloo"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport between ranks of one host in turn."""
    name: str = request.param
    return name


@pytest.fixture
def environment(transport: str) -> dict[str, str]:
    """The environment in which ranks use the transport."""
    return {"NORMSCOPE_SHARED_MEMORY": "1" if transport == "shared memory" else "0"}


@pytest.fixture
def world_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The environment that torchrun sets; the test may or may not initialize the group."""
    monkeypatch.chdir(tmp_path)  # the test may write files
    # Port 0 means any free port.
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()
