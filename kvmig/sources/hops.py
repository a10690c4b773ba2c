"""The rules for where a call for files may lead.

From TLS, redirects lead only to TLS: files could be changed on the way. And a server of the public
network leads to no address of this host or its network: it could have the fetcher call services
that only these reach. A name may stand for another address a moment later, so a call goes to the
addresses that were checked for it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kvmig.sources.source import NEAR_HOSTS

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that a network translates to those of IPv4 in their last bytes (RFC 6052)."""


class CallChain:
    """A call with the redirects that follow from it, or several calls that begin at one host."""

    def __init__(self, first: str) -> None:
        """first: the URL that it begins with, which its user has named."""
        self.first = first
        self.host = urlsplit(first).hostname or ""
        self._begins_outside: bool | None = None
        """Whether the first host is of the public network; None: it wasn't called yet."""

    def refusal_of(self, url: str) -> str:
        """Why a redirect to this URL is not followed, as far as its words decide; empty: it is."""
        if may_follow(self.first, url):
            return ""
        return f"{self._leads(url)}: without TLS a model can be changed on the way"

    def check_addresses(self, url: str, addresses: Sequence[str]) -> str:
        """Why this URL is not called at these addresses, which its host's name stands for now;
        empty: it is.

        What the first host's name stood for at its first call counts for the whole chain: it may
        not become an address of this network later.
        """
        if urlsplit(url).hostname == self.host:
            if self._begins_outside is None:
                self._begins_outside = not any(map(is_inside, addresses))
                return ""
        elif any(reached_address(one).is_link_local for one in addresses):
            return f"{self._leads(url)}: it is an address of this host or its network"
        if self._begins_outside and any(map(is_inside, addresses)):
            return f"{self._leads(url)}: it is an address of this host or its network"
        return ""

    def _leads(self, url: str) -> str:
        parts = urlsplit(url)
        return f"{self.first} leads to {parts.scheme}://{parts.hostname}, which is refused"


CHAIN: ContextVar[CallChain | None] = ContextVar("chain", default=None)
"""The chain of this thread's calls; None: they aren't checked."""


def may_follow(first: str, url: str) -> bool:
    """Whether a call to `first` may be redirected to `url`, as far as TLS is concerned."""
    begun, next_one = urlsplit(first), urlsplit(url)
    if next_one.scheme == "https":
        return True
    if begun.scheme != "http" or next_one.scheme != "http":
        return False
    return (begun.hostname in NEAR_HOSTS) is (next_one.hostname in NEAR_HOSTS)


def is_inside(address: str) -> bool:
    """Whether an address is of this host or its network."""
    return not reached_address(address).is_global


def reached_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address that a connection reaches: some of IPv6 only contain one of IPv4."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv4Address):
        return found
    if found in NAT64:
        return ipaddress.IPv4Address(found.packed[-4:])
    return found.ipv4_mapped or found.sixtofour or found


def addresses_of(host: str) -> list[str]:
    """The addresses of a host, in the order in which they are tried; none where the name is not
    known here."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found))


def proxy_for(scheme: str, host: str) -> str:
    """The URL of the proxy that the environment names for a host; empty: none."""
    proxies = getproxies()
    found = proxies.get(scheme) or proxies.get("all") or ""
    return "" if not found or proxy_bypass(host) else found


@contextmanager
def begun_at(url: str) -> Iterator[None]:
    """Check the calls in the block, which begin at this URL."""
    token = CHAIN.set(CallChain(url))
    try:
        yield
    finally:
        CHAIN.reset(token)
