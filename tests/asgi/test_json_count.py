"""JSON is counted on raw bytes, exactly, however it comes apart."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvmig.asgi.json_count import JsonCounter, count_values

TEXT = st.text(st.sampled_from('a",:[]{}\\\n\u00e9\U0001f600'))
DOCUMENTS = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=40,
)


def marks(value: Any) -> int:
    """Commas, colons, beginnings of lists and objects."""
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(marks, value))
    if isinstance(value, dict):
        return 1 + len(value) + max(0, len(value) - 1) + sum(map(marks, value.values()))
    return 0


def depth(value: Any) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 0


@given(DOCUMENTS, st.booleans(), st.lists(st.integers(1, 7)))
def test_strings_count_for_nothing_and_all_else_exactly_in_whatever_parts_it_comes(
    value: Any, ascii_only: bool, sizes: list[int]
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    counter, rest = JsonCounter(), body
    for size in sizes:
        counter.feed(rest[:size])
        rest = rest[size:]
    counter.feed(rest)
    assert (counter.values, counter.deepest) == (marks(value), depth(value))
    assert count_values(body) == marks(value)


@given(st.lists(st.binary(max_size=9)))
def test_what_is_no_json_is_counted_without_an_error(parts: list[bytes]) -> None:
    counter = JsonCounter()
    for part in parts:
        counter.feed(part)
    assert counter.values >= 0
