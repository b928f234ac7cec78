# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the networks of a test file, and an import that would cause warnings later."""

import warnings

import pytest
import torch
from client import Client

torch.set_num_threads(1)  # more threads are slower for networks this small

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*torch.jit.script. is deprecated", DeprecationWarning)
    import torch_geometric  # noqa: F401


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of a client for every client of the file."""
    if "client" in metafunc.fixturenames:
        metafunc.parametrize("name", metafunc.module.CLIENTS)


@pytest.fixture
def client(request: pytest.FixtureRequest, name: str) -> Client:
    """The client with the given name."""
    found: Client = request.module.CLIENTS[name]
    return found
