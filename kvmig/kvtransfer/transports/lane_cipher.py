"""The bytes on a lane: a handshake that proves a key at both ends, then sealed records.

The two ends share a key, which travels on the control socket (CURVE). Each connection has a key of
its own, derived from that one and from random bytes of both ends, so nothing of one connection can
be replayed on another. A record is a header in the clear, then its bytes under AES-256-GCM, whose
tag covers the header, too. The nonce is the record's position on the connection, so a record that
is repeated, left out or moved doesn't open. Records go in one direction only.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvmig.core.errors import PeerError

KEY_BYTES = 32
SALT_BYTES = 32
"""Random bytes of each end, new for each connection."""
PROOF_BYTES = 32
HELLO_BYTES = SALT_BYTES + PROOF_BYTES
TAG_BYTES = 16
RECORD_BYTES = 1 << 20
"""Most bytes of one record: a longer chunk is several, so that the ends work at the same time."""

_HEADER = struct.Struct("<QIIQQ")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A part of push `number`: the bytes [start, start + nbytes) of the `total` bytes in a slot."""

    number: int
    slot: int
    nbytes: int
    start: int
    total: int

    def encode(self) -> bytes:
        """The header on the wire."""
        return _HEADER.pack(self.number, self.slot, self.nbytes, self.start, self.total)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Self:
        """Raises PeerError for a record that no sender makes."""
        header = cls(*_HEADER.unpack(data))
        if header.nbytes > RECORD_BYTES or header.start + header.nbytes > header.total:
            raise PeerError(f"a record of {header.nbytes} bytes at {header.start}")
        return header

    @property
    def last(self) -> bool:
        """Whether the push is complete with this record."""
        return self.start + self.nbytes == self.total


def make_salt() -> bytes:
    """Random bytes for one connection."""
    return secrets.token_bytes(SALT_BYTES)


def make_hello(key: bytes, theirs: bytes, ours: bytes) -> bytes:
    """The sender's answer to the receiver's salt: its own, and a proof that it has the key."""
    return ours + _derive(key, theirs + ours, b"kvmig lane hello")


def read_hello(key: bytes, ours: bytes, hello: bytes) -> bytes | None:
    """The sender's salt; None if it doesn't have the key."""
    theirs = hello[:SALT_BYTES]
    genuine = secrets.compare_digest(make_hello(key, ours, theirs), hello)
    return theirs if genuine else None


class RecordCipher:
    """Seals the records of one connection, or opens them: one end does one of the two."""

    def __init__(self, key: bytes, receiver_salt: bytes, sender_salt: bytes) -> None:
        self._cipher = AESGCM(_derive(key, receiver_salt + sender_salt, b"kvmig lane keys"))
        self._count = 0

    def seal(self, header: bytes, data: memoryview, out: memoryview) -> None:
        """Encrypt `data` [n] into `out` [n + TAG_BYTES]."""
        self._cipher.encrypt_into(self._nonce(), data, header, out)

    def open(self, header: bytes, sealed: memoryview, out: memoryview) -> None:
        """Decrypt `sealed` [n + TAG_BYTES] into `out` [n]. Raises PeerError if it isn't the
        record that the sender sealed at this position."""
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, header, out)
        except InvalidTag:
            raise PeerError("a record on the lane isn't what was sent", "unreadable") from None

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "little")


def _derive(key: bytes, salts: bytes, purpose: bytes) -> bytes:
    return blake2b(salts, digest_size=KEY_BYTES, key=key, person=purpose).digest()
