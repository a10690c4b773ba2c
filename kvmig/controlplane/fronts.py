"""Who listens to a llumlet: front ends, numbered for the engine, scheduler and launcher."""

from __future__ import annotations

from kvmig.ground.errors import PeerError


class Fronts:
    """Front ends by name, socket identity and number (1, 2, ...); numbers are never reused."""

    def __init__(self) -> None:
        self._identity: dict[str, bytes] = {}
        self._name: dict[bytes, str] = {}
        self._number: dict[str, int] = {}
        self._listeners: set[bytes] = set()

    def join(self, name: str, identity: bytes) -> None:
        """A front end said hello, for the first time or again."""
        self._identity[name] = identity
        self._name[identity] = name
        self._number.setdefault(name, len(self._number) + 1)

    def listen(self, identity: bytes) -> None:
        """A scheduler or the launcher said hello: it gets load reports."""
        self._listeners.add(identity)

    def leave(self, identity: bytes) -> str | None:
        """Nobody is behind this identity any more; the front end's name if it was one."""
        self._listeners.discard(identity)
        name = self._name.pop(identity, None)
        if name is not None:
            del self._identity[name]
        return name

    def name(self, identity: bytes) -> str:
        """The front end's name. Raises PeerError for others."""
        try:
            return self._name[identity]
        except KeyError:
            raise PeerError(f"{identity!r} is no front end") from None

    def number(self, identity: bytes) -> int:
        """Its number. Raises PeerError for others."""
        return self._number[self.name(identity)]

    def number_of(self, name: str) -> int | None:
        """The number of a front end that is connected now."""
        return self._number[name] if self.has(name) else None

    def has(self, name: str) -> bool:
        """Whether the front end is connected now."""
        return name in self._identity

    def is_gateway(self, identity: bytes) -> bool:
        """Whether a connected front end is behind this identity."""
        return identity in self._name

    def identity(self, name: str) -> bytes | None:
        """Where to send to it, if it is connected now."""
        return self._identity.get(name)

    def client(self, number: int) -> bytes | None:
        """Where to send what client `number` gets; 0 (nobody's statistics): any front end."""
        for name, identity in self._identity.items():
            if number in (0, self._number[name]):
                return identity
        return None

    def gateways(self) -> list[bytes]:
        """All front ends that are connected now."""
        return list(self._name)

    def listeners(self) -> list[bytes]:
        """Everyone who gets load reports: front ends, scheduler and launcher."""
        return [*self._name, *self._listeners]
