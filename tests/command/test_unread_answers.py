"""Answers that a deployment does not read count by their bytes: none is free by its head."""

from __future__ import annotations

import pytest

from kvmig.asgi.route_table import ClientRoute, find_route
from kvmig.command.relay import is_read_by_events, is_text
from kvmig.proxy.relay import parse_head


def route(path: str) -> ClientRoute:
    found = find_route("POST", path)
    assert found is not None
    return found.route


@pytest.mark.parametrize("kind", [b"", b"text/plain", b"application/octet-stream", b"a/b"])
def test_an_answer_of_any_kind_but_media_counts_as_text(kind: bytes) -> None:
    head = parse_head(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind)
    assert is_text(head, route("/v1/chat/completions"))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/audio/speech", b"application/octet-stream"),
        ("/v1/images/generations", b""),
        ("/v1/images/edits", b"application/octet-stream"),
        ("/v1/chat/completions", b"Audio/mpeg"),
    ],
)
def test_media_count_no_text(path: str, kind: bytes) -> None:
    head = parse_head(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind)
    assert not is_text(head, route(path))


@pytest.mark.parametrize(("encoding", "read"), [(b"", True), (b"identity", True), (b"GZIP", False)])
def test_a_compressed_stream_is_not_read_as_events(encoding: bytes, read: bool) -> None:
    head = parse_head(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: " + encoding
    )
    assert is_read_by_events(head) is read
    assert is_text(head, route("/v1/chat/completions"))
