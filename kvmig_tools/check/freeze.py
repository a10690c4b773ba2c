"""A hashable picture of any state: equal for equal states."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Literal

import msgspec

_PLAIN = (str, int, float, bool, bytes, type(None), Enum)
Sort = Literal["plain", "code", "sequence", "mapping", "set", "object"]
_CODE = (FunctionType, MethodType, BuiltinFunctionType)
_SORTS: dict[type, Sort] = {}
_FIELDS: dict[type, tuple[str, ...]] = {}
"""What was found out of types."""


def freeze(value: object, ordered: bool = True) -> Hashable:
    """Nested tuples of all that `value` holds; code counts by its name.

    ordered: whether the order matters in which dictionaries were filled.
    """
    return _freeze(value, {}, ordered)


def _sort(kind: type) -> Sort:
    if issubclass(kind, _PLAIN):
        return "plain"
    if issubclass(kind, _CODE):
        return "code"
    if issubclass(kind, tuple | list | deque):
        return "sequence"
    if issubclass(kind, dict):
        return "mapping"
    return "set" if issubclass(kind, set | frozenset) else "object"


def _fields(kind: type) -> tuple[str, ...]:
    """Attributes that aren't in `__dict__`."""
    names: list[str] = []
    if issubclass(kind, msgspec.Struct):
        names += kind.__struct_fields__
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(dict.fromkeys(names))


def _freeze(value: Any, seen: dict[int, Hashable], ordered: bool) -> Hashable:
    """seen: pictures by `id`; of what is being looked at, that it is itself."""
    kind = type(value)
    sort = _SORTS.get(kind) or _SORTS.setdefault(kind, _sort(kind))
    if sort == "plain":
        plain: Hashable = value
        return plain
    if sort == "code":
        return str(value.__qualname__)
    picture = seen.get(id(value))
    if picture is None:
        seen[id(value)] = "itself"
        picture = seen[id(value)] = _look(value, sort, seen, ordered)
    return picture


def _look(value: Any, sort: Sort, seen: dict[int, Hashable], ordered: bool) -> Hashable:
    if sort == "sequence":
        return tuple([_freeze(one, seen, ordered) for one in value])
    if sort == "set":
        return frozenset(value)
    if sort == "mapping":
        items = [(key, _freeze(one, seen, ordered)) for key, one in value.items()]
        return tuple(items) if ordered else frozenset(items)
    kind = type(value)
    if kind not in _FIELDS:
        _FIELDS[kind] = _fields(kind)
    held = dict(getattr(value, "__dict__", ()))
    for name in _FIELDS[kind]:
        if hasattr(value, name):
            held[name] = getattr(value, name)
    frozen = [(name, _freeze(one, seen, ordered)) for name, one in held.items()]
    return kind.__name__, *frozen
