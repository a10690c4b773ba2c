"""Which versions of the wire protocol understand each other."""

from __future__ import annotations

from typing import NamedTuple


class Version(NamedTuple):
    """major: raised when a message changes in a way that an older peer would misread; minor:
    when one gets a field, with a default, or when there is a new message.

    Fields that aren't known are ignored, those that don't come have their defaults, and a
    message that isn't known is refused and counted: so neighbours in minor work together.
    """

    major: int
    minor: int

    def understands(self, other: Version) -> bool:
        """Whether both may be in one cluster: a rolling upgrade goes one minor at a time."""
        return self.major == other.major and abs(self.minor - other.minor) <= 1

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


VERSION = Version(3, 0)
"""Of this code. Its messages are recorded under tests/corpus: see `scripts/corpus.py`."""
