"""Made-up looks at a fleet, and a source of them for `kvmig top`."""

from __future__ import annotations

from typing import Any

from kvmig.cli.client import CallFailure
from kvmig.core.api_records import InstanceRow, RequestRow
from kvmig.core.live_records import (
    LiveDevice,
    LiveFleet,
    LiveInstance,
    LiveModel,
    LiveMove,
    LiveStream,
    MoveRecord,
)

AT = 1_800_000_000.0


def instance(model: str, name: str, used: int = 0, **more: Any) -> LiveInstance:
    """With 100 KV blocks."""
    state = more.pop("state", "serving")
    own = {field: more.pop(field) for field in ("worker", "gpus") if field in more}
    row = InstanceRow(id=name, state=state, blocks_total=100, blocks_used=used, **more)
    return LiveInstance(model=model, deployment=f"d-{model}", row=row, **own)


def stream(model: str, name: str, on: str, tokens: int = 10, **more: Any) -> LiveStream:
    state = more.pop("state", "running")
    row = RequestRow(id=name, instance=on, state=state, tokens=tokens, blocks=1, **more)
    return LiveStream(model=model, deployment=f"d-{model}", row=row)


def move(model: str, name: str, ended_at: float = AT, **more: Any) -> LiveMove:
    found: dict[str, Any] = {
        "source": "i0",
        "destination": "i1",
        "state": "committed",
        "bytes": 2000,
    } | more
    return LiveMove(model=model, move=MoveRecord(request_id=name, ended_at=ended_at, **found))


def two_models() -> LiveFleet:
    """Model a with two instances and two streams, model b at zero, one GPU."""
    return LiveFleet(
        at=AT,
        models=(
            LiveModel(name="a", state="serving", serving=2, desired=2, running=2, streams=2),
            LiveModel(name="b", state="zero"),
        ),
        instances=(instance("a", "i0", 75, running=2), instance("a", "i1", 10)),
        streams=(stream("a", "cmpl-1", "i0", 30), stream("a", "cmpl-2", "i0", 20)),
        devices=(
            LiveDevice(title="GPU 0", uuid="GPU-0", total_bytes=80 * 10**9, free_bytes=20 * 10**9),
        ),
    )


class MadeSource:
    """Shows what a test puts into `fleet`, and keeps the orders; with `fails` it is away."""

    drain_means = "It moves its requests."
    where = "http://fleet"

    def __init__(self, fleet: LiveFleet) -> None:
        self.fleet = fleet
        self.fails = ""
        self.orders: list[tuple[str, ...]] = []
        self.looks = 0
        self.closed = False

    async def observe(self) -> LiveFleet:
        self.looks += 1
        if self.fails:
            raise CallFailure(self.fails)
        return self.fleet

    async def drain(self, one: LiveInstance) -> None:
        self._take("drain", one.model, one.row.id)

    async def undrain(self, one: LiveInstance) -> None:
        self._take("undrain", one.model, one.row.id)

    async def move(self, stream: LiveStream, destination: str | None) -> MoveRecord:
        self._take("move", stream.model, stream.row.id, str(destination))
        return move(stream.model, stream.row.id).move

    async def close(self) -> None:
        self.closed = True

    def _take(self, *words: str) -> None:
        if self.fails:
            raise CallFailure(self.fails)
        self.orders.append(words)
