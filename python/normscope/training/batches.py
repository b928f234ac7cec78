# SPDX-License-Identifier: Apache-2.0
"""Batches of the classes that programs use: their number of samples, and batches without any."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Set
from types import ModuleType
from typing import Any, TypeVar

import torch

Batch = TypeVar("Batch")

# How deep objects of other classes are searched for tensors.
_LEVELS = 6


def empty_batch_like(batch: Batch) -> Batch:
    """Return a copy of a batch without samples: each tensor gets size 0 in dimension 0.

    Args:
        batch: A tensor, or an arbitrarily nested tuple, list, mapping or dataclass of tensors; a
            TensorDict or tensorclass, or a torch_geometric Batch. Derived classes are included.

    Returns:
        The same structure. Tensors keep their dtype, device and other sizes, and share no memory.
        Tensors without dimensions, and everything else, are kept. ``batch`` does not change.

    Raises:
        TypeError: If an object of another class has tensors, one of these classes cannot be made
            without samples, or a tensor is sparse or nested.
        ValueError: If a TensorDict has an empty ``batch_size``.

    Example:
        >>> x, y = empty_batch_like((torch.ones(4, 3, 8, 8), torch.ones(4)))
        >>> x.shape, y.shape
        (torch.Size([0, 3, 8, 8]), torch.Size([0]))
    """
    emptied: Batch = _emptied(batch)
    return emptied


def samples_of(batch: object) -> int:
    """Return the number of samples of a batch: the size of its tensors in dimension 0.

    Raises:
        TypeError: As :func:`empty_batch_like` does.
        ValueError: If the batch has no tensors, or they differ in this size.
    """
    sizes = list(_sizes_of(batch))
    if not sizes:
        _emptied(batch)  # raises the error of another class with tensors
    if not sizes or len(set(sizes)) > 1:
        raise ValueError(
            "batches: expected tensors with the same number of samples in dimension 0, got "
            + (f"sizes {sizes} there" if sizes else f"no tensor in a {type(batch).__name__}")
        )
    return sizes[0]


def _sizes_of(value: object) -> Iterator[int]:
    """Yield the number of samples of each tensor that has dimensions."""
    if isinstance(value, torch.Tensor):
        if _strided(value).dim() > 0:
            yield value.shape[0]
    elif _is_tensor_dict(value):
        yield _of_samples(value).batch_size[0]
    elif _is_batch_of_graphs(value):
        yield value.num_graphs  # type: ignore[attr-defined]
    else:
        for part in _parts_of(value):
            yield from _sizes_of(part)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"one of {tensor.layout}"
        raise TypeError(
            f"batches: expected tensors of torch.strided, got {kind}, which has no part without "
            "samples; pass its values and sizes as tensors of the batch"
        )
    return tensor


def _emptied(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, torch.Tensor):
        return _strided(value).detach()[:0].clone() if value.dim() > 0 else value
    if _is_tensor_dict(value):
        return _of_samples(value).detach()[:0].clone()
    if _is_batch_of_graphs(value):
        return _without_graphs(value)
    parts = {id(part): part for part in _parts_of(value)}
    if not parts:
        if _holds_tensors(value, set()):
            raise _refusal(value)
        return value
    emptied = {address: _emptied(part) for address, part in parts.items()}
    try:
        clone = _with_parts(value, emptied)
        left = [size for size in _sizes_of(clone) if size > 0]
    except Exception as error:
        raise _refusal(value, f" ({type(error).__name__}: {error})") from error
    if left:  # a class may make its parts when they are asked for
        raise _refusal(value)
    return clone


def _parts_of(value: object) -> list[Any]:
    """Return the values in a structure; none of anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in _given_fields(value)]
    if isinstance(value, Mapping):
        return [value[key] for key in value]
    if isinstance(value, (tuple, list)):
        return list(value)
    return []


def _with_parts(value: Any, parts: dict[int, Any]) -> Any:  # noqa: ANN401
    """Return a copy of a structure with other parts, given by the ``id`` of those it has."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in _given_fields(value)}
        others = {name: parts[id(part)] for name, part in fields.items()}
        return dataclasses.replace(value, **others)  # type: ignore[type-var]
    if isinstance(value, dict):
        clone = copy.copy(value)  # keeps the attributes of a derived class
        for key, part in value.items():
            dict.__setitem__(clone, key, parts[id(part)])  # an update of a derived class may differ
        return clone
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)({key: parts[id(value[key])] for key in value})  # type: ignore[call-arg]
    # The storage of a shallow copy could be that of the original.
    keys = {id(key): key for key in value} if isinstance(value, Mapping) else {}
    return copy.deepcopy(value, keys | parts)


def _given_fields(value: Any) -> list[dataclasses.Field[Any]]:  # noqa: ANN401
    """Return the fields of a dataclass that its constructor takes; it computes the others."""
    return [field for field in dataclasses.fields(value) if field.init]


def _holds_tensors(value: object, looked_at: set[int], levels: int = _LEVELS) -> bool:
    """Return whether there are tensors in an object or in what it holds, some levels deep."""
    if isinstance(value, torch.Tensor):
        return True
    if levels == 0 or id(value) in looked_at or isinstance(value, (type, ModuleType)):
        return False
    looked_at.add(id(value))
    return any(_holds_tensors(item, looked_at, levels - 1) for item in _held_by(value))


def _held_by(value: object) -> list[object]:
    """Return the attributes of an object and the items of a collection."""
    held = list(getattr(value, "__dict__", {}).values())
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        held.extend(getattr(value, name, None) for name in names)
    if isinstance(value, (tuple, list, Set, deque)):
        held.extend(value)
    elif isinstance(value, Mapping):
        held.extend(value.values())
    return held


def _refusal(value: object, why: str = "") -> TypeError:
    name = type(value).__name__
    return TypeError(
        "batches: expected tensors, or tuples, lists, mappings, dataclasses, TensorDicts or "
        f"torch_geometric Batches of them, got a {name} with tensors, which cannot be made without "
        f"samples{why}; pass its tensors in one of these, and make the {name} in the loop"
    )


# Classes of tensordict and torch_geometric, which need not be installed.


def _is_tensor_dict(value: object) -> bool:
    """Return whether an object is a TensorDict or a tensorclass."""
    return hasattr(type(value), "batch_size") and isinstance(value.batch_size, torch.Size)  # type: ignore[attr-defined]


def _of_samples(value: Any) -> Any:  # noqa: ANN401
    if not value.batch_size:
        raise ValueError(
            f"batches: expected a {type(value).__name__} whose batch_size begins with the number "
            "of samples, got an empty batch_size"
        )
    return value


def _is_batch_of_graphs(value: object) -> bool:
    return hasattr(type(value), "__cat_dim__") and hasattr(type(value), "num_graphs")


def _without_graphs(batch: Any) -> Any:  # noqa: ANN401
    """Return a copy of a batch of graphs, whose tensors are joined along various dimensions."""
    clone = copy.copy(batch)  # with stores of its own
    clone._num_graphs = 0
    for store in clone.stores:
        for key, value in dict(store).items():
            if key == "num_nodes":
                store[key] = 0
            elif key == "ptr":  # where each graph begins, and the last one ends
                store[key] = value[:1].clone()
            elif isinstance(value, torch.Tensor):
                dim = batch.__cat_dim__(key, value, store)
                store[key] = value.detach().narrow(dim or 0, 0, 0).clone()
            else:
                store[key] = value[:0] if isinstance(value, list) else _emptied(value)
    return clone
