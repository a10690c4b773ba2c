"""What every control connection has: its version, the base of its messages, and the first one."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class ProtocolVersion(NamedTuple):
    """A version of the wire protocol.

    major is raised when a message changes in a way that an older peer would misread; minor when
    a message gets a field, with a default, or when there is a new message. Unknown fields are
    ignored, missing fields have their defaults, unknown messages are refused and counted: so
    neighbours in minor work together.
    """

    major: int
    minor: int

    def understands(self, other: ProtocolVersion) -> bool:
        """Whether both may be in one cluster: a rolling upgrade goes one minor at a time."""
        return self.major == other.major and abs(self.minor - other.minor) <= 1

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


VERSION = ProtocolVersion(3, 9)
"""The version of this code. Its messages are recorded under tests/corpus: `scripts/corpus.py`."""


class RpcMessage(msgspec.Struct, frozen=True, tag="Message"):
    """Base of everything on a control socket."""


class Hello(RpcMessage, frozen=True, tag=True):
    """First message on every connection."""

    protocol: int
    """Major number of the sender's version."""
    role: str
    """gateway, guest (a front end of another server), scheduler, launcher or peer."""
    name: str
    minor: int = 0

    @property
    def version(self) -> ProtocolVersion:
        """The version that the sender speaks."""
        return ProtocolVersion(self.protocol, self.minor)
