"""GET /kvmig/v1/events: what happens in the cluster, as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import StreamingResponse

from kvmig.asgi.access import Rule
from kvmig.asgi.problems import PROBLEMS, guarded
from kvmig.core.api_records import InstanceRow
from kvmig.core.clock import monotonic
from kvmig.frontend.admin import PREFIX
from kvmig.frontend.order_tokens import RaiseOrderFence, fenced_by
from kvmig.frontend.router import FrontendRouter
from kvmig.frontend.struct_answers import shown_report

LOOK_S = 0.2
"""Pause between two looks at what has changed."""
HEARTBEAT_S = 5.0
"""Longest time between two events of a listener."""


def events_api(
    router: FrontendRouter,
    rows: Callable[[], list[InstanceRow]],
    rule: Rule,
    closed: Callable[[], bool],
    raise_fence: RaiseOrderFence,
) -> APIRouter:
    """The route; rows, rule, raise_fence as in `admin_api`. closed: whether the server stops."""
    api = APIRouter(
        prefix=PREFIX, tags=["kvmig"], responses=PROBLEMS, route_class=guarded(rule, ())
    )

    async def stream() -> AsyncIterator[bytes]:
        told: tuple[bool, list[InstanceRow]] = False, []
        said, reports = -HEARTBEAT_S, router.reported
        while not closed():
            now = router.fleet.parked, rows()
            fresh, reports = router.reported - reports, router.reported
            newest = list(itertools.islice(reversed(router.reports), fresh))
            for report in reversed(newest):
                yield event("migration", shown_report(report))
            if now != told or fresh or monotonic() - said >= HEARTBEAT_S:
                shown = {
                    "live": len(router.live()) + router.held,
                    "parked": now[0],
                    "data": now[1],
                }
                yield event("instances", shown)
                told, said = now, monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await router.fleet.parking.wait()
        yield event("closed", {})

    @api.get("/events", response_class=StreamingResponse, dependencies=[fenced_by(raise_fence)])
    async def events() -> StreamingResponse:
        """`instances` now and whenever one changes, at least every 5 s; `migration` as each ends.

        `instances`: `live`, the requests of this front end, `parked`, and `data` as GET /instances
        has it.
        `closed`: the server stops.
        """
        return StreamingResponse(stream(), media_type="text/event-stream")

    return api


def event(name: str, data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
