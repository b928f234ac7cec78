# SPDX-License-Identifier: Apache-2.0
"""Ranks on several hosts train with the same bits as on one, and every rank reports faults."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from host_processes import tell
from hosts import Hosts
from rank_pool import split_of
from torch import distributed, nn

import normscope

# A rank stops waiting after LIMIT_SECONDS. Finding out which ranks are missing then takes at most
# QUESTION_SECONDS.
LIMIT_SECONDS = 2.0
QUESTION_SECONDS = 2.0
# The same if a rank reaches neither the other ranks nor the store in which they would answer.
LONE_SECONDS = 15.0
# Extra time on a busy machine.
PATIENCE_SECONDS = 8.0
# The time until a death is noticed: 0.3 s on an idle machine.
PROMPT_SECONDS = 3.0

# Number of samples of each rank, for each step; with fewer ranks, only the first numbers are used.
# Two neighbouring ranks are never without samples in the same step.
SAMPLES = ((2, 2, 2, 2, 2, 2), (3, 0, 4, 1, 0, 2), (1, 5, 0, 2, 3, 0))
IMAGE = (3, 6, 5)

Bits = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


@pytest.fixture
def isolated_hosts(hosts: Hosts) -> Hosts:
    """Hosts whose links can be cut."""
    if not hosts.isolated:
        pytest.skip(f"namespaces: {hosts.why_not_isolated}")
    return hosts


def network(scope: str) -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 5, 3, stride=2),
        nn.BatchNorm2d(5),
    )
    return normscope.convert(net, scope)


def train(scope: str) -> Bits:
    """Train; return this rank's outputs and gradients of each step, and the final state."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    net = network(scope)
    generator = torch.Generator().manual_seed(2)
    bits: Bits = {}
    for step, sizes in enumerate(samples[:size] for samples in SAMPLES):
        images = torch.randn(sum(sizes), *IMAGE, generator=generator) * 3 + 50
        x = images[split_of(sizes, rank)].requires_grad_()
        with normscope.fail_fast():
            y = net(x)
            of_outputs = torch.linspace(-1, 1, y.shape[1:].numel()).view(y.shape[1:])
            (y * of_outputs).square().sum().backward()
        assert x.grad is not None
        bits |= {f"y of {step}": y.detach(), f"dx of {step}": x.grad}
        apply_gradients(net)
    return bits | net.state_dict()


def apply_gradients(net: nn.Module) -> None:
    """Sum gradients in rank order, independently of the network, and take a step of SGD."""
    parameters = list(net.parameters())
    gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    of_ranks = [torch.empty_like(gradient) for _ in range(distributed.get_world_size())]
    distributed.all_gather(of_ranks, gradient)
    parts = torch.stack(of_ranks).sum(0).split([p.numel() for p in parameters])
    with torch.no_grad():
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.sub_(1e-3 * part.view_as(parameter))
            parameter.grad = None


def train_all(scopes: Sequence[str]) -> dict[str, Bits]:
    return {scope: train(scope) for scope in scopes}


def members_of(ranks_of_hosts: Sequence[int]) -> str:
    """Return a scope that shares like `node` on these hosts, for ranks on any hosts."""
    ranks = iter(range(sum(ranks_of_hosts)))
    sets = [[next(ranks) for _ in range(number)] for number in ranks_of_hosts]
    return str(normscope.Scope.ranks([ranks for ranks in sets if len(ranks) > 1]))


@pytest.mark.own_kernels
@pytest.mark.parametrize(
    ("ranks_of_hosts", "scopes"),
    [
        ((2, 2), ["world", "node", "group:2", "group:3", "ranks:0,3/1,2", "norm_batch:6"]),
        ((2, 2, 2), ["world", "node", "group:3", "group:4", "ranks:0,5/1,2,3,4"]),
        ((3, 1), ["world", "group:2", "group:3", "ranks:2,3/0,1"]),
        ((1, 1, 1), ["world", "ranks:0,1,2"]),
        ((1, 3, 2), ["world", "group:2", "group:4"]),
    ],
)
def test_training_on_several_hosts_has_the_bits_of_one_host(
    hosts: Hosts, ranks_of_hosts: tuple[int, ...], scopes: list[str]
) -> None:
    of_one = [members_of(ranks_of_hosts) if scope == "node" else scope for scope in scopes]

    answers = hosts.run(ranks_of_hosts, train_all, scopes)

    expected = hosts.run((sum(ranks_of_hosts),), train_all, of_one)
    for rank, (got, wanted) in enumerate(zip(answers, expected, strict=True)):
        for scope, same in zip(scopes, of_one, strict=True):
            assert got[scope].keys() == wanted[same].keys()
            for name, value in wanted[same].items():
                assert torch.equal(got[scope][name], value), f"rank {rank}, {scope}, {name}"


def train_until_an_error() -> tuple[str, float]:
    """Train until an error; return its text and the time. Tell the test when the ranks have met."""
    net = network("world")
    x = torch.randn(2, *IMAGE)
    net(x).sum().backward()
    tell("begun")
    try:
        while True:
            net(x).sum().backward()
    except distributed.DistError as error:
        return str(error), time.monotonic()


LIMIT = {"NORMSCOPE_TIMEOUT": str(LIMIT_SECONDS)}


def errors_after_a_cut(
    hosts: Hosts, ranks_of_hosts: Sequence[int], cut: int, of: Sequence[int]
) -> list[tuple[str, float]]:
    """Cut a host's link; return what the ranks in `of` raise, and after how many seconds."""
    with hosts.begun(ranks_of_hosts, train_until_an_error, environment=LIMIT) as run:
        run.notes()
        with hosts.link_cut(cut):
            begin = time.monotonic()
            answers = run.answers(of)
    assert not [answer.failure for answer in answers if answer.failure]
    return [(answer.result[0], answer.result[1] - begin) for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks_of_hosts", "missing"), [((2, 2), "rank(s 2 and 3 are| 2 is)"), ((1, 1, 1), "rank 1 is")]
)
def test_ranks_with_the_store_name_a_host_that_is_cut_off(
    isolated_hosts: Hosts, ranks_of_hosts: Sequence[int], missing: str
) -> None:
    stay = (0, 1) if ranks_of_hosts == (2, 2) else (0, 2)

    errors = errors_after_a_cut(isolated_hosts, ranks_of_hosts, 1, stay)

    for text, seconds in errors:
        # If the ranks of a host add in shared memory, only the first of them is named.
        assert re.search(f"{missing} not there", text)
        assert re.search(r"(forward|backward) of \d \(\d channels, scope world\)", text)
        assert seconds < LIMIT_SECONDS + QUESTION_SECONDS + PATIENCE_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 1])
def test_ranks_that_are_cut_off_from_the_store_do_not_hang(isolated_hosts: Hosts, cut: int) -> None:
    # The store is on host 0. The others lose it if either link breaks.
    errors = errors_after_a_cut(isolated_hosts, (2, 2), cut, (2, 3))

    for text, seconds in errors:
        assert re.search(
            r"the group's store does not answer|for rank 2 of 4, which waits for other hosts",
            text,
        )
        assert seconds < LIMIT_SECONDS + LONE_SECONDS


def errors_after_a_kill(
    hosts: Hosts, ranks_of_hosts: Sequence[int], killed: int
) -> list[tuple[str, float]]:
    with hosts.begun(ranks_of_hosts, train_until_an_error) as run:
        run.notes()
        begin = time.monotonic()
        run.kill(killed)
        answers = run.answers()
    assert answers.pop(killed).failure == "died with exit code -9"
    assert not [answer.failure for answer in answers if answer.failure]
    return [(answer.result[0], answer.result[1] - begin) for answer in answers]


@pytest.mark.parametrize(
    ("ranks_of_hosts", "killed"), [((2, 2), 1), ((2, 2), 2), ((2, 2), 3), ((1, 1, 1), 1)]
)
def test_a_killed_rank_is_named_on_every_host(
    hosts: Hosts, ranks_of_hosts: Sequence[int], killed: int
) -> None:
    for text, seconds in errors_after_a_kill(hosts, ranks_of_hosts, killed):
        assert re.search(rf"rank {killed} (of \d )?(has died|is not there)", text)
        assert seconds < PROMPT_SECONDS


@pytest.mark.slow
def test_no_rank_hangs_if_the_rank_with_the_store_is_killed(hosts: Hosts) -> None:
    for text, seconds in errors_after_a_kill(hosts, (2, 2), 0):
        # Without the store, only ranks that share memory with rank 0 can tell that it has died.
        assert re.search(r"\brank 0\b.* has died|the group's store does not answer", text)
        assert seconds < PROMPT_SECONDS
