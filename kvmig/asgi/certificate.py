"""The certificate of an HTTPS port: read from its files, checked, read again when they change."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from kvmig.core.clock import TimeSource
from kvmig.core.config import CertificateFiles
from kvmig.core.errors import ConfigError
from kvmig.process.child import say

LOOK_S = 2.0
"""Pause between two looks at the files."""
FORM = "in PEM form, as -----BEGIN {}-----"

log = logging.getLogger(__name__)


class ServerCertificate(NamedTuple):
    """A certificate that can be used."""

    context: ssl.SSLContext
    expires: float
    """Unix time."""


def load_certificate(files: CertificateFiles, wall: TimeSource = time.time) -> ServerCertificate:
    """Read and check both files. Raises ConfigError with the flag, its value and what is wrong."""
    from cryptography import x509  # a fleet without TLS needs none of it
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    cert, key = f"--tls-cert is {files.cert!r:.200}", f"--tls-key is {files.key!r:.200}"
    try:
        own = x509.load_pem_x509_certificates(_content(cert, files.cert))[0]
    except ValueError as error:
        raise ConfigError(f"{cert}, must be a certificate {FORM.format('CERTIFICATE')}") from error
    try:
        private = load_pem_private_key(_content(key, files.key), None)
    except TypeError as error:
        raise ConfigError(f"{key}, a key with a password; must be one without") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{key}, must be a private key {FORM.format('PRIVATE KEY')}") from error
    if private.public_key() != own.public_key():
        raise ConfigError(f"{key}, the key of another certificate than {files.cert!r:.200}")
    begins, ends = own.not_valid_before_utc, own.not_valid_after_utc
    now = datetime.fromtimestamp(wall(), UTC)
    if now > ends:
        raise ConfigError(f"{cert}, which expired at {_shown(ends)}; must be valid now")
    if now < begins:
        raise ConfigError(f"{cert}, which is valid from {_shown(begins)} on; must be valid now")
    try:
        return ServerCertificate(_context(files), ends.timestamp())
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{cert}, which OpenSSL refuses: {error}") from error


def _content(given: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{given}, must be a file that can be read: {error.strerror}") from error


def _shown(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M UTC")


def _context(files: CertificateFiles) -> ssl.SSLContext:
    """TLS 1.2 and 1.3, HTTP/1.1. Raises ssl.SSLError, OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # a client could have a handshake for each byte
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.cert, files.key, password="")  # it asks no terminal
    return context


class CertificateWatch:
    """The newest certificate of two files that can be used."""

    def __init__(self, files: CertificateFiles, wall: TimeSource = time.time) -> None:
        """Raises ConfigError."""
        self._files = files
        self._wall = wall
        self._seen = self._stamps()
        self._why = ""
        """Why the files of now can't be used; empty: they are."""
        self.certificate = load_certificate(files, wall)

    async def watch(self) -> None:
        """Look at the files every LOOK_S, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.read_again)

    def read_again(self) -> None:
        """Take the files if they have changed. While they can't be used, for example because only
        one of them is there yet, the certificate from before stays."""
        stamps = self._stamps()
        if stamps == self._seen and not self._why:
            return
        try:
            self.certificate = load_certificate(self._files, self._wall)
        except ConfigError as error:
            if str(error) != self._why:
                log.warning("the certificate from before stays in use: %s", error)
            self._why = str(error)
            return
        self._seen, self._why = stamps, ""
        say(f"the certificate {self._files.cert} was read again")

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(Path(path)) for path in (self._files.cert, self._files.key)]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does; None: it can't be seen now."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
