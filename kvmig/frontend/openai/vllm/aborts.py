"""vLLM's routes that end calls, for the clients of all front ends."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvmig.asgi.errors import LauncherGone
from kvmig.asgi.problems import problem
from kvmig.engines.vllm.front import RoutedLLM
from kvmig.frontend.call_aborts import CallAborts

PATHS = ("/abort_requests", "/inference/v1/abort_requests")
Handler = Callable[[Request], Awaitable[Response]]


def abort_everywhere(app: FastAPI, llm: RoutedLLM, aborts: CallAborts) -> None:
    """Let vLLM's routes that end calls end those of other front ends, too: vLLM's own answer comes
    first, with what it refuses."""

    async def end_here(request_ids: Sequence[str] | None) -> int:
        return await end_calls(llm, request_ids)

    aborts.end_here = end_here
    if aborts.others is None:
        return
    theirs = {one.path: one for one in app.routes if isinstance(one, APIRoute)}
    for path in PATHS:
        if (original := theirs.get(path)) is not None:
            ours = shared_route(original.endpoint, aborts)
            app.router.routes.insert(0, Route(path, ours, methods=["POST"]))


def shared_route(original: Handler, aborts: CallAborts) -> Handler:
    """vLLM's route at all front ends. original: at this one; it refuses what it can't read."""

    async def end_everywhere(request: Request) -> Response:
        answer = await original(request)
        if answer.status_code != HTTPStatus.OK:
            return answer
        ids = (await request.json()).get("request_ids")
        named = [ids] if isinstance(ids, str) else list(ids or ())
        try:
            others = await aborts.end_elsewhere(named or None)
        except LauncherGone as error:
            said = f"calls of one front end were ended, others could not be asked: {error}"
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, said)
        if named or not answer.body:
            return answer
        body = json.loads(bytes(answer.body))
        return JSONResponse({**body, "aborted": body["aborted"] + others})

    return end_everywhere


async def end_calls(llm: RoutedLLM, request_ids: Sequence[str] | None) -> int:
    """End calls of this front end, by the ids that clients know; None: all. Returns how many."""
    if request_ids is not None:
        await llm.abort(request_ids)
        return len(request_ids)
    known = llm.output_processor
    own = [*known.request_states, *known.parent_requests]
    await llm.abort(own, internal=True)
    return len(own)
