"""Which llumlets report when somebody looks: as often as they would, and no oftener."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvmig.controlplane.messages import LoadReport
from kvmig_tools.sim.llumlet import SimLlumlet
from kvmig_tools.sim.policies import Setting


class Reports:
    """live: of llumlets where something happened, or `report_s` has passed; else of all.

    Loads are computed when somebody looks, so a look costs what has changed.
    """

    def __init__(self, setting: Setting) -> None:
        self._live = setting.reports == "live"
        self._every_s = setting.report_s
        self._members: dict[str, SimLlumlet] = {}
        self._news: dict[str, SimLlumlet] = {}
        self._due: deque[tuple[float, SimLlumlet]] = deque()
        """(reported at, whose); the oldest first."""

    def join(self, one: SimLlumlet) -> None:
        """It serves from now on."""
        self._members[one.name] = self._news[one.name] = one

    def leave(self, name: str) -> None:
        """It has gone. Unknown ones are ignored."""
        self._members.pop(name, None)
        self._news.pop(name, None)

    def news(self, name: str) -> None:
        """Something happened there."""
        if name in self._members:
            self._news[name] = self._members[name]

    def collect(self, now: float) -> Iterator[LoadReport]:
        """What they say now."""
        if not self._live:
            for one in self._members.values():
                report = one.report()
                if report is not None:
                    yield report
            return
        due = self._due
        while due and now - due[0][0] >= self._every_s:
            at, one = due.popleft()
            if one.reported_at == at and one.name in self._members:
                self._news[one.name] = one
        news, self._news = self._news, {}
        for one in news.values():
            report = one.report()
            if report is not None:
                due.append((now, one))
                yield report
