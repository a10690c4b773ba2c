"""A hashable picture of any state: equal for equal states."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType

import msgspec

_PLAIN = (str, int, float, bool, bytes, type(None), Enum)
_CODE = (FunctionType, MethodType, BuiltinFunctionType)


def freeze(value: object) -> Hashable:
    """Nested tuples of all that `value` holds; code counts by its name."""
    return _freeze(value, set())


def _freeze(value: object, inside: set[int]) -> Hashable:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, _CODE):
        return value.__qualname__
    if id(value) in inside:
        return "itself"
    inside.add(id(value))
    try:
        return _parts(value, inside)
    finally:
        inside.discard(id(value))


def _parts(value: object, inside: set[int]) -> Hashable:
    if isinstance(value, tuple | list | deque):
        return tuple(_freeze(one, inside) for one in value)
    if isinstance(value, dict):
        return tuple((_freeze(key, inside), _freeze(one, inside)) for key, one in value.items())
    if isinstance(value, set | frozenset):
        return frozenset(_freeze(one, inside) for one in value)
    names: list[str] = list(getattr(value, "__dict__", ()))
    if isinstance(value, msgspec.Struct):
        names = list(value.__struct_fields__)
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return type(value).__name__, *(
        (name, _freeze(getattr(value, name), inside)) for name in dict.fromkeys(names)
        if hasattr(value, name)
    )  # fmt: skip
