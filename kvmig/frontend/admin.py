"""The admin API under /kvmig/v1: what there is, moving requests by hand, orders about instances."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from kvmig.asgi.access import Rule
from kvmig.asgi.body_bounds import ModelReach
from kvmig.asgi.problems import PROBLEMS, ErrorBody, Responses, guarded
from kvmig.asgi.session_id import LONGEST_SESSION
from kvmig.asgi.strict_body import StrictBody
from kvmig.controlplane.messages import AddInstances, DrainInstance, RestartInstances, StopDrain
from kvmig.core.api_records import InstanceRow, ModelBody, ReachBody, RowListing
from kvmig.frontend.launcher_link import LauncherLink
from kvmig.frontend.order_tokens import GivenToken, RaiseOrderFence, fenced_by
from kvmig.frontend.router import RECENT, FrontendRouter
from kvmig.frontend.struct_answers import (
    INSTANCES,
    MIGRATION,
    MIGRATIONS,
    MODEL,
    REQUESTS,
    answer,
    shown_report,
    shows,
)

PREFIX = "/kvmig/v1"
NameSession = Callable[[str, str], int | None]
"""What stands for the session of an id and account; of whichever account if that is empty."""
MOST = 10_000
"""Most instances in one order; the launcher has its own limit."""
MOST_BYTES = 1 << 60
MOST_WAIT_S = 3600.0
LOOK_S = 0.1
"""Pause between two looks at instances that start."""

# -- the routes


def admin_api(
    router: FrontendRouter,
    rows: Callable[[], list[InstanceRow]],
    model: str,
    rule: Rule,
    raise_fence: RaiseOrderFence,
    reach: ModelReach | None = None,
    *,
    name_session: NameSession,
) -> APIRouter:
    """Routes that show the model, instances, requests and migrations, and move a request.

    rows: of all instances, now. model: the served model's name. rule: who may call them.
    raise_fence: the launcher's. reach: of the model; None: it isn't known. name_session: what
    stands for a session.
    """
    errors: Responses = {status: {"model": ErrorBody} for status in (400, 404, 409, 503, 504)}
    api = APIRouter(
        prefix=PREFIX,
        tags=["kvmig"],
        responses=PROBLEMS,
        route_class=guarded(rule, tuple(MigrationBody.model_fields)),
    )
    moving = APIRouter(route_class=guarded(rule, tuple(SessionMoveBody.model_fields)))
    changing = APIRouter(route_class=guarded(rule, tuple(ChangeBody.model_fields)))
    fenced = [fenced_by(raise_fence)]

    @api.get("/model", responses=shows(MODEL))
    async def served() -> Response:
        """What the model can use of one prompt, which bounds the bodies of calls."""
        return answer(ModelBody(id=model, reach=reach and ReachBody(*reach)))

    @api.get("/instances", responses=shows(INSTANCES))
    async def instances() -> Response:
        """The instances and their load."""
        return answer(RowListing(data=rows()))

    @changing.patch("/instances/{name}", responses=errors | shows(INSTANCES), dependencies=fenced)
    async def change(name: str, body: ChangeBody) -> Response:
        """Guarantee an instance this much of its unit's KV cache from now on.

        409 if it is in no unit, if that is less than one request of the greatest length takes, or
        if all guarantees together were more than the unit has; nothing is changed then.
        """
        await router.set_guarantee(name, body.guarantee_bytes)
        return answer(RowListing(data=[row for row in rows() if row.id == name]))

    @api.get("/requests", responses=shows(REQUESTS))
    async def requests() -> Response:
        """The live requests, in order of arrival."""
        return answer(RowListing(data=await router.requests()))

    @api.post("/migrations", responses=errors | shows(MIGRATION), dependencies=fenced)
    async def migrate(body: MigrationBody) -> Response:
        """Move a request and wait for the end: 200 with the report, also when it was aborted.

        404 or 409 if it could not begin; the request's stream is untouched then.
        """
        report = await router.migrate(body.request_id, body.destination, inexact=body.inexact)
        return answer(shown_report(report))

    @moving.post("/sessions/move", responses=errors | shows(MIGRATION), dependencies=fenced)
    async def move_session(body: SessionMoveBody) -> Response:
        """Move what is cached of a session that has no request now, and wait for the end.

        200 with the report, also when it was aborted: the session stays where it was then. 404 or
        409 if it could not begin.
        """
        name = name_session(body.session, "")
        assert name is not None  # it has a character
        owner = None if body.account is None else name_session(body.session, body.account)
        report = await router.sessions.move(name, owner, body.destination, inexact=body.inexact)
        return answer(shown_report(report))

    @api.post("/park", responses=errors | shows(INSTANCES), dependencies=fenced)
    async def park() -> Response:
        """Give the memory of all KV caches back that isn't yet; without requests only.

        A request that comes nevertheless is served.
        """
        await router.park()
        return answer(RowListing(data=rows()))

    @api.post("/unpark", responses=errors | shows(INSTANCES), dependencies=fenced)
    async def unpark() -> Response:
        """Let each parked instance answer its canary, as at its start, before clients' requests.

        One that isn't parked does nothing.
        """
        await router.unpark()
        return answer(RowListing(data=rows()))

    @api.get("/migrations", responses=shows(MIGRATIONS) | {400: {"model": ErrorBody}})
    async def migrations(
        limit: Annotated[int, Query(ge=1, le=RECENT)] = 100,
    ) -> Response:
        """The last migrations, by hand and by policy, newest first."""
        newest_first = list(router.reports)[::-1]
        return answer(RowListing(data=[shown_report(one) for one in newest_first[:limit]]))

    api.include_router(changing)
    api.include_router(moving)
    return api


def instances_api(
    launcher: LauncherLink, rows: Callable[[], list[InstanceRow]], rule: Rule
) -> APIRouter:
    """Routes that give orders about instances; the parameters are those of `admin_api`."""
    errors: Responses = {status: {"model": ErrorBody} for status in (400, 404, 409, 503)}
    adding = APIRouter(route_class=guarded(rule, tuple(AddBody.model_fields)))
    restarting = APIRouter(route_class=guarded(rule, tuple(RestartBody.model_fields)))
    draining = APIRouter(route_class=guarded(rule, tuple(DrainBody.model_fields)))

    def listed(names: Sequence[str]) -> list[InstanceRow]:
        return [row for row in rows() if row.id in names]

    accepted = shows(INSTANCES, HTTPStatus.ACCEPTED)

    @adding.post(
        "/instances",
        status_code=HTTPStatus.CREATED,
        responses=errors | shows(INSTANCES, HTTPStatus.CREATED),
    )
    async def add(
        token: GivenToken,
        body: AddBody | None = None,
        wait_s: Annotated[float, Query(ge=0, le=MOST_WAIT_S, allow_inf_nan=False)] = 0.0,
    ) -> Response:
        """Start instances; they are `starting` until they serve.

        `wait_s`: the answer comes when they serve or have failed, after these seconds at latest.
        """
        wanted = body or AddBody()
        names = await launcher.order(
            lambda call_id: AddInstances(
                call_id,
                wanted.count,
                wanted.flags,
                wanted.vllm,
                tuple(wanted.gpus),
                wanted.unit,
                wanted.decode_share or 0,
                wanted.node,
                token,
            )
        )
        deadline = asyncio.get_running_loop().time() + wait_s
        while (found := listed(names)) and asyncio.get_running_loop().time() < deadline:
            if all(one.state != "starting" for one in found):
                break
            await asyncio.sleep(LOOK_S)
        return answer(RowListing(data=found), HTTPStatus.CREATED)

    @restarting.post(
        "/instances/restart", status_code=HTTPStatus.ACCEPTED, responses=errors | accepted
    )
    async def restart(token: GivenToken, body: RestartBody | None = None) -> Response:
        """Restart instances one after the other, each once its requests have moved away."""
        wanted = body or RestartBody()
        names = await launcher.order(
            lambda call_id: RestartInstances(
                call_id,
                tuple(wanted.instances),
                wanted.deadline_s,
                wanted.vllm,
                wanted.flags,
                token,
            )
        )
        return answer(RowListing(data=listed(names)), HTTPStatus.ACCEPTED)

    @draining.delete(
        "/instances/{name}", status_code=HTTPStatus.ACCEPTED, responses=errors | accepted
    )
    async def remove(
        name: str,
        token: GivenToken,
        now: bool = False,
        last: bool = False,
        deadline_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
    ) -> Response:
        """Drain an instance, then end it.

        `now`: end it at once; its requests run again elsewhere. `last`: end it also if no other
        instance serves; it serves until nothing runs on it.
        """
        names = await launcher.order(
            lambda call_id: DrainInstance(
                call_id, name, deadline_s, leave=True, now=now, last=last, token=token
            )
        )
        return answer(RowListing(data=listed(names)), HTTPStatus.ACCEPTED)

    @draining.post(
        "/instances/{name}/drain", status_code=HTTPStatus.ACCEPTED, responses=errors | accepted
    )
    async def drain(name: str, token: GivenToken, body: DrainBody | None = None) -> Response:
        """Move an instance's requests away; it stays, and takes no new ones."""
        deadline_s = (body or DrainBody()).deadline_s
        names = await launcher.order(
            lambda call_id: DrainInstance(call_id, name, deadline_s, token=token)
        )
        return answer(RowListing(data=listed(names)), HTTPStatus.ACCEPTED)

    @draining.delete("/instances/{name}/drain", responses=errors | shows(INSTANCES))
    async def stop_drain(name: str, token: GivenToken) -> Response:
        """Let a draining instance serve again."""
        names = await launcher.order(lambda call_id: StopDrain(call_id, name, token))
        return answer(RowListing(data=listed(names)))

    api = APIRouter(prefix=PREFIX, tags=["kvmig"], responses=PROBLEMS)
    api.include_router(adding)
    api.include_router(restarting)
    api.include_router(draining)
    return api


# -- bodies of orders


def whole(value: Any) -> Any:
    """JSON has one kind of numbers: 3.0 is an integer as good as 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class MigrationBody(StrictBody):
    """Move this request there."""

    request_id: str = Field(
        min_length=1,
        description="x-request-id of the call, or a sequence's own id (GET /kvmig/v1/requests).",
    )
    destination: str | None = Field(
        default=None, min_length=1, description="Id of an instance; null: the one with most room."
    )
    inexact: bool = Field(
        default=False,
        description="Also to an instance of another numerics class, where its tokens may differ.",
    )


class SessionMoveBody(StrictBody):
    """Move this session's cached blocks there."""

    session: str = Field(
        min_length=1,
        max_length=LONGEST_SESSION,
        description="Its id, as its calls name it (x-session-id, prompt_cache_key or user).",
    )
    account: str | None = Field(
        default=None,
        description="The user whose session it is, behind a fleet; null: there is one of that id.",
    )
    destination: str | None = Field(
        default=None, min_length=1, description="Id of an instance; null: the one with most room."
    )
    inexact: bool = Field(
        default=False,
        description="Also to an instance of another numerics class, where its tokens may differ.",
    )


class ChangeBody(StrictBody):
    """Change an instance while it serves."""

    guarantee_bytes: Annotated[int, BeforeValidator(whole)] = Field(
        ge=0,
        le=MOST_BYTES,
        description="KV cache of its unit that it gets back whenever it wants it; 0: a fair part "
        "of what others weren't promised.",
    )


class AddBody(StrictBody):
    """Start `count` instances more."""

    count: Annotated[int, BeforeValidator(whole)] = Field(default=1, ge=1, le=MOST)
    flags: str = Field(default="", description="vLLM's flags that only these get.")
    vllm: str | None = Field(
        default=None,
        description="Folder of their vLLM, on the server's disk; null: as most of the others have.",
    )
    gpus: list[str] = Field(
        default=[],
        max_length=MOST,
        description="Ids of the GPUs that each of them runs on, as CUDA_VISIBLE_DEVICES has them; "
        "none: those with the fewest workers.",
    )
    unit: str = Field(
        default="",
        max_length=200,
        description="Name of where they are in a placement; rows show it.",
    )
    decode_share: int | None = Field(
        default=None,
        ge=10,
        le=100,
        multiple_of=10,
        description="Percent of the device for their steps with decodes only; null: as "
        "--unit-shares has it.",
    )
    node: str = Field(
        default="",
        max_length=200,
        description="Id of the Ray node that they run on, with --ray; empty: Ray chooses.",
    )


class DrainBody(StrictBody):
    """Let an instance's requests go elsewhere."""

    deadline_s: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="What is still there then goes on elsewhere by recompute, or ends with an "
        "error where no other instance has its weights; null: --drain-deadline, and such requests "
        "stay until they end.",
    )


class RestartBody(StrictBody):
    """Start instances again, one after the other."""

    instances: list[str] = Field(
        default=[], max_length=MOST, description="Their ids; none: all that serve."
    )
    deadline_s: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="Of each drain, as there."
    )
    vllm: str | None = Field(
        default=None,
        description="Folder of the vLLM that they are from then on, on the server's disk; empty: "
        "the installed one; null: each as it was.",
    )
    flags: str | None = Field(
        default=None,
        description="vLLM's flags that they have from then on besides those of all, and so do all "
        "that start later; null: each as it was.",
    )
