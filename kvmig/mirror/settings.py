"""The settings of a mirror."""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import urlsplit

from kvmig.core.errors import ConfigError
from kvmig.core.secret import SECRET, SecretStruct
from kvmig.core.shown_urls import shown_url

HUB = "https://huggingface.co"
ENDPOINT = "HF_ENDPOINT"
"""Environment variable: the hub, where no flag says."""
LEAST_SECRET = 16
NAME = re.compile(r"((datasets|spaces|kernels)/)?[\w.-]+(/[\w.-]+)?")


class MirrorSettings(SecretStruct, frozen=True, kw_only=True):
    """Flags of `kvmig mirror`."""

    folder: str
    """The folder of its files, with its whole path."""
    host: str = "127.0.0.1"
    port: int = 8090
    hub: str = ""
    """URL; empty: as the environment says, or the Hugging Face Hub."""
    most_bytes: int = 0
    """Bytes of the files; 0: no limit but the disk's."""
    pins: tuple[str, ...] = ()
    """Repositories whose files stay."""
    prefetch: tuple[str, ...] = ()
    """Models whose files are here, and stay, before the first call."""
    url: str = ""
    """URL under which other mirrors reach this one."""
    peers: tuple[str, ...] = ()
    """URLs of the others."""
    secret: str = ""
    """The secret of the cluster; empty: only this host's programs are let in."""

    @property
    def endpoint(self) -> str:
        """The hub's URL."""
        return (self.hub or os.environ.get(ENDPOINT) or HUB).rstrip("/")


def check_settings(settings: MirrorSettings) -> MirrorSettings:
    """Returns the settings unchanged. Raises ConfigError with flag, value and what is allowed."""
    if not 0 <= settings.port <= 65535:
        raise ConfigError(f"--port is {settings.port}, must be 0 to 65535")
    if not 0 <= settings.most_bytes <= 1 << 60:
        raise ConfigError(f"--disk is {settings.most_bytes}, must be 0 to {1 << 60} bytes")
    if settings.secret and len(settings.secret) < LEAST_SECRET:
        raise ConfigError(
            f"{SECRET} has {len(settings.secret)} characters, must have {LEAST_SECRET} or more"
        )
    if not is_loopback(settings.host) and not settings.secret:
        raise ConfigError(
            f"--host is {settings.host!r}, must be an address of this host alone, such as"
            f" 127.0.0.1, without {SECRET}: all who reach the mirror could use it"
        )
    if settings.peers and not (settings.secret and settings.url):
        raise ConfigError(
            f"--peer needs {SECRET}, the same secret for all mirrors, and --url, under which the"
            " others reach this one"
        )
    for flag, urls in (("--hub", (settings.endpoint,)), ("--url", (settings.url,)),
                       ("--peer", settings.peers)):  # fmt: skip
        for url in urls:
            if url and not _is_url(url):
                raise ConfigError(
                    f"{flag} is {shown_url(url)!r:.200}, must be as http://HOST:PORT, without a"
                    " user, a query and a slash at its end"
                )
    for flag, names in (("--pin", settings.pins), ("--prefetch", settings.prefetch)):
        for one in names:
            if NAME.fullmatch(one) is None or ".." in one:
                raise ConfigError(f"{flag} is {one!r:.200}, must be ORG/NAME")
    return settings


def is_loopback(host: str) -> bool:
    """Whether only programs of this host reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False
    plain = not (parts.username or parts.password or parts.query or parts.fragment)
    return parts.scheme in ("http", "https") and named and plain and not url.endswith("/")
