"""W3C's traceparent, as clients send it: well-formed, malformed and hostile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.tracing.parents import ClientContext, TraceParent, read_context, read_parent

GOOD = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PARENT = TraceParent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, True)


@pytest.mark.parametrize(
    ("value", "parent"),
    [
        (GOOD, PARENT),
        (GOOD[:-2] + b"00", PARENT._replace(sampled=False)),
        (GOOD[:-2] + b"ff", PARENT),
        (b"01" + GOOD[2:] + b"-what-comes-later", PARENT),
        (GOOD + b"-more", None),
        (b"ff" + GOOD[2:], None),
        (GOOD.upper(), None),
        (b" " + GOOD, None),
        (GOOD + b"\n", None),
        (b"00-" + b"0" * 32 + GOOD[35:], None),
        (GOOD[:36] + b"0" * 16 + b"-01", None),
        (b"t", None),
        (b"01" + GOOD[2:] + b"-" + b"x" * 100_000, None),
    ],
)
def test_a_traceparent_is_read_as_w3c_says(value: bytes, parent: TraceParent | None) -> None:
    assert read_parent(value) == parent


@given(st.binary(max_size=80))
def test_no_value_of_a_header_raises(value: bytes) -> None:
    found = read_parent(value)
    if found is not None and value.startswith(b"00"):
        assert found.header()[:-2] == value[:-2]


def test_a_traceparent_that_is_there_twice_counts_as_absent() -> None:
    assert read_context([(b"traceparent", GOOD), (b"traceparent", GOOD)]) == ClientContext()


def test_a_tracestate_without_a_parent_counts_nothing() -> None:
    assert read_context([(b"tracestate", b"a=1")]) == ClientContext()


@pytest.mark.parametrize("state", [b"a=" + b"x" * 600, b"a=\x00", b"a=\xff", b"a=1\r\nx: y"])
def test_a_tracestate_that_is_too_long_or_unprintable_goes_no_further(state: bytes) -> None:
    assert read_context([(b"traceparent", GOOD), (b"tracestate", state)]).state == b""
