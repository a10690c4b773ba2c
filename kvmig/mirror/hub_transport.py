"""How the mirror's calls reach the hub and where it leads: at addresses that were checked."""

from __future__ import annotations

import asyncio

import httpx

from kvmig.mirror.errors import PlaceGone
from kvmig.sources.hops import CallChain, addresses_of, proxy_for

CHAIN = "kvmig_chain"
"""The extension of a request that has its `CallChain`; without one it goes wherever it is sent."""


class HubTransport(httpx.AsyncBaseTransport):
    """Sends requests to the addresses that were checked for them."""

    def __init__(self, limits: httpx.Limits) -> None:
        self._limits = limits
        self._by_host: dict[str, httpx.AsyncHTTPTransport] = {}
        """A transport for each host, with its connections; by the proxy's URL for calls by one."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises PlaceGone for what is refused, httpx.HTTPError."""
        chain: CallChain | None = request.extensions.get(CHAIN)
        host = request.url.host
        addresses = await asyncio.to_thread(addresses_of, host)
        if chain is not None and (why := chain.check_addresses(str(request.url), addresses)):
            raise PlaceGone(why)
        if proxy := proxy_for(request.url.scheme, host):  # it looks the name up
            return await self._transport(proxy, proxy).handle_async_request(request)
        transport = self._transport(host)
        error: httpx.TransportError = httpx.ConnectError(
            f"the host {host} is not known here", request=request
        )
        for address in addresses:
            try:
                return await transport.handle_async_request(_request_at(request, address))
            except (httpx.ConnectError, httpx.ConnectTimeout) as failed:
                error = failed
        raise error

    def _transport(self, name: str, proxy: str | None = None) -> httpx.AsyncHTTPTransport:
        if name not in self._by_host:
            self._by_host[name] = httpx.AsyncHTTPTransport(limits=self._limits, proxy=proxy)
        return self._by_host[name]

    async def aclose(self) -> None:
        """Close all connections."""
        for one in self._by_host.values():
            await one.aclose()


def _request_at(request: httpx.Request, address: str) -> httpx.Request:
    """The same request to one address. Its host's name stays in its header and for TLS."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.host},
    )
