# SPDX-License-Identifier: Apache-2.0
"""The code in docs/migrating.md that uses other libraries runs.

Blocks that begin with ```python clients run together with those that begin with ```python.
"""

import pytest
from documents import run_blocks


@pytest.mark.usefixtures("world_of_one")
def test_blocks_of_libraries_run() -> None:
    own = run_blocks("docs/migrating.md", ("python",))

    assert run_blocks("docs/migrating.md", ("python", "python clients")) > own
