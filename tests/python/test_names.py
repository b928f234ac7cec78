# SPDX-License-Identifier: Apache-2.0
"""Names and reasons that are not ASCII, or longer than what carries them."""

from __future__ import annotations

import os
from functools import partial

import torch
from programs import printed
from rank_pool import RankPool, connected_group, error_of
from torch import distributed

import normscope

# The characters have 2, 3 and 4 bytes. With up to three bytes before and behind them, each limit
# falls on each of their bytes.
LONG = [(text, shift) for text in ("слой.", "€", "😀") for shift in ("", "a", "ab", "abc")]
ENDS = [text + shift for text, shift in LONG]


def names(length: int) -> list[str]:
    return [shift + text * length + shift for text, shift in LONG]


def layer_named(name: str) -> normscope.BatchNorm1d:
    layer = normscope.BatchNorm1d(3)
    layer.layer_name = name
    return layer


def batch() -> torch.Tensor:
    return torch.randn(4, 3)


def statuses() -> list[str]:
    """Return what status() says after each layer, and what rank 0's command says at the end."""
    texts = []
    for name in names(90):
        layer_named(name)(batch())
        texts.append(normscope.status())
    if distributed.get_rank() == 0:
        texts.append(printed("status", str(os.getpid())))
    distributed.barrier()
    return texts


def test_a_status_shows_the_end_of_a_long_name(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    for texts in ranks.run(2, statuses, environment=environment):
        for text, end in zip(texts, (*ENDS, ENDS[-1]), strict=False):
            assert "forward of " in text
            assert f"{end}, " in text


def test_a_status_can_be_printed_in_ascii(ranks: RankPool) -> None:
    [text, _] = ranks.run(2, status_in_ascii)

    assert r"forward of \u0441\u043b\u043e\u0439" in text


def status_in_ascii() -> str:
    layer_named("слой")(batch())
    distributed.barrier()
    text = printed("status", str(os.getpid()), encoding="ascii")
    distributed.barrier()
    return text


def mismatches() -> list[str]:
    """Return the errors of ranks whose layers differ in the end of a long name."""
    return [
        error_of(partial(layer_named(f"{name}{distributed.get_rank()}"), batch()))
        for name in names(2000)
    ]


def test_a_mismatch_shows_direction_and_scope_of_a_layer_with_a_long_name(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    for texts in ranks.run(2, mismatches, environment=environment):
        for text, end in zip(texts, ENDS, strict=True):
            for rank in (0, 1):
                assert f"\n  rank {rank}: forward of ..." in text
                assert f"{end}{rank} (3 channels, scope world" in text


# Of the characters with the most bytes only: over Gloo, each takes a second.
REASONS = names(600)[-4:]


def reasons() -> list[str]:
    """Return the errors of ranks of which rank 1 fails with a long reason."""
    texts = []
    for name in REASONS:
        layer = layer_named(name)
        group = connected_group([0, 1])
        layer.process_group = group
        layer(batch())

        def step(layer: normscope.BatchNorm1d = layer, name: str = name) -> None:
            with normscope.fail_fast():
                if distributed.get_rank() == 1:
                    raise ValueError(name)
                layer(batch())

        texts.append(error_of(step, RuntimeError if distributed.get_rank() == 0 else ValueError))
        distributed.barrier()
    return texts


def test_a_long_reason_reaches_the_peers(ranks: RankPool, environment: dict[str, str]) -> None:
    of_rank_0, of_rank_1 = ranks.run(2, reasons, environment=environment)

    assert of_rank_1 == REASONS
    for text, name in zip(of_rank_0, of_rank_1, strict=True):
        assert f"rank 1 of 2 failed: ValueError: {name[:100]}" in text.replace(
            "rank 1 failed", "rank 1 of 2 failed"
        )


def rank_1_has_a_lone_surrogate() -> tuple[str, str]:
    layer = layer_named("layer")
    layer(batch())

    def raise_one() -> None:
        with normscope.fail_fast():
            if distributed.get_rank() == 1:
                raise OSError("a\udc80b")
            layer(batch())

    of_reason = error_of(raise_one, Exception)
    other = connected_group([0, 1])
    layer.process_group = other
    layer.layer_name = "a\udc80b" if distributed.get_rank() == 1 else "layer"
    return of_reason, error_of(lambda: layer(batch()), Exception)


def test_a_lone_surrogate_is_told_to_peers(ranks: RankPool, environment: dict[str, str]) -> None:
    of_rank_0, of_rank_1 = ranks.run(2, rank_1_has_a_lone_surrogate, environment=environment)

    assert of_rank_1[0] == "a\udc80b"
    assert r"OSError: a\udc80b" in of_rank_0[0]
    assert "for argument 'layer'" in of_rank_1[1]
    assert "for argument 'layer'" in of_rank_0[1]
