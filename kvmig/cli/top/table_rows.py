"""The rows of `kvmig top`: what is shown of a fleet, in which order, and what a filter leaves.

Pure: `LiveFleet` in, text out. A row's key stays the same as long as what it shows is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from kvmig.cli.top.plain_text import bar, middle, plain
from kvmig.core.api_records import InstanceRow
from kvmig.core.live_records import (
    LiveDevice,
    LiveFleet,
    LiveInstance,
    LiveModel,
    LiveMove,
    LiveStream,
)
from kvmig.core.quantities import size_text

Look = Literal["", "title", "dim", "good", "wait", "bad", "moving"]
"""How a row looks; the application has a style for each."""
BAR = 8
MOVED_S = 5.0
"""Seconds for which a stream is marked that has moved."""
Key = tuple[str, ...]


class TableRow(NamedTuple):
    """A row of a table."""

    key: Key
    cells: tuple[str, ...]
    look: Look = ""


class SortOrder(NamedTuple):
    """The order of a table."""

    by: str
    """The column: one of the table's sort names."""
    reverse: bool = False


INSTANCE_COLUMNS = ("model, instance", "state", "KV cache", "run", "wait", "moves", "where, why")
INSTANCE_SORTS = ("name", "state", "KV cache", "run", "wait")
STREAM_COLUMNS = ("stream", "model", "on", "state", "tokens", "output")
STREAM_SORTS = ("tokens", "stream", "model", "on", "state", "output")
MOVE_COLUMNS = ("ended", "stream", "model", "from → to", "outcome", "for", "bytes", "pause")
MOVE_SORTS = ("ended", "pause", "bytes", "model")
DEVICE_COLUMNS = ("GPU", "memory", "total", "free", "others", "busy", "power", "models")
DEVICE_SORTS = ("GPU", "free", "others")

STATES: dict[str, Look] = {
    "serving": "good",
    "draining": "wait",
    "starting": "wait",
    "waiting": "wait",
    "fetching": "wait",
    "waking": "wait",
    "parking": "wait",
    "ending": "wait",
    "silent": "bad",
    "hung": "bad",
    "lost": "bad",
    "failed": "bad",
}


def shows(words: str, *texts: str) -> bool:
    """Whether a filter leaves what has these texts: each of its words is in one of them."""
    every = " ".join(texts).casefold()
    return all(word in every for word in words.casefold().split())


def next_sort(order: SortOrder, names: Sequence[str]) -> SortOrder:
    """The order by the next column."""
    at = names.index(order.by) if order.by in names else -1
    return SortOrder(names[(at + 1) % len(names)])


# -- models and instances


def kv_part(row: InstanceRow) -> float:
    """Part of its KV cache that is in use."""
    return row.blocks_used / row.blocks_total if row.blocks_total else 0.0


class ModelGroup(NamedTuple):
    """A model with its instances."""

    model: LiveModel
    instances: list[LiveInstance]

    @property
    def blocks_used(self) -> int:
        """KV blocks in use."""
        return sum(one.row.blocks_used for one in self.instances)

    @property
    def waiting(self) -> int:
        """Requests that wait for a start, or in a queue."""
        return self.model.held + sum(one.row.waiting for one in self.instances)


def instance_rows(fleet: LiveFleet, words: str, order: SortOrder) -> list[TableRow]:
    """A row for each model, and below it one for each of its instances."""
    by_model: dict[str, list[LiveInstance]] = {}
    for one in fleet.instances:
        by_model.setdefault(one.model, []).append(one)
    loads = [ModelGroup(one, by_model.get(one.name, [])) for one in fleet.models]
    loads.sort(key=_MODEL_KEYS[order.by], reverse=order.reverse)
    rows = []
    for load in loads:
        found = load.instances
        if not shows(words, load.model.name, load.model.state):
            found = [one for one in found if _instance_shows(words, one)]
            if not found:
                continue
        rows.append(_model_row(load.model))
        found = sorted(found, key=_INSTANCE_KEYS[order.by], reverse=order.reverse)
        rows += map(instance_row, found)
    return rows


def _model_row(model: LiveModel) -> TableRow:
    count = f"{model.serving} of {model.desired}" if model.desired or model.serving else ""
    return TableRow(
        (model.name,),
        (
            middle(model.name, 24),
            plain(model.state, 10),
            count,
            str(model.running) if model.running else "",
            str(model.held) if model.held else "",
            "",
            plain(model.why),
        ),
        "dim" if model.state == "zero" else "title",
    )


_MODEL_KEYS: dict[str, Callable[[ModelGroup], tuple[object, ...]]] = {
    "name": lambda one: (one.model.name,),
    "state": lambda one: (one.model.state, one.model.name),
    "KV cache": lambda one: (-one.blocks_used, one.model.name),
    "run": lambda one: (-one.model.running, one.model.name),
    "wait": lambda one: (-one.waiting, one.model.name),
}


def instance_row(one: LiveInstance) -> TableRow:
    """The row of an instance."""
    row = one.row
    moves = "".join(
        f"{sign}{count}"
        for sign, count in (("←", row.migrations_in), ("→", row.migrations_out))
        if count
    )
    kv = f"{bar(kv_part(row), BAR)} {kv_part(row):4.0%}" if row.blocks_total else ""
    where = ", ".join(filter(None, ["" if one.worker == "local" else one.worker, *one.gpus]))
    return TableRow(
        (one.model, one.deployment, row.id),
        (
            f"  {middle(row.id, 22)}",
            plain(row.state, 10),
            kv,
            str(row.running),
            str(row.waiting),
            moves,
            plain(row.detail or where or row.host),
        ),
        "moving" if moves else STATES.get(row.state, ""),
    )


def _instance_shows(words: str, one: LiveInstance) -> bool:
    return shows(words, one.model, one.row.id, one.row.state, one.worker, *one.gpus)


_INSTANCE_KEYS: dict[str, Callable[[LiveInstance], tuple[object, ...]]] = {
    "name": lambda one: (one.deployment, len(one.row.id), one.row.id),
    "state": lambda one: (one.row.state, one.row.id),
    "KV cache": lambda one: (-kv_part(one.row), one.row.id),
    "run": lambda one: (-one.row.running, one.row.id),
    "wait": lambda one: (-one.row.waiting, one.row.id),
}

# -- streams


def stream_rows(fleet: LiveFleet, words: str, order: SortOrder) -> list[TableRow]:
    """A row for each stream that was listed."""
    moved = {
        (one.model, one.move.request_id): one.move.source
        for one in sorted(fleet.moves, key=lambda one: one.move.ended_at)  # the last one counts
        if one.move.state == "committed" and fleet.at - one.move.ended_at <= MOVED_S
    }
    found = [
        one
        for one in fleet.streams
        if shows(words, one.model, one.row.id, one.row.instance, one.row.state)
    ]
    found.sort(key=_STREAM_KEYS[order.by], reverse=order.reverse)
    return [_stream_row(one, moved.get((one.model, one.row.id))) for one in found]


def _stream_row(one: LiveStream, came_from: str | None) -> TableRow:
    row = one.row
    on, look = plain(row.instance, 12), STREAM_STATES.get(row.state, "")
    if row.migrating_to is not None:
        on, look = f"{on} → {plain(row.migrating_to, 12)}", "moving"
    elif came_from is not None:
        on, look = f"{on} ← {plain(came_from, 12)}", "moving"
    return TableRow(
        (one.model, one.deployment, row.id),
        (
            middle(row.id, 26),
            middle(one.model, 16),
            on,
            plain(row.state, 10),
            str(row.tokens),
            str(row.output_tokens),
        ),
        look,
    )


STREAM_STATES: dict[str, Look] = {"waiting": "wait", "submitted": "wait", "suspended": "moving"}
_STREAM_KEYS: dict[str, Callable[[LiveStream], tuple[object, ...]]] = {
    "tokens": lambda one: (-one.row.tokens, one.row.id),
    "output": lambda one: (-one.row.output_tokens, one.row.id),
    "stream": lambda one: (one.row.id,),
    "model": lambda one: (one.model, -one.row.tokens, one.row.id),
    "on": lambda one: (one.model, one.row.instance, -one.row.tokens, one.row.id),
    "state": lambda one: (one.row.state, -one.row.tokens, one.row.id),
}

# -- migrations


def move_rows(fleet: LiveFleet, words: str, order: SortOrder) -> list[TableRow]:
    """A row for each of the last migrations."""
    found = [
        one
        for one in fleet.moves
        if shows(words, one.model, one.move.request_id, one.move.source, one.move.destination)
    ]
    found.sort(key=_MOVE_KEYS[order.by], reverse=order.reverse)
    return [_move_row(one) for one in found]


def outcome(one: LiveMove) -> str:
    """How a migration ended."""
    return plain(f"{one.move.state}: {one.move.reason}" if one.move.reason else one.move.state, 24)


def pause(one: LiveMove) -> str:
    """The pause of its stream."""
    found = one.move.pause_ms
    return "" if found is None else f"{found:.1f} ms"


def _move_row(one: LiveMove) -> TableRow:
    move = one.move
    return TableRow(
        (one.model, move.request_id, move.source, move.destination, str(move.ended_at)),
        (
            time_text(move.ended_at),
            middle(move.request_id, 20),
            middle(one.model, 12),
            f"{plain(move.source, 10)} → {plain(move.destination, 10)}",
            outcome(one),
            plain(move.why, 12),
            size_text(move.bytes),
            pause(one),
        ),
        "good" if move.state == "committed" else "bad",
    )


_MOVE_KEYS: dict[str, Callable[[LiveMove], tuple[object, ...]]] = {
    "ended": lambda one: (-one.move.ended_at, one.move.request_id),
    "pause": lambda one: (-(one.move.pause_ms or 0.0), one.move.request_id),
    "bytes": lambda one: (-one.move.bytes, one.move.request_id),
    "model": lambda one: (one.model, -one.move.ended_at),
}


def last_move(fleet: LiveFleet) -> str:
    """The last migration in a line; empty: there was none."""
    if not fleet.moves:
        return ""
    one = max(fleet.moves, key=lambda each: each.move.ended_at)
    move = one.move
    parts = [
        f"{time_text(move.ended_at)}  {middle(move.request_id, 24)} of {middle(one.model, 16)}:",
        f"{plain(move.source, 10)} → {plain(move.destination, 10)} {outcome(one)}",
    ]
    if move.bytes:
        parts.append(size_text(move.bytes))
    if pause(one):
        parts.append(f"pause {pause(one)}")
    return " ".join(parts)


def time_text(at: float) -> str:
    """The time of day, UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


# -- GPUs


def device_rows(fleet: LiveFleet, words: str, order: SortOrder) -> list[TableRow]:
    """A row for each GPU."""
    found = [one for one in fleet.devices if shows(words, one.worker, one.title, *one.models)]
    found.sort(key=_DEVICE_KEYS[order.by], reverse=order.reverse)
    return list(map(_device_row, found))


def _device_row(one: LiveDevice) -> TableRow:
    taken = 1 - one.free_bytes / one.total_bytes if one.total_bytes else 0.0
    claims = sorted(one.models.items(), key=lambda each: (-each[1], each[0]))
    return TableRow(
        (one.uuid,),
        (
            plain(f"{one.worker}: {one.title}" if one.worker else one.title, 60),
            f"{bar(taken, BAR)} {taken:4.0%}",
            size_text(one.total_bytes),
            size_text(one.free_bytes),
            size_text(one.others_bytes) if one.others_bytes else "",
            "" if one.busy is None else f"{one.busy:.0%}",
            "" if one.watts is None else f"{one.watts:.0f} W",
            plain(", ".join(f"{name} {size_text(size)}" for name, size in claims)),
        ),
        "wait" if taken > FULL else "",
    )


FULL = 0.98
_DEVICE_KEYS: dict[str, Callable[[LiveDevice], tuple[object, ...]]] = {
    "GPU": lambda one: (one.title,),
    "free": lambda one: (-one.free_bytes, one.title),
    "others": lambda one: (-one.others_bytes, one.title),
}

# -- the whole


def summary(fleet: LiveFleet) -> str:
    """The fleet in a line."""
    serving = sum(one.row.state == "serving" for one in fleet.instances)
    listed = len(fleet.streams)
    streams = sum(one.streams for one in fleet.models)
    held = sum(one.held for one in fleet.models)
    parts = [
        _count(len(fleet.models), "model"),
        f"{serving} of {_count(len(fleet.instances), 'instance')} serving",
        _count(streams, "stream") + (f" ({listed} shown)" if listed < streams else ""),
    ]
    if held:
        parts.append(f"{held} held")
    if fleet.devices:
        parts.append(_count(len(fleet.devices), "GPU"))
    if fleet.unanswered:
        parts.append(f"no list of streams from {plain(', '.join(fleet.unanswered), 60)}")
    return " · ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def destinations(fleet: LiveFleet, stream: LiveStream) -> list[LiveInstance]:
    """Instances that a stream may be moved to, the emptiest first."""
    found: Iterable[LiveInstance] = (
        one
        for one in fleet.instances
        if (one.model, one.deployment) == (stream.model, stream.deployment)
        and one.row.state == "serving"
        and one.row.id != stream.row.instance
    )
    return sorted(found, key=lambda one: (kv_part(one.row), one.row.id))
