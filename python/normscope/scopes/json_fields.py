# SPDX-License-Identifier: Apache-2.0
"""Reads dataclasses from parsed JSON, and checks the types of their fields."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

Data = TypeVar("Data")


def read(data_class: type[Data], fields: object) -> Data:
    """Return an instance with these fields, which may be other dataclasses and tuples of them.

    Raises:
        ValueError: If a field is missing, unknown or of another type.
    """
    names = [each.name for each in dataclasses.fields(data_class)]  # type: ignore[arg-type]
    if not isinstance(fields, dict) or set(fields) != set(names):
        got = list(fields) if isinstance(fields, dict) else _kind(fields)
        raise ValueError(f"{data_class.__name__}: expected fields {names}, got {got}")
    types_of = typing.get_type_hints(data_class)
    return data_class(**{name: _value(types_of[name], fields[name], name) for name in names})


def _value(expected: Any, value: Any, name: str) -> Any:  # noqa: ANN401 - types and JSON
    if isinstance(expected, types.UnionType):  # with None
        if value is None:
            return None
        (expected,) = (each for each in typing.get_args(expected) if each is not types.NoneType)
    if typing.get_origin(expected) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name}: expected a list, got {_kind(value)}")
        item, _ = typing.get_args(expected)
        return tuple(_value(item, each, name) for each in value)
    if dataclasses.is_dataclass(expected):
        return read(expected, value)  # type: ignore[arg-type]
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is not expected:
        raise ValueError(f"{name}: expected {expected.__name__}, got {_kind(value)}")
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
