"""The addresses from which a front end may fetch what a client's URL names. Pure.

An URL is a client's, and the front end stands in the operator's network: what only that network
reaches is not for clients. An address is judged when it is connected to, after its name is resolved
and redirects are followed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass

from kvmig.core.config import MediaUrls

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NEVER = [
    ipaddress.ip_network(one)
    for one in (
        "168.63.129.16/32",  # Azure's, for its virtual machines
        "192.0.0.0/24",  # special uses, and Oracle's metadata
        "192.88.99.0/24",  # relays of 6to4
        "64:ff9b:1::/48",  # NAT64 of a site
        "fec0::/10",  # of a site
    )
]


def is_public(text: str) -> bool:
    """Whether an address, as a socket has it, is one of the Internet's, and of no special use.

    One that carries an IPv4 address (mapped, 6to4, NAT64) is judged by that.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        address = _carried(address) or address
    special = address.is_multicast or address.is_reserved or address.is_unspecified
    never = any(address.version == one.version and address in one for one in _NEVER)
    return address.is_global and not special and not never


def _carried(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


class MediaRefused(ValueError):
    """An URL that is not fetched; the error reveals nothing of what is behind it."""


@dataclass(frozen=True)
class MediaRules:
    """What one front end fetches. domains: hosts that its operator has named."""

    urls: MediaUrls = "public"
    domains: Collection[str] = ()

    def check_url(self, scheme: str, host: str | None) -> None:
        """Check a URL of a client, or of a redirect. Raises MediaRefused."""
        if scheme not in ("http", "https") or not host:
            raise MediaRefused("a media URL must be a data: URL, or one of http: or https:")
        if self.domains and not self._named(host):
            raise MediaRefused("a media URL must be of a host of --allowed-media-domains")
        if self.urls == "named" and not self.domains:
            raise MediaRefused(
                "a media URL must be a data: URL: this model fetches nothing"
                " (--allowed-media-domains)"
            )

    def allows_address(self, host: str, address: str) -> bool:
        """Whether the host may be connected to there."""
        return is_public(address) or (self.urls == "public" and self._named(host))

    def _named(self, host: str) -> bool:
        return host.lower() in {one.lower() for one in self.domains}
