"""Text of others as a terminal may show it: names and ids are of users, who may put anything there.

Pure. Without it an id could move the cursor, colour the screen, or turn the direction of writing.
"""

from __future__ import annotations

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
MOST = 200


def plain(text: str, most: int = MOST) -> str:
    """The text in one line of printable characters, and no longer than that."""
    shown = "".join(one if one.isprintable() else UNKNOWN for one in text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def middle(text: str, most: int) -> str:
    """The same with what is too long left out in the middle: ids differ at their ends."""
    shown = plain(text, 10 * most)
    if len(shown) <= most:
        return shown
    front = most // 2
    return f"{shown[:front]}…{shown[len(shown) - (most - front - 1) :]}"


def bar(part: float, width: int) -> str:
    """A bar that is filled to a part, 0 to 1."""
    filled = round(max(0.0, min(1.0, part)) * width)
    return "█" * filled + "░" * (width - filled)
