"""How requests end before their last token: aborted by the client, or failed by us."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from kvmig.controlplane.messages import AbortRequests
from kvmig.gateway.errors import InstanceLost
from kvmig.gateway.ports import Instances, Sink
from kvmig.gateway.requests import Entry, RequestTable
from kvmig.kvtransfer.messages import Message


class Endings:
    """Frees what instances hold of requests that are over."""

    def __init__(self, table: RequestTable, fleet: Instances, sink: Sink) -> None:
        self._table = table
        self._fleet = fleet
        self._sink = sink

    def tell(self, instance: str, message: Message) -> bool:
        """Send what a lost instance needn't know: its requests are gone with it.

        Whether it could be sent.
        """
        try:
            self._fleet.send(instance, message)
        except InstanceLost:
            return False
        return True

    def abort(self, entries: Iterable[Entry]) -> None:
        """End the present run of each, wherever it may be."""
        told: defaultdict[str, list[str]] = defaultdict(list)
        for entry in entries:
            for instance in entry.holders:
                told[instance].append(entry.run_id)
        for instance, run_ids in told.items():
            self.tell(instance, AbortRequests(run_ids))

    def give_up(self, entries: Sequence[Entry], reason: str, *, retry: bool = True) -> None:
        """These can't go on. retry: whether it may go well another time."""
        if not entries:
            return
        for entry in entries:
            self._table.remove(entry.request_id)
        self.abort(entries)
        self._sink.fail([entry.request_id for entry in entries], reason, retry)
