# SPDX-License-Identifier: Apache-2.0
"""What ranks do when one of them is at fault, and a comparison of its outcome with a description.

Whatever the fault: a call that raised has updated nothing, the program's own messages arrive, and
the ranks can exchange again.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from rank_pool import connected_group
from torch import distributed, nn

import normscope

# The limit of exchanges if ranks are told then. They raise at most so much later, as they look for
# those that are missing, and the machine may be busy.
LIMIT_SECONDS = 2.0
AFTER_LIMIT_SECONDS = 4.0

# Far longer than ranks wait that are told at once, even on a busy machine, and far shorter than the
# limit of a minute that other exchanges have.
AT_ONCE_SECONDS = 4.0

# A model, and a call that its rank makes while the other ranks make theirs.
Part = tuple[nn.Module, Callable[[], object]]


class When(Enum):
    """When ranks are told."""

    AT_ONCE = "without waiting for the rank at fault"
    IN_EXCHANGE = "as soon as all have arrived"
    AT_LIMIT = "at the limit; those that come after it, at once"


@dataclass(frozen=True)
class Fault:
    """What ranks do, one of them not as its peers, and what follows.

    Attributes:
        told: By rank, the error of its call. "..." stands for any part of a line. An error begins
            with its type, unless that is torch.distributed's. Other ranks raise nothing.
        when: They are told.
        prepare: Returns the part of a rank.
        ranks: Their number.
        late: The ranks that make their call after the others have finished theirs.
        is_usable: Whether the group can exchange afterwards; otherwise, a new one can.
        is_own: Whether the texts are those of the library's own kernels.
        names_types: Whether errors of torch.distributed begin with their types, too.
        worlds: The transports between the ranks, or the kernels, or "device".
        environment: More variables of the environment.
        block: Makes the block in which all this happens.
    """

    told: Mapping[int, str]
    when: When
    prepare: Callable[[int], Part]
    ranks: int = 2
    late: Sequence[int] = ()
    is_usable: bool = False
    is_own: bool = False
    names_types: bool = False
    worlds: Sequence[str] = ("shared memory", "gloo")
    environment: Mapping[str, str] = field(default_factory=dict)
    block: Callable[[], AbstractContextManager[object]] = nullcontext


def everyone(text: str, ranks: int = 3) -> dict[int, str]:
    return dict.fromkeys(range(ranks), text)


def disagreement(texts: list[str], prepare: Callable[[int], Part], **settings: Any) -> Fault:
    """Return a fault in which ranks make different calls. Each is told what every one was doing."""
    lines = "".join(f"  rank {rank}: {text}\n" for rank, text in enumerate(texts))
    told = everyone(f"...\n{lines}...", len(texts))
    settings = {"is_usable": True, "is_own": True} | settings
    return Fault(told, When.IN_EXCHANGE, prepare, len(texts), **settings)


class Outcome(NamedTuple):
    """The error of a rank's call, when it was raised, and whether it has updated something."""

    error: str
    seconds: float
    has_updated: bool


def outcome_of(fault: Fault) -> Outcome:
    """Let this rank play its part."""
    rank = distributed.get_rank()
    model, call = fault.prepare(rank)
    before = state_of(model)
    store = distributed.distributed_c10d._get_default_store()
    store.set(f"ready{rank}", "")
    store.wait([f"ready{other}" for other in range(fault.ranks)])
    if rank in fault.late:
        store.wait([f"done{other}" for other in range(fault.ranks) if other not in fault.late])
    begin = time.monotonic()
    error = text_of_error(call, names_types=fault.names_types)
    seconds = time.monotonic() - begin
    store.set(f"done{rank}", "")
    after = state_of(model)
    has_updated = any(n not in before or not torch.equal(t, before[n]) for n, t in after.items())
    # A rank without a call gets here while its peers still wait for it.
    assert_messages_of_the_program_arrive()
    os.environ.pop("NORMSCOPE_TIMEOUT", None)
    if fault.is_usable:
        assert_ranks_can_exchange(*group_and_device_of(model))
    else:
        assert_ranks_can_exchange(connected_group(range(fault.ranks)), "cpu")
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    return Outcome(error, seconds, has_updated)


def text_of_error(call: Callable[[], object], *, names_types: bool) -> str:
    try:
        call()
    except BaseException as error:
        if isinstance(error, distributed.DistError) and not names_types:
            return str(error)
        return f"{type(error).__name__}: {error}"
    return ""


def layers_of(model: nn.Module) -> dict[str, normscope.BatchNorm]:
    return {n: m for n, m in model.named_modules() if isinstance(m, normscope.BatchNorm)}


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of buffers and gradients, and the numbers of elements that layers have seen."""
    gradients = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    state = {n: t.cpu().clone() for n, t in (dict(model.named_buffers()) | gradients).items()}
    seen = {f"{n}.seen": m.elements_seen for n, m in layers_of(model).items()}
    return state | {n: torch.tensor(count) for n, count in seen.items() if count is not None}


def assert_messages_of_the_program_arrive() -> None:
    sums = torch.ones(64, 64, dtype=torch.float64)
    distributed.all_reduce(sums)
    assert bool((sums == distributed.get_world_size()).all())


def group_and_device_of(model: nn.Module) -> tuple[Any, Any]:
    layer, *_ = layers_of(model).values()
    return layer.process_group, layer.get_buffer("running_mean").device


def assert_ranks_can_exchange(group: Any, device: Any) -> None:
    layer = normscope.BatchNorm1d(1, momentum=1.0, process_group=group).to(device)
    layer.layer_name = "afterwards"
    for dtype in (torch.float32, torch.float64):
        x = torch.full((2, 1), float(distributed.get_rank()), dtype=dtype, device=device)
        layer(x).sum().backward()
        assert layer.get_buffer("running_mean").item() == (distributed.get_world_size() - 1) / 2


def assert_as_described(fault: Fault, outcomes: list[Outcome]) -> None:
    """Compare the outcomes on all ranks with the fault's description."""
    waits = []
    for rank, (error, seconds, has_updated) in enumerate(outcomes):
        text = fault.told.get(rank, "")
        pattern = re.escape(text).replace(re.escape("..."), ".*")
        # In a text of several lines, the parts are within a line.
        assert re.fullmatch(pattern, error, 0 if "\n" in text else re.DOTALL), f"{rank}: {error}"
        assert not (error and has_updated), f"rank {rank} has updated something"
        if fault.when is When.AT_ONCE and error:
            assert seconds < AT_ONCE_SECONDS
        elif fault.when is When.AT_LIMIT and rank in fault.late:
            assert seconds < LIMIT_SECONDS
        elif fault.when is When.AT_LIMIT and error:
            assert seconds < LIMIT_SECONDS + AFTER_LIMIT_SECONDS
            waits.append(seconds)
    # The first ranks to wait tell the others, at their own limit.
    assert max(waits, default=LIMIT_SECONDS) >= LIMIT_SECONDS
