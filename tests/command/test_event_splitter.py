"""Events of a stream, whatever the parts in which it comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.command import event_splitter
from kvmig.command.event_splitter import EventSplitter, EventTooLarge, data_of

EVENTS = st.lists(
    st.tuples(
        st.sampled_from([b"data: {}", b": note", b'event: a\ndata: {"b": 1}', b"data: a\r\nid: 1"]),
        st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n"]),
    )
)


@given(EVENTS, st.binary(max_size=8).filter(lambda one: not {10, 13} & set(one)), st.data())
def test_events_are_the_same_however_they_come(
    events: list[tuple[bytes, bytes]], rest: bytes, data: st.DataObject
) -> None:
    whole = [text + end for text, end in events]
    stream = b"".join(whole) + rest
    splitter, found, at = EventSplitter(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        found += splitter.feed(stream[at : at + size])
        at += size
    assert b"".join(found) + splitter.rest() == stream
    assert found == whole


def test_an_event_without_an_end_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_splitter, "MOST_BYTES", 10)
    with pytest.raises(EventTooLarge):
        EventSplitter().feed(b"data: 0123456789")


def test_the_data_of_an_event_is_read_without_its_other_fields() -> None:
    assert data_of(b'event: a\r\ndata: {"b":\r\ndata: 1}\r\n\r\n') == b'{"b":\n1}'
    assert data_of(b": a comment\n\n") == b""
    assert data_of(b"event: a\rdata: 1\rdata:2\r\r") == b"1\n2"
