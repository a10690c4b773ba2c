"""Whether there is room for a download, and which models' files go for it. Pure; all in bytes."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

SPARE = 256 << 20
"""Bytes of the disk that stay free: the fleet's database and logs may be on it as well."""


class HeldFiles(Struct, frozen=True):
    """Whole files of one source."""

    source: str
    size: int
    last_used: float
    kept: bool = False
    """Whether a model uses them, they are pinned, or they are compared with their source."""


class RoomFound(Struct, frozen=True):
    """What was decided."""

    evicted: tuple[str, ...] = ()
    """Sources whose files go."""
    refused: str = ""
    """Why the download can't begin; empty: it can."""


def find_room(
    need: int,
    whole: int,
    free: int,
    coming: int,
    held: Iterable[HeldFiles],
    limit: int = 0,
    spare: int = SPARE,
    begun: int = 0,
) -> RoomFound:
    """need: bytes that are missing of `whole`. free: of the disk. coming: what other downloads yet
    take of both. limit: of all files together; 0: none. begun: what other downloads have on the
    disk. Files go by last use, oldest first, only
    for the limit, and only where that makes room enough."""
    left = max(0, free - coming - spare)
    if need > left:
        return RoomFound(
            refused=f"the disk is too full: {need} bytes are needed, {left} are free, without"
            f" {spare} that stay free"
        )
    every = sorted(held, key=lambda one: one.last_used)
    over = sum(one.size for one in every) + coming + begun + whole - limit
    evicted = []
    for one in every if limit else ():
        if over <= 0:
            break
        if not one.kept:
            evicted.append(one.source)
            over -= one.size
    if limit and over > 0:
        return RoomFound(
            refused=f"{whole} bytes are needed, {over} more than --model-files allows ({limit})"
            " together with the files that models use or that are pinned"
        )
    return RoomFound(tuple(evicted))
