"""Which instance each token of a stream came from, and when it came. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from statistics import median


@dataclass(frozen=True, slots=True)
class Piece:
    """What one or more tokens added to the text; first: the index of the first of them."""

    first: int
    text: str


class Ledger:
    """Tokens as they come; who made them is known only a little later.

    A migration's report tells how many tokens the source had put out. Until it is there,
    tokens that came since the migration was asked for are nobody's.
    """

    def __init__(self) -> None:
        self.text = ""
        self.arrivals: list[float] = []
        """When each token came, seconds."""
        self._waiting: list[Piece] = []
        self._starts: list[int] = []
        self._owners: list[str] = []
        self._decided = False

    def __len__(self) -> int:
        return len(self.arrivals)

    def take(self, text: str, tokens: int, at: float) -> None:
        """One chunk of the stream. It is cut into its tokens where each is one character."""
        first = len(self.arrivals)
        self.text += text
        self.arrivals += [at] * tokens
        pieces = text if len(text) == tokens else [text]
        self._waiting += [Piece(first + offset, piece) for offset, piece in enumerate(pieces)]

    def moving(self) -> None:
        """A migration is asked for."""
        self._decided = False

    def settle(self, token: int, instance: str) -> None:
        """The migration has ended: from index `token` on they are the instance's."""
        self._starts.append(token)
        self._owners.append(instance)
        self._decided = True

    def stayed(self) -> None:
        """The migration has ended, and nothing has changed."""
        self._decided = True

    def owner(self, token: int) -> str:
        """The instance that made it. Raises LookupError before the first is named."""
        place = bisect_right(self._starts, token)
        if place == 0:
            raise LookupError(f"nobody is known to have made token {token}")
        return self._owners[place - 1]

    @property
    def complete(self) -> bool:
        """Whether `known` has returned all that came."""
        return not self._waiting

    def known(self) -> list[tuple[str, str]]:
        """What can be shown now and was not before: (instance, text), in order."""
        if not self._decided:
            return []
        pieces, self._waiting = self._waiting, []
        shown: list[tuple[str, str]] = []
        for piece in pieces:
            owner = self.owner(piece.first)
            if shown and shown[-1][0] == owner:
                shown[-1] = (owner, shown[-1][1] + piece.text)
            else:
                shown.append((owner, piece.text))
        return shown

    def gap(self, token: int) -> float | None:
        """Seconds between a token and the one before; None where one of them never came."""
        if not 0 < token < len(self.arrivals):
            return None
        return self.arrivals[token] - self.arrivals[token - 1]

    def usual_gap(self) -> float:
        """The median of the seconds between two chunks; 0 if there was only one."""
        moments = sorted(set(self.arrivals))
        gaps = [later - moment for moment, later in pairwise(moments)]
        return median(gaps) if gaps else 0.0
