"""ID tokens that people have logged in by: each gives one key. Pure."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

MOST_TOKENS = 100_000
"""Tokens that are remembered; of more, the ones that were used first are forgotten."""


class UsedTokens:
    """Tokens until they expire by themselves. A server that starts knows none."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def take_token(self, token: str, until: float, now: float) -> bool:
        """Use a token, whose signature is right; whether it was not used before. until, now: Unix
        time."""
        name = _name_of(token)
        if self._until.get(name, now) > now:
            return False
        self._until[name] = until
        self._until.move_to_end(name)
        self._forget_first(now)
        return True

    def give_back(self, token: str) -> None:
        """Let a token be used again."""
        self._until.pop(_name_of(token), None)

    def _forget_first(self, now: float) -> None:
        """Forget the first ones, as far as they have expired or are too many."""
        while len(self._until) > MOST_TOKENS or next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
            if not self._until:
                return


def _name_of(token: str) -> bytes:
    """A digest of what is signed: the signature itself can be written in several ways."""
    signed = token.rpartition(".")[0]
    return blake2b(signed.encode(), digest_size=16).digest()
