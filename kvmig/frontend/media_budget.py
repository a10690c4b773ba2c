"""What the images, audio and video of one call take of a front end's memory. Pure."""

from __future__ import annotations

from typing import NamedTuple

MAX_MEDIA = "--max-media"


class MediaTooLarge(Exception):
    """The error names what is too much, and what is allowed."""

    def __init__(self, sentence: str, size: int) -> None:
        super().__init__(sentence)
        self.size = size


class MediaCost(NamedTuple):
    """Bytes of one image, recording or video."""

    kept: int
    """Bytes that are kept until the model's processor has the item."""
    extra: int = 0
    """Besides, while it is decoded."""


class MediaBudget:
    """Counts what one call keeps of all its media, and what it decodes at the moment."""

    def __init__(self, most: int, kept: int = 0) -> None:
        """kept: bytes that count already, such as the call's body."""
        self.most = most
        self.kept = kept

    @property
    def left(self) -> int:
        """Bytes that may still be taken."""
        return max(0, self.most - self.kept)

    def copy(self) -> MediaBudget:
        """A copy for another thread, which counts there."""
        return MediaBudget(self.most, self.kept)

    def check(self, what: str, cost: MediaCost) -> None:
        """Whether there is room for one more. what: names it. Raises MediaTooLarge."""
        size = self.kept + cost.kept + cost.extra
        if size > self.most:
            raise MediaTooLarge(
                f"the images, audio and video of the call take {_megabytes(size)} while they are"
                f" decoded, with {what}: allowed are {_megabytes(self.most)} a call ({MAX_MEDIA}),"
                " send fewer or smaller ones",
                size,
            )

    def count_media(self, what: str, cost: MediaCost) -> None:
        """Count one more medium. Raises MediaTooLarge."""
        self.check(what, cost)
        self.kept += cost.kept


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
