"""Names that are near an unknown one, for the answer to a call that has given it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

MOST_COMPARED = 500
MOST_CHARACTERS = 80
LEAST = 0.5
"""Names that have less in common are not near."""


def near_names(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The nearest names, the nearest first. It takes time in proportion to their number."""
    wanted = _pairs(name)
    compared = islice(known, MOST_COMPARED)
    rated = [(_likeness(wanted, _pairs(one)), one) for one in compared]
    near = sorted((-likeness, one) for likeness, one in rated if likeness >= LEAST)
    return [one for _, one in near[:most]]


def _pairs(name: str) -> frozenset[str]:
    """Pairs of neighbouring characters of a name's last part, without what only separates."""
    last = name[:MOST_CHARACTERS].rstrip("/").rpartition("/")[2].lower()
    plain = re.sub(r"[^a-z0-9]+", "", last)
    return frozenset(f"^{plain}$"[at : at + 2] for at in range(len(plain) + 1))


def _likeness(one: frozenset[str], other: frozenset[str]) -> float:
    """Dice's coefficient; a name that is within the other one is near it as well."""
    common, least = len(one & other), min(len(one), len(other))
    dice = 2 * common / (len(one) + len(other)) if common else 0.0
    return max(dice, 0.9 * common / least if least > 3 else 0.0)
