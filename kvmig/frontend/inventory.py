"""Rows of instances and requests, for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvmig.asgi.errors import AmbiguousRequest
from kvmig.controlplane.freeness import instance_freeness
from kvmig.controlplane.messages import Member, Requests, Welcome
from kvmig.controlplane.view import InstanceView
from kvmig.engines.base import Preempted, RequestState
from kvmig.frontend.requests import LiveRequest, call_of
from kvmig.sharing.messages import InUnit


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
    """Staging buffers held by migrations out of the instance."""
    preempted: tuple[Preempted, ...] = ()
    detail: str = ""
    """Why the instance is in this state, for people."""
    headroom: Mapping[int, float] = field(default_factory=dict)
    """Priority -> KV blocks kept free for its class."""
    unmovable: str = ""
    """Why no request can be moved from the instance or to it; empty when they can."""
    weights: str = ""
    """Identity of the instance's weights."""
    numerics: str = ""
    """The instance's numerics class."""
    tree: str = ""
    """Folder of the instance's engine; empty: the installed one."""
    unit: str = ""
    """Name of where the instance is in a placement."""
    blocks_limit: int = 0
    """What `blocks_total` could be if those gave that the instance shares KV cache with."""
    shared: InUnit | None = None
    """None: its KV cache is its own alone."""
    pid: int = 0
    """Of its process; 0: it isn't connected."""
    host: str = ""
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One live request, of this front end or another."""

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
    """Why the request can't be moved now; empty when it can."""
    age_ms: float
    """Age of what the instance told."""
    migrating_to: str | None


def instance_row(
    index: int, view: InstanceView, ailment: str, welcome: Welcome | None = None
) -> InstanceRow:
    """One row; ailment: silent, hung, failed, lost (not connected), or empty.

    welcome: of an instance that is connected.
    """
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
        blocks_limit=view.load.most_blocks,
        shared=view.shared,
        pid=0 if welcome is None else welcome.pid,
        host="" if welcome is None else welcome.host,
        gpus=() if welcome is None else welcome.gpus,
    )


def cluster_rows(linked: Sequence[InstanceRow], members: Iterable[Member]) -> list[InstanceRow]:
    """Rows of all instances, in the order of `members`. linked: those that are connected to.

    The launcher's word on a state counts, unless a front end can't reach the instance, or the
    instance itself says that something is wrong.
    """
    rows = {row.id: row for row in linked}
    joined = []
    for member in members:
        row = rows.pop(member.instance, None) or instance_row(
            -1, InstanceView(instance=member.instance, endpoint=member.endpoint), ""
        )
        sound = member.state in ("starting", "failed") or row.state in ("serving", "draining")
        state = member.state if sound else row.state
        told = replace(row, state=state, detail=member.detail, tree=member.tree, unit=member.unit)
        joined.append(told)
    return [*joined, *rows.values()]


def request_rows(
    requests: Iterable[LiveRequest], told: Mapping[str, Sequence[RequestState]]
) -> list[RequestRow]:
    """Rows in order of arrival. told: each instance's own list.

    During a migration two instances tell of a request: its owner's word counts.
    """
    states = {
        (state.request_id, instance): state for instance, listed in told.items() for state in listed
    }
    rows = []
    for request in sorted(requests, key=lambda request: request.arrived):
        places = [request.owner, *sorted(request.holders - {request.owner}), *told]
        found = next((at for at in places if (request.run_id, at) in states), None)
        state = RequestState(
            request_id=request.request_id,
            state="submitted",
            tokens=request.prompt_tokens + request.splicer.next,
            output_tokens=request.splicer.next,
            blocks=0,
            priority=request.priority,
        )
        if found is not None:
            state = states[request.run_id, found]
        place = found or request.owner
        rows.append(_row(request.request_id, request.call_id, place, state, request.destination))
    return rows


def _row(
    request_id: str,
    call_id: str,
    instance: str,
    state: RequestState,
    migrating_to: str | None = None,
) -> RequestRow:
    return RequestRow(
        id=request_id,
        call_id=call_id,
        instance=instance,
        state=state.state,
        tokens=state.tokens,
        output_tokens=state.output_tokens,
        blocks=state.blocks,
        priority=state.priority,
        unmovable=state.unmovable,
        age_ms=state.age_ms,
        migrating_to=migrating_to,
    )


# -- requests of other front ends

# Instances know a request by the id of its present run (`LiveRequest.run_id`). vLLM's own id of it,
# of which the call's is a part, ends with eight random hexadecimal digits.
_RUN = re.compile(r"(?P<request>(?:\d+_)?(?P<external>.+)-[0-9a-f]{8})(?:\+\d+)?", re.DOTALL)


class OthersRequest(NamedTuple):
    """A live request of another front end. run_id: its id at its instance."""

    row: RequestRow
    run_id: str


def others_requests(told: Mapping[str, Requests], own: str) -> list[OthersRequest]:
    """Requests of all front ends but `own`, in no order. told: each instance's own list.

    Example: run "cmpl-x-0-12345678+1" of another front end: request "cmpl-x-0-12345678",
    call "x".
    """
    found: dict[str, OthersRequest] = {}
    for instance, listed in told.items():
        for state in listed.requests:
            if listed.fronts.get(state.request_id, own) == own:
                continue
            parts = _RUN.fullmatch(state.request_id)
            request_id = parts["request"] if parts else state.request_id
            call_id = call_of(parts["external"]) if parts else state.request_id
            row = _row(request_id, call_id, instance, state)
            found[state.request_id] = OthersRequest(row, state.request_id)
    return list(found.values())


def find_other(requests: list[OthersRequest], any_id: str) -> OthersRequest | None:
    """By request id or call id; None if there is none. Raises AmbiguousRequest."""
    matching = [one for one in requests if any_id in (one.row.id, one.row.call_id)]
    if len(matching) > 1:
        names = ", ".join(sorted(one.row.id for one in matching))
        raise AmbiguousRequest(f"{any_id} has {len(matching)} live sequences, name one: {names}")
    return matching[0] if matching else None
