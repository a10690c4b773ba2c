"""Records of what runs in a fleet now: the server writes them, `kvmig top` reads them. Pure.

A field without a default must be in an answer; every other one may miss in that of an older server.
Sizes are bytes where the name ends so, else KV blocks.
"""

from __future__ import annotations

import msgspec

from kvmig.core.api_records import InstanceRow, RequestRow

PAUSE_PARTS = ("drain", "tail_copy", "commit", "first_token")
"""Fields of a report's `downtime_ms` that are parts of the pause; another one is its beginning."""


class MoveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A migration that has ended, as its deployment reported it."""

    request_id: str = ""
    source: str = ""
    destination: str = ""
    state: str = ""
    """committed or aborted."""
    reason: str = ""
    """Why it was aborted; empty when it committed."""
    why: str = ""
    """What it was for."""
    bytes: int = 0
    total_ms: float = 0.0
    downtime_ms: dict[str, float | None] | None = None
    """Parts of the pause, and its beginning; None: the request was never suspended."""
    ended_at: float = 0.0
    """Unix time."""

    @property
    def pause_ms(self) -> float | None:
        """The whole pause; None: there was none."""
        if self.downtime_ms is None:
            return None
        return sum(self.downtime_ms.get(part) or 0.0 for part in PAUSE_PARTS)


class LiveMove(msgspec.Struct, frozen=True, kw_only=True):
    """A migration that has ended, and the model of its request."""

    model: str
    move: MoveRecord


class LiveInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance, and where it is."""

    model: str
    deployment: str = ""
    """Id of the deployment: a model that rolls out has two."""
    worker: str = ""
    gpus: tuple[str, ...] = ()
    """What people call its GPUs."""
    row: InstanceRow


class LiveStream(msgspec.Struct, frozen=True, kw_only=True):
    """A live request: one sequence of a call."""

    model: str
    deployment: str = ""
    row: RequestRow


class LiveModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the catalogue."""

    name: str
    state: str
    why: str = ""
    """Why it is in this state; empty: there is nothing to say."""
    serving: int = 0
    desired: int = 0
    running: int = 0
    """Requests that its deployments have."""
    held: int = 0
    """Requests that wait for its start."""
    streams: int = 0
    """Sequences that it had at the last look; `LiveFleet.streams` may list fewer."""


class LiveDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of the server's host, or of a worker."""

    title: str
    uuid: str
    total_bytes: int
    free_bytes: int
    worker: str = ""
    """Name of its worker; empty: it is of the server's host."""
    others_bytes: int = 0
    """Taken by programs that are not the fleet's."""
    models: dict[str, int] = {}
    """Bytes that models claim, and units for their KV caches."""
    busy: float | None = None
    """Part of the last moments in which it computed, 0 to 1; None: the driver doesn't say."""
    watts: float | None = None


class LiveFleet(msgspec.Struct, frozen=True, kw_only=True):
    """What runs now."""

    at: float
    """Unix time of the look."""
    models: tuple[LiveModel, ...] = ()
    instances: tuple[LiveInstance, ...] = ()
    streams: tuple[LiveStream, ...] = ()
    """The longest of each model, at most as many as were asked for."""
    moves: tuple[LiveMove, ...] = ()
    """The last ones, newest first."""
    devices: tuple[LiveDevice, ...] = ()
    unanswered: tuple[str, ...] = ()
    """Models whose deployment did not list its requests in time."""
