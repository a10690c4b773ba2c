"""What one engine gives another of a request that moves between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvmig.ground.errors import MigrationRefused

HOLE = -1
"""In place of a block id: the engine keeps no block there, as before a window."""


MOST_BYTES = 256 << 20
"""Of a request as it was submitted: what is larger stays where it is. In a second or two a
connection carries so much, and as long a destination is waited for."""
MOST_FRAMES = 4000
"""Pieces of it, such as images."""


def too_large(payload: Sequence[bytes]) -> str:
    """Why a request that was submitted like this can't be moved; empty when it can."""
    size = sum(map(len, payload))
    if size > MOST_BYTES:
        return f"a request of {size} bytes with its images, allowed are {MOST_BYTES}"
    if len(payload) > MOST_FRAMES:
        return f"a request in {len(payload)} pieces, allowed are {MOST_FRAMES}"
    return ""


class Export(msgspec.Struct, frozen=True):
    """A request as another engine needs it to take it over. `payload` is the adapter's own.

    Between two llumlets the payload travels beside the message, each of its parts as a frame.
    """

    request_id: str
    num_tokens: int
    payload: list[bytes]


class Stage(msgspec.Struct, frozen=True):
    """What may be copied while the source decodes on."""

    block_ids: list[int]
    """Full blocks of the request after the first `sent`, in order. They don't change any more."""
    num_tokens: int
    """That the destination must have room for, and for one block more: the request's tokens now.
    0: it waits and holds no block. It will wait there, whether there is room now or not."""
    decoding: bool = False
    """Its prompt is computed: it gets a token each step."""
    places: list[int] = []
    """Where each of `block_ids` is among the request's blocks, see `Engine.grow`; empty: from the
    first `sent` on, one after the other."""


class Tail(msgspec.Struct, frozen=True):
    """The rest of a suspended request."""

    block_ids: list[int]
    """The request's remaining blocks after the first `sent`, the last one usually part full."""
    num_tokens: int
    num_output_tokens: int
    state: bytes
    """The adapter's own: tokens since the export, sampling state."""
    checksums: list[int] = []
    """Of `block_ids`, where `suspend` has gathered them already."""
    places: list[int] = []
    """As in `Stage`."""


@dataclass(frozen=True, slots=True)
class CameBlocks:
    """Fused blocks that came for a request, and where they go."""

    first: int
    """Which block of the request the first one is."""
    block_ids: list[int]
    fused: memoryview
    """[n * block_bytes]"""
    checksums: list[int]
    """What the source has read."""

    def check(self, checksums: Sequence[int]) -> None:
        """Raises MigrationRefused ("corrupt") unless the destination has read the same."""
        for index, (sent, came) in enumerate(zip(self.checksums, checksums, strict=True)):
            if sent != came:
                raise MigrationRefused("corrupt", f"block {self.first + index} came changed")
