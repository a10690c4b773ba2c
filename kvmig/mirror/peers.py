"""The mirrors of a cluster: which of them knows who has a file, and which of them live. Pure.

Each file has an owner: the first live mirror in an order that depends on the file and the mirrors'
addresses alone (rendezvous hashing). Who wants the file asks its owner, which names a mirror that
has it, or takes down that the asker will have it. So tokens go to the hub only, and the hub is
asked once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

DOWN_S = 20.0
"""Time for which a mirror that doesn't answer is left out."""
HOLDER_S = 86400.0
MOST_HOLDERS = 100_000


def ranked(etag: str, mirrors: Iterable[str]) -> list[str]:
    """The mirrors in the order in which they own a file. One that leaves changes no others'."""

    def weight(mirror: str) -> bytes:
        return blake2b(f"{mirror}\0{etag}".encode(), digest_size=16).digest()

    return sorted(set(mirrors), key=weight, reverse=True)


class PeerBook:
    """Which mirrors there are, and which of them answer."""

    def __init__(self, own: str, others: Iterable[str]) -> None:
        """own: the address under which the others reach this one."""
        self.own = own
        self.others = sorted(set(others) - {own})
        self._down: dict[str, float] = {}

    def owners(self, etag: str, now: float) -> list[str]:
        """List mirrors that may own a file, first the owner, up to this mirror itself."""
        down = {one for one, until in self._down.items() if until > now}
        order = [one for one in ranked(etag, [self.own, *self.others]) if one not in down]
        return order[: order.index(self.own) + 1]

    def fail(self, mirror: str, now: float) -> None:
        """Leave out a mirror that does not answer."""
        self._down[mirror] = now + DOWN_S

    def answer(self, mirror: str) -> None:
        """Count a mirror that does answer."""
        self._down.pop(mirror, None)


class HolderBook:
    """Which mirrors have, or download from the hub, the files that this one owns."""

    def __init__(self) -> None:
        self._holders: OrderedDict[str, dict[str, float]] = OrderedDict()

    def find(self, etag: str, asker: str, failed: Iterable[str], now: float) -> str:
        """A mirror that has a file; empty: the asker is the one that downloads it.

        failed: mirrors from which the asker could not get it.
        """
        found = self._holders.setdefault(etag, {})
        self._holders.move_to_end(etag)
        for one in failed:
            found.pop(one, None)
        holder = next((one for one, until in found.items() if until > now and one != asker), "")
        if not holder:
            found[asker] = now + HOLDER_S
        while len(self._holders) > MOST_HOLDERS:
            self._holders.popitem(last=False)
        return holder

    def drop(self, etag: str, holder: str) -> None:
        """Forget that a mirror has a file."""
        self._holders.get(etag, {}).pop(holder, None)
