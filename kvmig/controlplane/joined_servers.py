"""Servers that have joined one scheduler: whose instances can take whose requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvmig.controlplane.messages import ClusterMember, LoadReport, Members


class EngineKind(NamedTuple):
    """What two engines must be equal in, so that a request of one can go on at the other."""

    likeness: str
    weights: str
    numerics: str

    @classmethod
    def of_report(cls, report: LoadReport) -> EngineKind:
        """The kind of the instance that has reported."""
        return cls(report.likeness, report.weights, report.numerics)

    def difference(self, other: EngineKind) -> str:
        """What the other's engine differs in, in words; empty: in nothing."""
        for field, own, there in zip(self._fields, self, other, strict=True):
            if own != there:
                return f"its {field} is {there or 'unknown'}, here {own or 'unknown'}"
        return ""


class JoinedServers:
    """The launchers that report to a scheduler, by the identities of their sockets.

    A launcher without a server's name is the scheduler's own: it learns of no others.
    """

    def __init__(self) -> None:
        self._servers: dict[bytes, Members] = {}
        self._kinds: dict[str, EngineKind] = {}
        """Kinds of instances by name, as last reported."""
        self._last: dict[bytes, EngineKind] = {}
        """The kind of some instance of each server, kept when its last instance has ended."""

    def put(self, sender: bytes, members: Members) -> bool:
        """A launcher names its instances; whether that is a server that had none here so far."""
        before = self._servers.get(sender)
        self._servers[sender] = members
        self._forget_ended()
        had_none = before is None or not before.members
        return bool(members.server and members.members) and had_none

    def drop(self, sender: bytes) -> str:
        """A launcher is gone; returns its server, if it had instances. Unknown ones are ignored."""
        gone = self._servers.pop(sender, None)
        self._last.pop(sender, None)
        self._forget_ended()
        return gone.server if gone is not None and gone.members else ""

    def learn(self, report: LoadReport) -> None:
        """An instance has reported what it is."""
        self._kinds[report.instance] = EngineKind.of_report(report)

    def told_apart(self, report: LoadReport) -> LoadReport:
        """The report, so that the rules pair no instances of servers that are unlike."""
        if not self.joined:
            return report
        return replace(
            report,
            weights=f"{report.weights} {report.likeness}",
            numerics=f"{report.numerics} {report.likeness}",
        )

    @property
    def joined(self) -> list[bytes]:
        """Launchers of servers that have joined."""
        return [sender for sender, members in self._servers.items() if members.server]

    @property
    def launchers(self) -> list[bytes]:
        """The launchers of all."""
        return list(self._servers)

    def members(self) -> list[ClusterMember]:
        """The instances of all."""
        return [one for members in self._servers.values() for one in members.members]

    def others_of(self, sender: bytes) -> Members:
        """The instances of other servers that can take this one's requests; and which can't, why.

        An instance that has not reported yet is in neither.
        """
        own = self._kinds_of(sender)
        alike: list[ClusterMember] = []
        unlike: dict[str, str] = {}
        for other, members in self._servers.items():
            if other == sender or not members.server:
                continue
            known = self._known(members.members)
            fit = [one for one, kind in known if kind in own]
            alike += [replace(one, server=members.server) for one in fit]
            if known and own and not fit:
                unlike[members.server] = own[0].difference(known[0][1])
        return Members(alike, unlike=unlike)

    def _kinds_of(self, sender: bytes) -> Sequence[EngineKind]:
        kinds = [kind for _, kind in self._known(self._servers[sender].members)]
        if kinds:
            self._last[sender] = kinds[0]
        elif sender in self._last:
            kinds = [self._last[sender]]
        return kinds

    def _known(self, members: Iterable[ClusterMember]) -> list[tuple[ClusterMember, EngineKind]]:
        kinds: Mapping[str, EngineKind] = self._kinds
        return [
            (one, kinds[one.instance]) for one in members if one.endpoint and one.instance in kinds
        ]

    def _forget_ended(self) -> None:
        named = {one.instance for one in self.members()}
        self._kinds = {name: kind for name, kind in self._kinds.items() if name in named}
