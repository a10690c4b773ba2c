"""Requests of other front ends, as the instances tell of them. Pure.

What an instance knows of a request is the id of its present run (`Entry.run_id`). vLLM's own
id of it, of which the call's is a part, ends with eight random hexadecimal digits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from kvmig.controlplane.messages import Requests
from kvmig.gateway.errors import AmbiguousRequest
from kvmig.gateway.inventory import RequestRow
from kvmig.gateway.requests import call_of

_RUN = re.compile(r"(?P<request>(?:\d+_)?(?P<external>.+)-[0-9a-f]{8})(?:\+\d+)?", re.DOTALL)


class Foreign(NamedTuple):
    """One of them. run_id: its name at its instance."""

    row: RequestRow
    run_id: str


def foreign_requests(told: Mapping[str, Requests], own: str) -> list[Foreign]:
    """Those of all front ends but `own`, in no order. told: each instance's own list.

    Example: run "cmpl-x-0-12345678+1" of another front end: request "cmpl-x-0-12345678",
    call "x".
    """
    found: dict[str, Foreign] = {}
    for instance, listed in told.items():
        for state in listed.requests:
            if listed.fronts.get(state.request_id, own) == own:
                continue
            parts = _RUN.fullmatch(state.request_id)
            row = RequestRow(
                id=parts["request"] if parts else state.request_id,
                call_id=call_of(parts["external"]) if parts else state.request_id,
                instance=instance,
                state=state.state,
                tokens=state.tokens,
                output_tokens=state.output_tokens,
                blocks=state.blocks,
                priority=state.priority,
                unmovable=state.unmovable,
                age_ms=state.age_ms,
                migrating_to=None,
            )
            found[state.request_id] = Foreign(row, state.request_id)
    return list(found.values())


def find_foreign(requests: list[Foreign], any_id: str) -> Foreign | None:
    """By request id or call id; None if there is none. Raises AmbiguousRequest."""
    matching = [one for one in requests if any_id in (one.row.id, one.row.call_id)]
    if len(matching) > 1:
        names = ", ".join(sorted(one.row.id for one in matching))
        raise AmbiguousRequest(f"{any_id} has {len(matching)} live sequences, name one: {names}")
    return matching[0] if matching else None
