"""The HTTP client that fetches files: to checked addresses, with lists of bounded length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import httpx2
from huggingface_hub.utils._http import hf_request_event_hook

from kvmig.sources.file_list import SourceFailure
from kvmig.sources.hops import CHAIN, addresses_of, proxy_for

MOST_BYTES: ContextVar[int] = ContextVar("most", default=0)
"""Most bytes of an answer to this thread's calls; 0: no limit."""


@contextmanager
def at_most(count: int) -> Iterator[None]:
    """Limit answers to calls of the hub's client in the block to this many bytes."""
    token = MOST_BYTES.set(count)
    try:
        yield
    finally:
        MOST_BYTES.reset(token)


class CheckedTransport(httpx2.BaseTransport):
    """Sends requests to the addresses that were checked for them."""

    def __init__(self) -> None:
        self._by_host: dict[str, httpx2.HTTPTransport] = {}
        """A transport for each host, with its connections; by the proxy's URL for calls by one."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Raises SourceFailure for what is refused, httpx2.HTTPError."""
        url, chain = str(request.url), CHAIN.get()
        if chain is not None and (why := chain.refusal_of(url)):
            raise SourceFailure(why, lasting=True)
        host = request.url.host
        addresses = addresses_of(host)
        if chain is not None and (why := chain.check_addresses(url, addresses)):
            raise SourceFailure(why, lasting=True)
        if proxy := proxy_for(request.url.scheme, host):  # it looks the name up
            return self._transport(proxy, proxy).handle_request(request)
        transport = self._transport(host)
        error: httpx2.TransportError = httpx2.ConnectError(
            f"the host {host} is not known here", request=request
        )
        for address in addresses:
            try:
                return transport.handle_request(_request_at(request, address))
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as failed:
                error = failed
        raise error

    def _transport(self, name: str, proxy: str | None = None) -> httpx2.HTTPTransport:
        if name not in self._by_host:
            self._by_host[name] = httpx2.HTTPTransport(proxy=proxy)
        return self._by_host[name]

    def close(self) -> None:
        """Close all connections."""
        for one in self._by_host.values():
            one.close()


def _request_at(request: httpx2.Request, address: str) -> httpx2.Request:
    """The same request to one address. Its host's name stays in its header and for TLS."""
    return httpx2.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.host},
    )


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


def make_client() -> httpx2.Client:
    """The hub's own client, with our checks."""
    return httpx2.Client(
        transport=CheckedTransport(),
        event_hooks={"request": [hf_request_event_hook], "response": [bound_answer]},
        follow_redirects=True,
        timeout=None,
    )
