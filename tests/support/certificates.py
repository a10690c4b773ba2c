"""Certificates of the tests' own: an authority that signs servers' for 127.0.0.1."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvmig.core.config import CertificateFiles

PEM = serialization.Encoding.PEM


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_bytes(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password)
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, encryption)


@dataclass(frozen=True)
class Authority:
    """Signs certificates, which `trusting` clients accept."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls) -> Authority:
        key, name = ec.generate_private_key(ec.SECP256R1()), _named("the tests' authority")
        now = datetime.now(UTC)
        made = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=400))
            .not_valid_after(now + timedelta(days=400))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(made, key)

    def write(
        self,
        folder: Path,
        name: str = "door",
        *,
        begins: timedelta = timedelta(days=-1),
        ends: timedelta = timedelta(days=1),
        password: bytes | None = None,
        host: str = "",
    ) -> CertificateFiles:
        """The files of a new certificate. begins, ends: when it is valid, from now. host: a name or
        an address that it is for, too."""
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        names += [_host(host)] if host else []
        made = (
            x509.CertificateBuilder(
                self.certificate.subject,
                _named(name),
                key.public_key(),
                x509.random_serial_number(),
            )
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        cert, own = folder / f"{name}.pem", folder / f"{name}.key"
        cert.write_bytes(made.public_bytes(PEM) + self.certificate.public_bytes(PEM))
        own.write_bytes(_key_bytes(key, password))
        return CertificateFiles(str(cert), str(own))

    def write_own(self, folder: Path) -> str:
        """The file of the authority's own certificate."""
        file = folder / "authority.pem"
        file.write_bytes(self.certificate.public_bytes(PEM))
        return str(file)

    def trusting(self) -> ssl.SSLContext:
        """What a client uses that accepts this authority's certificates and no others."""
        return ssl.create_default_context(cadata=self.certificate.public_bytes(PEM).decode())


BOTH = pytest.mark.parametrize("authority", [None, Authority.make()], ids=["http", "https"])
"""For tests of a port without TLS and with it."""
