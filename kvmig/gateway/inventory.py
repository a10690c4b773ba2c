"""What there is, for people: instances and requests as rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvmig.controlplane.freeness import instance_freeness
from kvmig.controlplane.messages import Member
from kvmig.controlplane.view import InstanceView
from kvmig.engines.base import Preempted, RequestState
from kvmig.gateway.requests import Entry


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One instance as last heard of. Sizes in KV blocks."""

    id: str
    index: int
    """Engine index, as in vLLM's metrics."""
    state: str
    """starting, serving, draining, silent, hung, failed or lost."""
    endpoint: str
    blocks_total: int
    blocks_used: int
    running: int
    waiting: int
    freeness: float
    """May be infinite."""
    migrations_in: int
    """Under way now."""
    migrations_out: int
    staging_used: int
    """Staging buffers held by migrations out of it."""
    preempted: tuple[Preempted, ...] = ()
    detail: str = ""
    """For people: why it is in this state."""
    headroom: Mapping[int, float] = field(default_factory=dict)
    """Priority -> KV blocks kept free for it."""
    unmovable: str = ""
    """Why no request can be moved from it or to it; empty when they can."""
    weights: str = ""
    """Identity of its weights."""
    numerics: str = ""
    """Its numerics class."""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One live request of this front end."""

    id: str
    call_id: str
    instance: str
    state: str
    """running, waiting, suspended, or submitted when no instance has told of it yet."""
    tokens: int
    """Prompt and output."""
    output_tokens: int
    blocks: int
    priority: int
    unmovable: str
    """Why it can't be moved now; empty when it can."""
    age_ms: float
    """How old what the instance told is."""
    migrating_to: str | None


def instance_row(index: int, view: InstanceView, ailment: str) -> InstanceRow:
    """One row; ailment: silent, hung, failed, lost (not connected), or empty."""
    return InstanceRow(
        id=view.instance,
        index=index,
        state=ailment or view.state,
        endpoint=view.endpoint,
        blocks_total=view.load.total_blocks,
        blocks_used=view.load.used_blocks,
        running=view.load.running,
        waiting=view.load.waiting,
        freeness=0.0 if ailment == "lost" else instance_freeness(view),
        migrations_in=view.migrations_in,
        migrations_out=view.migrations_out,
        staging_used=view.staging_used,
        preempted=view.load.preempted,
        headroom=view.headroom,
        unmovable=view.unmovable,
        weights=view.weights,
        numerics=view.numerics,
    )


def cluster_rows(linked: Sequence[InstanceRow], members: Iterable[Member]) -> list[InstanceRow]:
    """Rows of all instances: `linked`, those that are connected to, in the order of `members`.

    The launcher's word counts, but where a front end can't reach the instance, or that says
    itself that something is wrong.
    """
    rows = {row.id: row for row in linked}
    joined = []
    for member in members:
        row = rows.pop(member.instance, None) or instance_row(
            -1, InstanceView(instance=member.instance, endpoint=member.endpoint), ""
        )
        sound = member.state in ("starting", "failed") or row.state in ("serving", "draining")
        state = member.state if sound else row.state
        joined.append(replace(row, state=state, detail=member.detail))
    return [*joined, *rows.values()]


def request_rows(
    entries: Iterable[Entry], told: Mapping[str, Sequence[RequestState]]
) -> list[RequestRow]:
    """Rows in order of arrival. told: each instance's own list.

    During a migration two instances tell of a request: its owner's word counts.
    """
    states = {
        (state.request_id, instance): state for instance, listed in told.items() for state in listed
    }
    rows = []
    for entry in sorted(entries, key=lambda entry: entry.arrived):
        places = [entry.owner, *sorted(entry.holders - {entry.owner}), *told]
        found = next((at for at in places if (entry.run_id, at) in states), None)
        state = RequestState(
            request_id=entry.request_id,
            state="submitted",
            tokens=entry.prompt_tokens + entry.splicer.next,
            output_tokens=entry.splicer.next,
            blocks=0,
            priority=entry.priority,
        )
        if found is not None:
            state = states[entry.run_id, found]
        rows.append(
            RequestRow(
                id=entry.request_id,
                call_id=entry.call_id,
                instance=found or entry.owner,
                state=state.state,
                tokens=state.tokens,
                output_tokens=state.output_tokens,
                blocks=state.blocks,
                priority=state.priority,
                unmovable=state.unmovable,
                age_ms=state.age_ms,
                migrating_to=entry.destination,
            )
        )
    return rows
