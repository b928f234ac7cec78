# SPDX-License-Identifier: Apache-2.0
"""One table of what each rank is told, and when, if one of them fails or differs from its peers.

Other files have the faults that need processes of their own: test_kills.py, test_first_meeting.py,
test_forked_process.py, test_hosts.py; and test_calls_that_raise.py has those of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import faulty_ranks as parts
import pytest
import torch
from faults import (
    LIMIT_SECONDS,
    Fault,
    Outcome,
    Part,
    When,
    assert_as_described,
    disagreement,
    everyone,
    outcome_of,
)
from faulty_ranks import X, forward, named, run
from rank_pool import KERNELS, RankPool

import normscope

pytestmark = pytest.mark.portable

DTYPES = [torch.float32, torch.float64]
OF_DTYPES = ["... with float32 input", "... with float64 input"]

STEM = "forward of stem (3 channels, scope world)"
GROUP, RANKS = (f"first use of scope {scope} by stem" for scope in ("group:2", "ranks:0,2"))
NEXT_STEP = "the next step of joined batches..."
NO_GRADIENT = ["...forward of stem (3 channels, scope world)...", "...nothing needs a gradient..."]

# In each, all ranks make a call, and are told in that exchange what every one was doing.
DISAGREEMENTS = {
    "another layer": disagreement(
        ["forward of layer0 (3 channels...", "forward of layer1 (3 channels..."],
        lambda rank: forward(named(f"layer{rank}")),
    ),
    "another number of channels": disagreement(
        ["forward of head (3 channels...", "forward of head (4 channels..."],
        partial(parts.another_number_of_channels, "head"),
    ),
    "another number of channels without a name": disagreement(
        ["...layer 1 (3 channels...", "...layer 1 (4 channels..."],
        partial(parts.another_number_of_channels, ""),
    ),
    "a layer left out": disagreement(
        ["...of unnamed layer 1 (3...", "...of unnamed layer 2 (3..."], parts.another_layer_of_two
    ),
    "another direction": disagreement(
        ["...backward of stem...", "...forward of stem..."], parts.another_direction
    ),
    "another degree": disagreement(
        ["double backward of stem (3 channels...", "forward of stem (3 channels..."],
        parts.another_degree,
        is_own=False,
    ),
    "no gradient": disagreement(
        NO_GRADIENT, lambda rank: forward(named(), block=torch.no_grad() if rank else None)
    ),
    "a frozen layer": disagreement(
        NO_GRADIENT, lambda rank: forward(named().requires_grad_(rank == 0))
    ),
    **{
        f"another scope: {scopes[0]} instead of {scopes[1]}": disagreement(
            texts, partial(parts.another_scope, scopes)
        )
        for scopes, texts in [
            (["group:2", "world", "world"], [GROUP, STEM, STEM]),
            (["world", "group:2", "group:2"], [STEM, GROUP, GROUP]),
            (["group:2", "ranks:0,2", "ranks:0,2"], [GROUP, RANKS, RANKS]),
        ]
    },
    **{
        f"another {name}{compiled}": disagreement(
            texts, partial(parts.another_setting, settings, compiled), worlds=tuple(KERNELS)
        )
        for compiled in ("", ", compiled")
        for name, texts, settings in [
            (
                "eps",
                ["...eps 0.5 and momentum 0.1", "...eps 0.25 and momentum 0.1"],
                [{"eps": 0.5}, {"eps": 0.25}],
            ),
            ("momentum", ["...momentum 0.1", "...momentum 0.3"], [{}, {"momentum": 0.3}]),
            (
                "kind of average",
                ["...momentum None", "...momentum 0"],
                [{"momentum": None}, {"momentum": 0.0}],
            ),
        ]
    },
    **{
        f"another dtype{compiled}": disagreement(
            OF_DTYPES, partial(parts.another_dtype, DTYPES, compiled), worlds=tuple(KERNELS)
        )
        for compiled in ("", ", compiled")
    },
    **{
        f"another dtype on a device after {len(earlier)}{compiled}": disagreement(
            OF_DTYPES,
            partial(parts.another_dtype_on_a_device, DTYPES, earlier, compiled),
            worlds=["device"],
            environment={"NORMSCOPE_CHECK": "1"} if earlier else {},
        )
        for earlier, compiled in [([], ""), ([], ", compiled"), (DTYPES[:1], ""), (DTYPES, "")]
    },
    **{
        f"another order of models, {what}: {make.__name__}": disagreement(
            [f"forward of 0{model} (3 channels..." for model in models],
            partial(parts.in_order, make, orders),
            is_own=False,
        )
        for make in (parts.conversions, parts.a_deepcopy, parts.unpickled, parts.layers_by_hand)
        for what, models, orders in [
            ("later", ["", " of model 2"], ((0, 1, 0), (0, 1, 1))),
            ("at first", [" of model 2", " of model 2, made before model 1"], ((0, 1), (1, 0))),
        ]
    },
    "no detect_non_finite": disagreement(
        ["forward of stem, looking for non-finite values...", "forward of stem (3 channels..."],
        lambda rank: forward(named(), block=normscope.training.detect_non_finite(rank == 0)),
        is_own=False,
    ),
    "a layer instead of joined batches": disagreement(
        [NEXT_STEP, "forward of head (3 channels, scope world...", NEXT_STEP],
        partial(parts.left_loop, forward),
        is_own=False,
    ),
}

OWN_ERROR = "LookupError: no such file"
LAZY = (
    "ValueError: 0: expected a layer with running statistics, got a LazyBatchNorm2d without input; "
    "run the model once"
)
BROKEN = "OSError: the disk is full of holes"

ERRORS = {
    "a bad input": Fault(
        everyone("...rank 0...failed: ...expected 3...") | {0: "RuntimeError: x: expected 3..."},
        When.AT_ONCE,
        lambda rank: forward(run(named()), X if rank else torch.randn(6, 5)),
        ranks=3,
    ),
    **{
        f"{what}, {met or 'first exchange'}, {scope}": Fault(
            {
                0: parts.TEXTS.get(what, "...Error: ..."),
                1: f"...rank 0...failed: {parts.TEXTS.get(what, '')}...",
            },
            When.AT_ONCE,
            partial(parts.bad_call, what, met, scope),
            # Next to torch's kernels, torch's activation refuses it before the layer gets it.
            is_own=what == "sparse gradient",
            worlds=["shared memory", "gloo"] if met else ["shared memory"],
        )
        for what in (*parts.BAD_CALLS, "sparse gradient")
        for met in ("", "later exchange")
        for scope in ("world", "norm_batch:12")
    },
    "a bad call of a local layer": Fault(
        {0: "TypeError: ..."}, When.AT_ONCE, parts.bad_call_of_a_local_layer, is_usable=True
    ),
    "another momentum in a block of accumulate": Fault(
        {
            0: "...rank 1...stem: expected momentum 0.1 in all calls of a block...",
            1: "ValueError: stem: expected momentum 0.1 in all calls of a block...",
        },
        When.AT_ONCE,
        parts.another_momentum_in_a_block,
    ),
    **{
        f"a lazy layer in {pool.__name__}": Fault(
            {0: LAZY, 1: f"...{pool.__name__}...rank 0 failed: {LAZY}..."},
            When.AT_ONCE,
            partial(parts.pooled_lazy_layer, pool, *batches),
        )
        for pool, batches in [
            (normscope.sync_running_stats, []),
            (normscope.estimate_running_stats, [[X]]),
        ]
    },
    **{
        f"fail_fast, {met or 'first exchange'}, {scope}": Fault(
            everyone(f"...rank 0...{OWN_ERROR}...", told) | {0: OWN_ERROR},
            When.AT_ONCE,
            partial(parts.error_in_own_code, normscope.fail_fast, met, scope),
            ranks=3,
        )
        for met, scope, told in [
            ("", "world", 3),
            ("", "group:2", 3),
            ("first exchange of a group", "world", 3),
            ("later exchange", "world", 3),
            ("later exchange", "group:2", 2),
        ]
    },
    **{
        f"batches that raise after {before}": Fault(
            everyone(f"DistBackendError: ...rank 1...its batches raised {BROKEN}...") | {1: BROKEN},
            When.AT_ONCE,
            partial(parts.broken_batches, before),
            ranks=3,
            names_types=True,
        )
        for before in (0, 2)
    },
    **{
        f"Ctrl-C in {where}": Fault(
            {0: "KeyboardInterrupt: ...", 1: "...rank 0...interrupted while it waited..."},
            When.AT_ONCE,
            partial(parts.interrupted, where),
            late=[1],
        )
        for where in ("the first exchange", "forward", "backward")
    },
}

ABSENCES = {
    "stays away": Fault(
        everyone(
            "...rank 1 last finished forward of stem, ...ranks 0, 2 wait in forward of head..."
        ),
        When.AT_LIMIT,
        parts.between_layers,
        ranks=3,
        late=[1],
    ),
    **{
        f"stays away from {scope} over Gloo": Fault(
            everyone(f"forward of stem (3 channels, scope {scope})...rank 1 is not there...", told),
            When.AT_LIMIT,
            partial(parts.after_a_step, scope),
            ranks=4,
            late=[1],
            is_own=True,
            worlds=["gloo"],
        )
        for scope, told in [("world", 4), ("group:2", 2)]
    },
    "stays away from the first exchange": Fault(
        everyone("...rendezvous...stem (scope world)...rank 1 did not come within 2 s..."),
        When.AT_LIMIT,
        lambda _: forward(named()),
        ranks=3,
        late=[1],
        worlds=["gloo"],
    ),
    "one step more": Fault(
        {2: "...ranks 0, 1 are not there..."},
        When.AT_LIMIT,
        parts.one_step_more,
        ranks=3,
        worlds=["gloo"],
    ),
    "no need of peers": Fault(
        {
            0: "...rank 1 last ran forward of stem without peers, "
            "...rank 0 waits in forward of stem..."
        },
        When.AT_LIMIT,
        parts.no_need_of_peers,
    ),
    "an error in own code": Fault(
        {
            0: OWN_ERROR,
            1: "...rank 0 last finished backward of stem, ...rank 1 waits in forward...",
        },
        When.AT_LIMIT,
        partial(parts.error_in_own_code, nullcontext, "later exchange", "world"),
    ),
    "nothing instead of joined batches": Fault(
        dict.fromkeys((0, 2), "...the next step of joined batches...rank 1..."),
        When.AT_LIMIT,
        partial(parts.left_loop, parts.nothing),
        ranks=3,
    ),
    # Rank 0 waits in the world. Rank 1 waits in {0, 1}, where rank 0 does not arrive. The others
    # pass {2, 3} and wait for rank 1 in the world.
    "a scope of its own": Fault(
        {
            0: f"{STEM}: shared memory: ...waited ... s for rank...1...",
            1: "forward of stem (3 channels, scope group:2) among ranks 0, 1 (here 0 to 1): "
            "shared memory...rank 1 of 2 waited ... s for rank 0...",
        }
        | dict.fromkeys(
            (2, 3),
            f"{STEM.replace('stem', 'head')}: shared memory: ...waited ... s for rank...1...",
        ),
        When.AT_LIMIT,
        parts.changed_scope,
        ranks=4,
        is_own=True,
        worlds=["shared memory"],
    ),
}

# All ranks make the same call, with values or batches that they refuse together.
VALUES = {
    **{
        f"{value} in {text}, {scope}": Fault(
            everyone(f"{text} of stem, got {count} non-finite on rank 1", told),
            When.IN_EXCHANGE,
            partial(parts.bad_values, part, value, scope),
            ranks=4 if scope == "group:2" else 3,
            is_usable=True,
            block=normscope.training.detect_non_finite,
        )
        for value in map(float, ("nan", "inf", "-inf"))
        for text, count, part, scope, told in [
            ("x: expected finite values in forward", 2, forward, "world", 3),
            ("x: expected finite values in forward", 2, forward, "group:2", 2),
            ("dy: expected finite values in backward", 2, parts.backward, "world", 3),
            (
                "gradient sums: expected finite values in double backward",
                3,
                parts.double_backward,
                "world",
                3,
            ),
        ]
    },
    "one value per channel": Fault(
        everyone(
            "ValueError: Expected more than 1 value per channel when training, got 1 on all ranks "
            "together in stem with scope world"
        ),
        When.IN_EXCHANGE,
        lambda rank: forward(named(), torch.zeros(0 if rank else 1, 3)),
        ranks=3,
        is_usable=True,
    ),
    **{
        f"one value per channel, of {sizes}{compiled}": Fault(
            dict.fromkeys(told, "ValueError: ...ore than 1 value per channel..."),
            When.IN_EXCHANGE,
            partial(parts.few_samples, sizes, compiled),
            ranks=3,
            is_usable=True,
            is_own=True,
            worlds=tuple(KERNELS),
        )
        for sizes, compiled, told in [
            ((1, 0, 4), "", [0, 1]),
            ((0, 1, 4), "", [0, 1]),
            ((2, 2, 1), "", [2]),
            ((1, 0, 4), ", compiled", [0, 1]),
            ((2, 2, 1), ", compiled", [2]),
        ]
    },
    "no batches and no like": Fault(
        everyone("ValueError: like: expected a batch on ranks without batches, [0, 2], got None"),
        When.IN_EXCHANGE,
        lambda rank: parts.loop([X] if rank == 1 else []),
        ranks=3,
        is_usable=True,
    ),
}

# Functions of whole models, whose exchanges do not depend on the transport.
OTHER_NUMBERS = "batches: expected the same number on every rank, since layers synchronize, got "
ROWS: list[tuple[str, Any, Callable[[int], Part], int, dict[str, Any]]] = [
    (
        "other layers in sync_running_stats",
        "ValueError: model: expected the same layers on every rank, got other names or "
        "channels on ranks [2] than on rank 0",
        parts.pooled_other_layers,
        3,
        {},
    ),
    (
        "other numbers of batches in estimate_running_stats",
        f"ValueError: {OTHER_NUMBERS}[1, 2]",
        parts.estimated,
        2,
        {},
    ),
    *(
        (
            f"other numbers of batches in recommend_scopes, {length}",
            f"ValueError: {OTHER_NUMBERS}{got}",
            partial(parts.recommended, length),
            3,
            {"is_usable": True},
        )
        for length, got in [
            ("known", "[1, 2, 3]"),
            ("unknown", "1 on ranks [0] and more on the others"),
            ("wrong", "1 on ranks [0] and more on the others"),
        ]
    ),
    *(
        (f"{what} in recommend_scopes", told, partial(parts.recommended, what), 2, {})
        for what, told in [
            ("failing batches", {0: "OSError: no such image", 1: "...no such image..."}),
            (
                "no number",
                {0: "ValueError: noise: expected at least 0, got nan", 1: "...rank 0..."},
            ),
            (
                "other numbers",
                "ValueError: noise: expected the same number on every rank, got [0.5, 1.5]",
            ),
            (
                "replicas",
                {
                    0: "ValueError: model: expected the model in the DataParallel...",
                    1: "...rank 0...",
                },
            ),
            (
                "other layers",
                "ValueError: model: expected 0 to run as often on every rank, got [1, 0] times",
            ),
            ("a sparse output", {0: "...rank 1...", 1: "RuntimeError: ..."}),
            (
                "a NaN in a batch",
                "ValueError: batches: expected finite inputs and gradients of every layer, got "
                "NaN or infinity in 1",
            ),
        ]
    ),
    (
        "a warning that is an error",
        "UserWarning: ...",
        partial(parts.recommended, "too few samples"),
        2,
        {"is_usable": True, "block": parts.warnings_as_errors},
    ),
]
MODELS = {
    what: Fault(
        told if isinstance(told, dict) else everyone(told, ranks),
        When.AT_ONCE,
        prepare,
        ranks=ranks,
        worlds=["shared memory"],
        **settings,
    )
    for what, told, prepare, ranks, settings in ROWS
}

FAULTS = DISAGREEMENTS | ERRORS | ABSENCES | VALUES | MODELS

TRANSPORTS = {"shared memory": "1", "gloo": "0"}


def outcome(name: str) -> Outcome:
    with FAULTS[name].block():
        return outcome_of(FAULTS[name])


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(
            name,
            world,
            # Waits do not depend on the kernels.
            marks=[pytest.mark.own_kernels] if fault.is_own or fault.when is When.AT_LIMIT else [],
        )
        for name, fault in FAULTS.items()
        for world in fault.worlds
    ],
)
def test_each_rank_is_told(
    pools: dict[str, RankPool], devices: RankPool, name: str, world: str
) -> None:
    fault = FAULTS[name]
    pool = devices if world == "device" else pools.get(world, pools["own"])
    environment = {"NORMSCOPE_SHARED_MEMORY": TRANSPORTS.get(world, "1"), **fault.environment}
    if fault.when is When.AT_LIMIT:
        environment["NORMSCOPE_TIMEOUT"] = str(LIMIT_SECONDS)

    outcomes = pool.run(fault.ranks, outcome, name, environment=environment)

    assert_as_described(fault, outcomes)
