# SPDX-License-Identifier: Apache-2.0
"""The networks that a file's tests are about; and a library that warns while it is imported."""

import warnings

import pytest
import torch
from client import Client

torch.set_num_threads(1)  # more take longer for networks this small

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*torch.jit.script. is deprecated", DeprecationWarning)
    import torch_geometric  # noqa: F401


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Ask of every client of a file what is asked of one."""
    if "client" in metafunc.fixturenames:
        metafunc.parametrize("name", metafunc.module.CLIENTS)


@pytest.fixture
def client(request: pytest.FixtureRequest, name: str) -> Client:
    """The client of a name."""
    found: Client = request.module.CLIENTS[name]
    return found
