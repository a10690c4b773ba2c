"""Calls for files, as far as their answers decide: where redirects lead, and how long lists are.

From TLS, redirects lead only to TLS: files could be changed on the way. And a server of the public
network leads to no address of this host or its network: it could have the fetcher call services
that only these reach.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory

from kvmig.sources.file_list import SourceFailure
from kvmig.sources.source import NEAR_HOSTS

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that a network translates to those of IPv4 in their last bytes (RFC 6052)."""
FIRST: ContextVar[str] = ContextVar("first", default="")
"""The URL that this thread's call began with; empty: none that is checked."""
MOST_BYTES: ContextVar[int] = ContextVar("most", default=0)
"""Most bytes of an answer to this thread's calls; 0: no limit."""


def may_follow(first: str, url: str) -> bool:
    """Whether a call to `first` may be redirected to `url`, as far as TLS is concerned."""
    begun, next_one = urlsplit(first), urlsplit(url)
    if next_one.scheme == "https":
        return True
    if begun.scheme != "http" or next_one.scheme != "http":
        return False
    return (begun.hostname in NEAR_HOSTS) is (next_one.hostname in NEAR_HOSTS)


def leads_inside(first: Iterable[str], addresses: Iterable[str]) -> bool:
    """Whether some of these addresses are of this host or its network, and the first host's were
    not. Addresses of a link, where clouds keep secrets, are never led to."""
    found = [reached_address(one) for one in addresses]
    if any(one.is_link_local for one in found):
        return True
    inside = any(not one.is_global for one in found)
    return inside and all(reached_address(one).is_global for one in first)


def reached_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address that a connection reaches: some of IPv6 only contain one of IPv4."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv4Address):
        return found
    if found in NAT64:
        return ipaddress.IPv4Address(found.packed[-4:])
    return found.ipv4_mapped or found.sixtofour or found


def addresses_of(host: str) -> list[str]:
    """The addresses of a host; none where the name is not known here: a call then fails, or goes by
    a proxy, which looks it up."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return sorted({str(one[4][0]).partition("%")[0] for one in found})


@contextmanager
def begun_at(url: str) -> Iterator[None]:
    """Check the calls in the block, which begin at this URL."""
    token = FIRST.set(url)
    try:
        yield
    finally:
        FIRST.reset(token)


@contextmanager
def at_most(count: int) -> Iterator[None]:
    """Limit answers to calls of the hub's client in the block to this many bytes."""
    token = MOST_BYTES.set(count)
    try:
        yield
    finally:
        MOST_BYTES.reset(token)


def refusal_of(first: str, url: str) -> str:
    """Why a call to `first` is not followed to `url`; empty: it is. May look up both hosts."""
    begun, parts = urlsplit(first), urlsplit(url)
    there = f"{first} leads to {parts.scheme}://{parts.hostname}, which is refused"
    if not may_follow(first, url):
        return f"{there}: without TLS a model can be changed on the way"
    if parts.hostname == begun.hostname:
        return ""
    addresses = addresses_of(parts.hostname or "")
    if addresses and leads_inside(addresses_of(begun.hostname or ""), addresses):
        return f"{there}: it is an address of this host or its network"
    return ""


def check_hop(request: Any) -> None:
    """A hook of HTTP clients, before each request. Raises SourceFailure."""
    first = FIRST.get()
    if first and (why := refusal_of(first, str(request.url))):
        raise SourceFailure(why, lasting=True)


class BoundedStream(httpx2.SyncByteStream):
    """The bytes of an answer, up to a limit."""

    def __init__(self, stream: Any, most: int, url: str) -> None:
        self._stream = stream
        self._most = most
        self._url = url

    def __iter__(self) -> Iterator[bytes]:
        """Raises SourceFailure."""
        came = 0
        for piece in self._stream:
            came += len(piece)
            if came > self._most:
                raise SourceFailure(
                    f"{self._url} answers with more than {self._most} bytes, which is no list of a"
                    " model's files",
                    lasting=True,
                )
            yield piece

    def close(self) -> None:
        self._stream.close()


def bound_answer(response: Any) -> None:
    """A hook of the hub's client, before an answer is read. Raises SourceFailure."""
    if not (most := MOST_BYTES.get()):
        return
    if response.headers.get("content-encoding", "identity") != "identity":
        raise SourceFailure(f"{response.url} answers compressed, which was not asked for")
    response.stream = BoundedStream(response.stream, most, str(response.url))


def make_client() -> Any:
    """The hub's own client, with our checks."""
    client = default_client_factory()
    client.event_hooks["request"].append(check_hop)
    client.event_hooks["response"].append(bound_answer)
    return client


set_client_factory(make_client)
