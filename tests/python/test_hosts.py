# SPDX-License-Identifier: Apache-2.0
"""Ranks of several hosts train as ranks of one: the same bits, and faults that are told."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from host_processes import tell
from hosts import Hosts
from rank_pool import split_of
from torch import distributed, nn

import normscope
from normscope import _library, _process_group

# Samples of each rank, in each step; a rank takes its share of as many as it needs. No two
# neighbours are without samples at once.
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
    """Of this rank: what each step gives it, and all that it has learnt at the end."""
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
    """Summed in the order of the ranks, whatever lies between them."""
    parameters = list(net.parameters())
    gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    of_ranks = [torch.empty_like(gradient) for _ in range(distributed.get_world_size())]
    distributed.all_gather(of_ranks, gradient)
    parts = torch.stack(of_ranks).sum(0).split([p.numel() for p in parameters])
    with torch.no_grad():
        for parameter, part in zip(parameters, parts, strict=True):
            parameter -= 1e-3 * part.view_as(parameter)
            parameter.grad = None


def train_all(scopes: Sequence[str]) -> dict[str, Bits]:
    return {scope: train(scope) for scope in scopes}


def members_of(ranks_of_hosts: Sequence[int]) -> str:
    """The scope that is `node` there, wherever the ranks are."""
    ranks = iter(range(sum(ranks_of_hosts)))
    sets = [[next(ranks) for _ in range(number)] for number in ranks_of_hosts]
    return str(normscope.Scope.ranks([ranks for ranks in sets if len(ranks) > 1]))


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
def test_training_on_hosts_has_the_bits_of_training_on_one(
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
