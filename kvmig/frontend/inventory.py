"""Rows of instances and requests, for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvmig.asgi.errors import AmbiguousRequest
from kvmig.controlplane.freeness import instance_freeness
from kvmig.controlplane.messages import ClusterMember, ListedRequests, Welcome
from kvmig.controlplane.view import InstanceView
from kvmig.core.api_records import InstanceRow, RequestRow, UnitMemory
from kvmig.core.shown_secrets import shown_line
from kvmig.engines.base import RequestState
from kvmig.frontend.requests import LiveRequest, call_of
from kvmig.sharing.messages import InUnit

_ROW = InstanceRow.__struct_fields__


def instance_row(
    index: int, view: InstanceView, unhealthy: str, welcome: Welcome | None = None
) -> InstanceRow:
    """The row of one instance.

    unhealthy: `silent`, `hung`, `failed`, `starting` (never connected yet), `lost` (no longer
    connected), or empty. welcome: the one of an instance that is connected.
    """
    found = {
        **_same_fields(welcome),
        **_same_fields(view.load),
        **_same_fields(view),
        "id": view.instance,
        "index": index,
        "state": unhealthy or view.state,
        "blocks_total": view.load.total_blocks,
        "blocks_limit": view.load.most_blocks,
        "blocks_used": view.load.used_blocks,
        "freeness": 0.0 if unhealthy in ("starting", "lost") else instance_freeness(view),
        "shared": None if view.shared is None else _unit_memory(view.shared),
    }
    return InstanceRow(**found)


def _same_fields(source: object) -> dict[str, Any]:
    """What a row has of `source` under the same name."""
    return {name: getattr(source, name) for name in _ROW if hasattr(source, name)}


def _unit_memory(shared: InUnit) -> UnitMemory:
    return UnitMemory(
        lease_bytes=shared.lease,
        used_bytes=shared.used,
        wanted_bytes=shared.wanted,
        guarantee_bytes=shared.guarantee,
        connected=shared.connected,
        decode_share=10 * shared.decode_parts,
    )


def cluster_rows(
    linked: Sequence[InstanceRow], members: Iterable[ClusterMember], model: str
) -> list[InstanceRow]:
    """Rows of all instances of the model, in the order of `members`. linked: those that are
    connected to.

    The launcher's word on a state counts, unless a front end can't reach the instance, or the
    instance itself reports that something is wrong.
    """
    rows = {row.id: row for row in linked}
    joined = []
    for member in members:
        row = rows.pop(member.instance, None) or instance_row(
            -1, InstanceView(instance=member.instance, endpoint=member.endpoint), ""
        )
        sound = member.state in ("starting", "failed") or row.state in ("serving", "draining")
        state = member.state if sound else row.state
        joined.append(
            replace(
                row,
                state=state,
                detail=member.detail,
                vllm=member.tree,
                unit=member.unit,
                node=member.node,
                flags=shown_line(member.flags),
                server=member.server,
            )
        )
    return [replace(row, model=model) for row in (*joined, *rows.values())]


def request_rows(
    requests: Iterable[LiveRequest], lists: Mapping[str, Sequence[RequestState]]
) -> list[RequestRow]:
    """Rows of requests in order of arrival. lists: each instance's own list.

    During a migration two instances list a request: its owner's list counts.
    """
    states = {
        (state.request_id, instance): state
        for instance, listed in lists.items()
        for state in listed
    }
    rows = []
    for request in sorted(requests, key=lambda request: request.arrived):
        places = [request.owner, *sorted(request.holders - {request.owner}), *lists]
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
    known: dict[str, Any] = {name: getattr(state, name) for name in _OF_STATE}
    return RequestRow(
        id=request_id, call_id=call_id, instance=instance, migrating_to=migrating_to, **known
    )


_OF_STATE = [one for one in RequestState.__struct_fields__ if one in RequestRow.__struct_fields__]


# -- requests of other front ends

# Instances know a request by the id of its present run (`LiveRequest.run_id`). vLLM's own id of it,
# of which the call's is a part, ends with eight random hexadecimal digits.
_RUN = re.compile(r"(?P<request>(?:\d+_)?(?P<external>.+)-[0-9a-f]{8})(?:\+\d+)?", re.DOTALL)


class OthersRequest(NamedTuple):
    """A live request of another front end. run_id: its id at its instance."""

    row: RequestRow
    run_id: str


def others_requests(lists: Mapping[str, ListedRequests], own: str) -> list[OthersRequest]:
    """Requests of all front ends except `own`, in no order. lists: each instance's own list.

    Example: run "cmpl-x-0-12345678+1" of another front end: request "cmpl-x-0-12345678",
    call "x".
    """
    found: dict[str, OthersRequest] = {}
    for instance, listed in lists.items():
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
    """The request with this request id or call id; None: none. Raises AmbiguousRequest."""
    matching = [one for one in requests if any_id in (one.row.id, one.row.call_id)]
    if len(matching) > 1:
        names = ", ".join(sorted(one.row.id for one in matching))
        raise AmbiguousRequest(f"{any_id} has {len(matching)} live sequences, name one: {names}")
    return matching[0] if matching else None
