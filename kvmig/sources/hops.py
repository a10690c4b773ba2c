"""Redirects of a call for files: from TLS they lead only to TLS.

Without the check, files could be changed on the way, and a server elsewhere could have the fetcher
call services without TLS that only this host or its network reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory

from kvmig.sources.file_list import SourceFailure
from kvmig.sources.source import NEAR_HOSTS

FIRST: ContextVar[str] = ContextVar("first", default="")
"""The URL that this thread's call began with; empty: none that is checked."""


def may_follow(first: str, url: str) -> bool:
    """Whether a call to `first` may be redirected to `url`."""
    begun, next_one = urlsplit(first), urlsplit(url)
    if next_one.scheme == "https":
        return True
    if begun.scheme != "http" or next_one.scheme != "http":
        return False
    return (begun.hostname in NEAR_HOSTS) is (next_one.hostname in NEAR_HOSTS)


@contextmanager
def begun_at(url: str) -> Iterator[None]:
    """Check the calls in the block, which begin at this URL."""
    token = FIRST.set(url)
    try:
        yield
    finally:
        FIRST.reset(token)


def check_hop(request: Any) -> None:
    """A hook of HTTP clients, before each request. Raises SourceFailure."""
    first, url = FIRST.get(), str(request.url)
    if first and not may_follow(first, url):
        parts = urlsplit(url)
        raise SourceFailure(
            f"{first} leads to {parts.scheme}://{parts.hostname}, which is refused: without TLS a"
            " model can be changed on the way",
            lasting=True,
        )


def make_client() -> Any:
    """The hub's own client, with our check."""
    client = default_client_factory()
    client.event_hooks["request"].append(check_hop)
    return client


set_client_factory(make_client)
