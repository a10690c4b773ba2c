"""CURVE keys from the cluster's shared secret: who has the secret has the keys, nobody else.

Servers use one pair and clients the other, so neither can pose as the other's kind.
The secret itself never leaves this function.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import zmq
from zmq.utils import z85

LEAST_BYTES = 16
"""Of a secret."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Curve25519 keys in Z85, 40 characters each."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Keys:
    """Both pairs of one cluster."""

    server: KeyPair
    client: KeyPair


def derive(secret: bytes) -> Keys:
    """The cluster's keys. Raises ValueError when the secret is shorter than LEAST_BYTES."""
    if len(secret) < LEAST_BYTES:
        raise ValueError(f"the cluster's secret must have at least {LEAST_BYTES} bytes")
    return Keys(_pair(secret, b"kvmig server"), _pair(secret, b"kvmig client"))


def _pair(secret: bytes, purpose: bytes) -> KeyPair:
    key = z85.encode(blake2b(secret, digest_size=32, person=purpose).digest())
    return KeyPair(zmq.curve_public(key), key)
