"""Why a file can't be had now."""

from __future__ import annotations

from collections.abc import Mapping

from kvmig.core.errors import KvmigError
from kvmig.sources.content_digest import ContentDigest


class PlaceGone(KvmigError):
    """The hub, or another mirror, doesn't answer, breaks off, or is too slow."""


class PlaceTooSlow(PlaceGone):
    """The place sends so little that a download would never end."""


class HubRefusal(KvmigError):
    """The hub answers with an error, which the caller gets as it is."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(f"the hub answered {status}")
        self.status = status
        self.headers = headers
        self.body = body


class ContentRejected(KvmigError):
    """What came is not what was listed."""


class DiskRefusal(KvmigError):
    """The disk takes no more of a file: the rest is passed on."""

    def __init__(self, why: str, digest: ContentDigest | None = None) -> None:
        """digest: of what is there; None: of nothing."""
        super().__init__(why)
        self.digest = digest
