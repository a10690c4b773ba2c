"""TLS between the hosts of a fleet, by the secret that all of them have: the pepper.

Every host makes the same key and the same certificate from it, and trusts no other one: only a
host of the fleet can connect, and only to a host of the fleet.
"""

from __future__ import annotations

import os
import secrets
import ssl
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path

from kvmig.accounts.keys import PEPPER_BYTES

NAME = "kvmig fleet"
BEGINS, ENDS = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
"""The certificate is valid as long as the pepper is."""


def peer_certificate(pepper: bytes) -> bytes:
    """Make the key and the certificate of a fleet's hosts, as PEM. The same pepper gives the same
    bytes."""
    from cryptography import x509  # a fleet of one host needs none of it
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import NameOID

    seed = blake2b(pepper, person=b"kvmig peers", digest_size=32).digest()
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(BEGINS)
        .not_valid_after(ENDS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)


def peer_context(pepper: Path, *, server: bool) -> ssl.SSLContext:
    """Make the context of one end of a connection between hosts. pepper: its file; the certificate
    is written to another file there, for this user alone. Raises OSError, ssl.SSLError."""
    content = pepper.read_bytes()
    if len(content) != PEPPER_BYTES:
        raise OSError(f"{pepper} holds {len(content)} bytes, must hold {PEPPER_BYTES}")
    made = peer_certificate(content)
    file = pepper.with_name("peers.pem")
    _write(file, made)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the fleet's, not a host's
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(file)
    context.load_verify_locations(cadata=made[made.index(b"-----BEGIN CERT") :].decode())
    return context


def _write(file: Path, content: bytes) -> None:
    """Several processes may write the same."""
    part = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(content)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
