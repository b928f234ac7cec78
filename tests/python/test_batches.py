# SPDX-License-Identifier: Apache-2.0
"""Batches of the classes that programs use are counted, and can be without samples."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from rank_pool import RankPool
from torch import distributed
from torch.nn.utils.rnn import pack_sequence

import normscope
from normscope.training import empty_batch_like


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclass
class Record:
    x: torch.Tensor
    count: int


@dataclass(frozen=True)
class Counted:
    x: torch.Tensor
    samples: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", len(self.x))


@dataclass
class NeverEmpty:
    x: torch.Tensor

    def __post_init__(self) -> None:
        if not len(self.x):
            raise ValueError("there must be a sample")


class Attributes(dict[str, Any]):
    """Raises KeyError for attributes that it lacks, as programs write it."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Merging(dict[str, Any]):
    """Writes the items of another mapping into those that it has."""

    def update(self, other: Any) -> None:  # type: ignore[override]
        for key, value in other.items():
            if isinstance(value, dict):
                self[key].update(value)
            else:
                self[key] = value


class OwnMapping(MutableMapping[str, Any]):
    """Keeps its items in an object that a shallow copy shares."""

    def __init__(self, **values: object) -> None:
        self.store = SimpleNamespace(values=values)

    def __getitem__(self, key: str) -> Any:
        return self.store.values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.store.values[key] = value

    def __delitem__(self, key: str) -> None:
        del self.store.values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.store.values)

    def __len__(self) -> int:
        return len(self.store.values)

    def __repr__(self) -> str:
        return f"OwnMapping({self.store.values})"


class Converting(OwnMapping):
    """Makes its items when they are asked for."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key).clone()


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Graph:
    """Keeps tensors in objects in a list, and itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.frames = [SimpleNamespace(columns={"x": Slots(x)})]
        self.whole = self


class Ring:
    """Holds itself and its class, and no tensors."""

    def __init__(self) -> None:
        self.next, self.kind = self, Ring

    def __repr__(self) -> str:
        return "Ring()"


class Target(list[Any]):
    """Is made from its items, not from a list of them."""

    def __init__(self, *items: object) -> None:
        super().__init__(items)


Build = Callable[[torch.Tensor], Any]

BATCHES: list[Build] = [
    lambda x: x,
    lambda x: (x, 1, "two"),
    lambda x: [x, [x]],
    lambda x: [x, Ring()],
    lambda x: (x, x),
    lambda x: {"x": x, "scale": 2.0},
    lambda x: OrderedDict(x=x, inner=(x, None)),
    lambda x: defaultdict(int, x=x),
    lambda x: UserDict(x=x, inner={"x": x}),
    lambda x: Attributes(x=x),
    lambda x: Merging(x=x, inner=Merging(x=x)),
    lambda x: OwnMapping(x=x, inner=OwnMapping(x=x)),
    lambda x: MappingProxyType({"x": x}),
    lambda x: Pair(x, "name"),
    lambda x: torch.return_types.max((x, x)),
    lambda x: Target(x, 1),
    lambda x: Record(x, 3),
    lambda x: Counted(x),
    lambda x: [Record(x, 3), {"pair": Pair(x, "name")}],
]

REFUSED: list[tuple[Build, type[Exception], str]] = [
    *(
        (build, TypeError, f"got a {text}.* pass its tensors in one of")
        for build, text in [
            (lambda x: SimpleNamespace(x=x), "SimpleNamespace with tensors"),
            (lambda x: (x, Slots(x)), "Slots with tensors"),
            (lambda x: {"x": x, "more": deque([x])}, "deque with tensors"),
            (lambda x: [x, SimpleNamespace(inner={"x": x})], "SimpleNamespace with tensors"),
            (lambda x: (x, Graph(x)), "Graph with tensors"),
            (lambda x: Converting(x=x), "Converting with tensors"),
            (NeverEmpty, r"NeverEmpty .*\(ValueError: there must be a sample\)"),
        ]
    ),
    (lambda _: {"name": "x"}, ValueError, "got no tensor in a dict"),
    (lambda _: torch.tensor(1.0), ValueError, "got no tensor in a Tensor"),
    (lambda x: (x, torch.zeros(3)), ValueError, r"got sizes \[4, 3\] there"),
    (
        lambda _: pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]),
        ValueError,
        r"got sizes \[4, 3\] there",
    ),
    *(
        (build, TypeError, r"tensors of torch\.strided, got ")
        for build in (
            torch.Tensor.to_sparse_coo,
            torch.Tensor.to_sparse_csr,
            lambda x: torch.nested.nested_tensor([x, x[:1]]),
            lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
        )
    ),
]


@pytest.mark.parametrize("build", BATCHES)
def test_batches_are_counted_and_have_empty_ones_of_their_structure(build: Build) -> None:
    batches = [build(torch.ones(n, 3, 5, dtype=torch.bfloat16)) for n in (4, 5)]
    texts = [repr(batch) for batch in batches]

    empty = empty_batch_like(batches[0])
    steps = list(normscope.joined(batches))

    assert type(empty) is type(batches[0])
    # The repr of an empty tensor contains its size and dtype.
    assert repr(empty) == repr(build(torch.empty(0, 3, 5, dtype=torch.bfloat16)))
    assert [weight for _, weight in steps] == [1 / 4, 1 / 5]
    assert all(got is given for (got, _), given in zip(steps, batches, strict=True))
    assert [repr(batch) for batch in batches] == texts


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize(("build", "error", "text"), REFUSED)
def test_other_batches_are_refused(build: Build, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match="batches: expected .*" + text):
        list(normscope.joined([build(torch.ones(4, 3))]))


def test_an_empty_tensor_keeps_its_other_sizes_and_shares_no_memory() -> None:
    x = torch.ones(4, 3, 5, 5, requires_grad=True).to(memory_format=torch.channels_last)
    scale = torch.tensor(2.0)

    empty, kept = empty_batch_like((x, scale))

    assert empty.shape == (0, 3, 5, 5)
    assert (empty.dtype, empty.device) == (x.dtype, x.device)
    assert not empty.requires_grad
    assert empty.untyped_storage().nbytes() == 0
    assert kept is scale


def keys_of_steps() -> list[list[str]]:
    """Take a key out of each batch, as programs do."""
    own = [{"x": torch.ones(2, 1), "y": torch.ones(2)}] * (1 if distributed.get_rank() else 3)
    keys = []
    for batch, _ in normscope.joined([dict(batch) for batch in own]):
        keys.append(sorted(batch))
        batch.pop("y")
    return keys


def test_a_program_may_change_the_empty_batches(ranks: RankPool) -> None:
    assert ranks.run(2, keys_of_steps) == [[["x", "y"]] * 3] * 2
