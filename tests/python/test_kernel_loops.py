# SPDX-License-Identifier: Apache-2.0
"""What scripts/kernel_loops.py finds in machine code, and what it objects to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kernel_loops
from kernel_loops import Loop, LoopLimits, loop_complaints, loops_of

# Two packs are loaded before the first is needed, and a third after it.
CODE = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0008*/                   ACQBULK ;
.L_x_1:
        /*0010*/                   LDG.E.128 R8, desc[UR4][R2.64] ;
        /*0020*/                   IADD3 R2, P0, R2, UR6, RZ ;
        /*0030*/                   LDG.E.128 R12, desc[UR4][R2.64] ;
        /*0040*/                   FADD R20, R11, R4 ;
        /*0050*/                   LDG.E.128 R16, desc[UR4][R2.64] ;
        /*0058*/                   SHFL.DOWN PT, R20, R20, 0x8, 0x101f ;
        /*0060*/                   DADD R22, R24, R26 ;
        /*0070*/                   STG.E.128 desc[UR4][R2.64], R20 ;
        /*0080*/              @!P0 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
"""
SYMBOL = "_Z19apply_channels_lastIL6AccessE0E17NormalizeElementsI8BFloat16E4SiluE"


KEPT = LoopLimits(
    "NormalizeElements",
    instructions=9,
    with_name={},
    float64=1,
    loads=2,
    loads_before={"wait": 1, "first shuffle": 3},
)


def test_a_loop_is_counted_up_to_its_branch() -> None:
    assert list(loops_of(CODE)) == [Loop(instructions=9, stores=1, float64=1, loads=2)]


def test_loops_around_a_loop_that_loads_are_left_out() -> None:
    outer = ".L_x_0:\n" + CODE + "        /*00a0*/    BRA `(.L_x_0) ;\n"

    assert list(loops_of(outer)) == list(loops_of(CODE))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (KEPT, []),
        (
            KEPT._replace(instructions=8),
            ["expected at most 8 instructions per store in the loop, got 9 for 1"],
        ),
        (KEPT._replace(instructions=8, with_name={"Silu": 9}), []),  # the symbol's own limit
        (KEPT._replace(float64=0), ["expected at most 0 float64 in the loop, got 1"]),
        (KEPT._replace(loads=3), ["expected at least 3 loads in flight, got 2"]),
        (
            KEPT._replace(loads_before={"wait": 2}),
            ["expected at least 2 loads before the wait, got 1"],
        ),
        (
            KEPT._replace(loads_before={"wait": 1, "first shuffle": 5}),
            ["expected at least 5 loads before the first shuffle, got 4"],
        ),
    ],
)
def test_each_limit_that_is_exceeded_causes_a_complaint(
    limits: LoopLimits, expected: list[str]
) -> None:
    assert list(loop_complaints(SYMBOL, CODE, limits)) == expected


def test_what_adds_the_sums_of_ranks_is_not_the_loop_of_a_sum() -> None:
    in_float32 = re.sub(r".*(DADD|STG).*\n", "", CODE)
    of_ranks = re.sub(r".*STG.*\n", "", CODE).replace("L_x_1", "L_x_2").replace("R4", "R30")
    limits = LoopLimits("add_tiles", None, {}, None, 2, {})

    for code in (in_float32 + of_ranks, of_ranks + in_float32):
        assert kernel_loops.main_loops(code, limits) == [
            Loop(instructions=7, stores=0, float64=0, loads=2)
        ]


def test_a_kernel_that_sums_and_applies_waits_for_no_other() -> None:
    limits = KEPT._replace(loads_before={"wait": 2})

    assert list(loop_complaints(SYMBOL + "9AfterSums", CODE, limits)) == []


def test_limits_are_read_from_the_source(tmp_path: Path) -> None:
    (tmp_path / "one.cuh").write_text(
        "// Loop: at most 150 instructions per store, 550 with Silu; at least 4 loads; at\n"
        "// least 3 before the wait; at least 5 before the first shuffle.\n"
        "template <class Element>\n"
        "struct Elements {};\n"
        "// Limits: 24 to 112 registers; bytes: 0 stack, 0 spilled, 0 shared.\n"
        "// Loop: at most 160 float64 instructions, for 8 elements.\n"
        "template <class Element>\n"
        "__global__ void __launch_bounds__(kBlockThreads, 2)\n"
        "    add_elements(Element element) {}\n"
    )

    assert kernel_loops.read_loop_limits(tmp_path) == [
        LoopLimits("Elements", 150, {"Silu": 550}, None, 4, {"wait": 3, "first shuffle": 5}),
        LoopLimits("add_elements", None, {}, 160, None, {}),
    ]
