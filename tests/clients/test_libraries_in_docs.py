# SPDX-License-Identifier: Apache-2.0
"""What docs/migrating.md says about other libraries runs, with them.

Each block that begins with ```python clients does, after those that begin with ```python.
"""

import pytest
from documents import run_blocks


@pytest.mark.usefixtures("world_of_one")
def test_blocks_of_libraries_run() -> None:
    own = run_blocks("docs/migrating.md", ("python",))

    assert run_blocks("docs/migrating.md", ("python", "python clients")) > own
