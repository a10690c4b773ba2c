"""Moving a request when asked to, and what became of every migration."""

from __future__ import annotations

from collections import deque

import msgspec

from kvmig.controlplane.messages import Migrate, Migrated
from kvmig.gateway.calls import Calls
from kvmig.gateway.errors import (
    AlreadyMigrating,
    InstanceLost,
    MigrationDisabled,
    RequestFinished,
    SameInstance,
)
from kvmig.gateway.fleet import Fleet
from kvmig.gateway.foreign import Foreign
from kvmig.gateway.ports import Observer
from kvmig.gateway.requests import Entry, RequestTable
from kvmig.kvtransfer.report import MigrationReport

RECENT = 1000

_REFUSED = ("already_migrating", "unknown_request")
"""Reasons of migrations that never began: answered as errors, not recorded."""


class Migrations:
    """Asks source llumlets to move requests; keeps the reports of the last ones."""

    def __init__(
        self,
        table: RequestTable,
        calls: Calls,
        fleet: Fleet,
        observer: Observer,
        enabled: bool,
        own: str,
    ) -> None:
        """own: this front end's name; it counts what happens to its own requests."""
        self.reports: deque[MigrationReport] = deque(maxlen=RECENT)
        self._table = table
        self._calls = calls
        self._fleet = fleet
        self._observer = observer
        self._enabled = enabled
        self._own = own

    async def migrate(
        self, any_id: str, destination: str, timeout_s: float, inexact: bool = False
    ) -> MigrationReport:
        """See `Router.migrate`."""
        entry, source, endpoint = self._check(any_id, destination)

        run_id = entry.run_id

        def send(call_id: int) -> None:
            self._fleet.send(source, Migrate(call_id, run_id, destination, endpoint, inexact))

        entry.destination = destination
        try:
            answer, _ = await self._calls.ask(source, send, Migrated, timeout_s, "Migrate")
        finally:
            if entry.run_id == run_id:
                entry.destination = None
        report = msgspec.structs.replace(answer.report, request_id=entry.request_id)
        if report.reason == "already_migrating":
            raise AlreadyMigrating(f"request {any_id} is being moved already")
        if report.reason == "unknown_request" and entry.request_id not in self._table.entries:
            raise RequestFinished(f"request {any_id} has finished")
        return report

    async def migrate_foreign(
        self, found: Foreign, destination: str, timeout_s: float, inexact: bool = False
    ) -> MigrationReport:
        """Move a request of another front end, which hears of it from the instances."""
        source = found.row.instance
        endpoint = self._place(found.row.id, source, destination)

        def send(call_id: int) -> None:
            order = Migrate(call_id, found.run_id, destination, endpoint, inexact)
            self._fleet.send(source, order)

        answer, _ = await self._calls.ask(source, send, Migrated, timeout_s, "Migrate")
        if answer.report.reason == "already_migrating":
            raise AlreadyMigrating(f"request {found.row.id} is being moved already")
        if answer.report.reason == "unknown_request":
            raise RequestFinished(f"request {found.row.id} has finished")
        return msgspec.structs.replace(answer.report, request_id=found.row.id)

    def ended(self, message: Migrated) -> Entry | None:
        """A report came in. Returns the request, if it is one of ours and lives."""
        report, entry = message.report, self._table.runs.get(message.report.request_id)
        if entry is not None:
            report = msgspec.structs.replace(report, request_id=entry.request_id)
        if report.reason not in _REFUSED:
            self.reports.append(report)
            if message.front in ("", self._own):
                self._observer.migrated(report, entry.priority if entry else None)
        return entry

    def _check(self, any_id: str, destination: str) -> tuple[Entry, str, str]:
        """The request, who runs it and the destination's endpoint, if it may be moved there."""
        if not self._enabled:
            raise MigrationDisabled("migration is off: the server runs with --no-migration")
        self._fleet.endpoint(destination)
        entry = self._table.find(any_id)
        source = entry.instance
        if source is None:
            raise InstanceLost(f"request {any_id} has no instance now")
        if entry.destination is not None and source != destination:
            raise AlreadyMigrating(f"request {any_id} is being moved to {entry.destination}")
        return entry, source, self._place(any_id, source, destination)

    def _place(self, any_id: str, source: str, destination: str) -> str:
        """The destination's endpoint, if both instances can take part."""
        if source == destination:
            raise SameInstance(f"request {any_id} runs on instance {destination} already")
        for instance in (source, destination):
            if instance not in self._fleet.alive:
                raise InstanceLost(f"instance {instance} is not connected")
        return self._fleet.endpoint(destination)
