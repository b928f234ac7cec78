# SPDX-License-Identifier: Apache-2.0
"""How memory for outputs is allocated."""

import re
from pathlib import Path

import pytest
import torch

import normscope

MAPS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def flags_at(address: int) -> list[str]:
    """Return the flags of the mapping that contains an address, as abbreviated by the system."""
    inside = False
    for line in MAPS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.mark.own_kernels
@pytest.mark.skipif(
    not (MAPS.exists() and HUGE_PAGES.exists()), reason="the system has no transparent huge pages"
)
def test_large_outputs_ask_for_huge_pages() -> None:
    layer = normscope.BatchNorm2d(8)
    x = torch.randn(8, 8, 256, 256, requires_grad=True)  # 16 MiB

    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))

    for output in (y, dx):
        assert "hg" in flags_at(output.data_ptr() + output.nbytes // 2)
