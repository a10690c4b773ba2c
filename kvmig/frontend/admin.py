"""The admin API under /kvmig/v1: what there is, moving requests by hand, orders about instances."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvmig.asgi.access import Rule
from kvmig.asgi.body_bounds import ModelReach
from kvmig.asgi.problems import PROBLEMS, ErrorBody, Responses, guarded
from kvmig.controlplane.messages import AddInstances, DrainInstance, RestartInstances, StopDrain
from kvmig.frontend.inventory import InstanceRow, RequestRow
from kvmig.frontend.launcher_link import LauncherLink
from kvmig.frontend.router import RECENT, Router
from kvmig.kvtransfer.report import MigrationReport
from kvmig.sharing.messages import InUnit

PREFIX = "/kvmig/v1"
MOST = 10_000
"""Most instances in one order; the launcher has its own limit."""
MOST_BYTES = 1 << 60
MOST_WAIT_S = 3600.0
LOOK_S = 0.1
"""Between two looks at instances that start."""

# -- the routes


def admin_api(
    router: Router,
    rows: Callable[[], Sequence[InstanceRow]],
    model: str,
    rule: Rule,
    reach: ModelReach | None = None,
) -> APIRouter:
    """Routes that show the model, instances, requests and migrations, and move a request.

    rows: of all instances, now. model: the served model's name. rule: who may call them. reach: of
    the model; None: it isn't known.
    """
    errors: Responses = {status: {"model": ErrorBody} for status in (400, 404, 409, 503, 504)}
    api = APIRouter(
        prefix=PREFIX,
        tags=["kvmig"],
        responses=PROBLEMS,
        route_class=guarded(rule, tuple(MigrationBody.model_fields)),
    )
    changing = APIRouter(route_class=guarded(rule, tuple(ChangeBody.model_fields)))

    @api.get("/model")
    async def served() -> ModelBody:
        """What the model can use of one prompt, which bounds the bodies of calls."""
        return ModelBody(id=model, reach=reach and ReachBody(**reach._asdict()))

    @api.get("/instances")
    async def instances() -> Listing[Instance]:
        """All instances and their load."""
        return Listing(data=[Instance.of(row, model) for row in rows()])

    @changing.patch("/instances/{name}", responses=errors)
    async def change(name: str, body: ChangeBody) -> Listing[Instance]:
        """Of its unit's KV cache, guarantee it so much from now on.

        409 if it is in no unit, if that is less than one request of the greatest length takes, or
        if all guarantees together were more than the unit has; nothing is changed then.
        """
        await router.set_guarantee(name, body.guarantee_bytes)
        return Listing(data=[Instance.of(row, model) for row in rows() if row.id == name])

    @api.get("/requests")
    async def requests() -> Listing[Request]:
        """All live requests, in order of arrival."""
        return Listing(data=[Request.of(row) for row in await router.requests()])

    @api.post("/migrations", responses=errors)
    async def migrate(body: MigrationBody) -> Migration:
        """Move a request and wait for the end: 200 with the report, also when it was aborted.

        404 or 409 if it could not begin; the request's stream is untouched then.
        """
        return Migration.of(
            await router.migrate(body.request_id, body.destination, inexact=body.inexact)
        )

    @api.post("/park", responses=errors)
    async def park() -> Listing[Instance]:
        """Give the memory of all KV caches back; without requests only.

        A request that comes nevertheless is served.
        """
        await router.park()
        return Listing(data=[Instance.of(row, model) for row in rows()])

    @api.post("/unpark", responses=errors)
    async def unpark() -> Listing[Instance]:
        """Let each instance answer its canary, as it did at its start, before clients' requests."""
        await router.unpark()
        return Listing(data=[Instance.of(row, model) for row in rows()])

    @api.get("/migrations", responses={400: {"model": ErrorBody}})
    async def migrations(
        limit: Annotated[int, Query(ge=1, le=RECENT)] = 100,
    ) -> Listing[Migration]:
        """The last migrations, whoever asked for them, newest first."""
        newest_first = list(router.reports)[::-1]
        return Listing(data=[Migration.of(report) for report in newest_first[:limit]])

    api.include_router(changing)
    return api


def instances_api(
    launcher: LauncherLink,
    rows: Callable[[], Sequence[InstanceRow]],
    model: str,
    rule: Rule,
) -> APIRouter:
    """Routes that give orders about instances; the parameters are those of `admin_api`."""
    errors: Responses = {status: {"model": ErrorBody} for status in (400, 404, 409, 503)}
    adding = APIRouter(route_class=guarded(rule, tuple(AddBody.model_fields)))
    restarting = APIRouter(route_class=guarded(rule, tuple(RestartBody.model_fields)))
    draining = APIRouter(route_class=guarded(rule, tuple(DrainBody.model_fields)))

    def listed(names: Sequence[str]) -> list[Instance]:
        return [Instance.of(row, model) for row in rows() if row.id in names]

    @adding.post("/instances", status_code=HTTPStatus.CREATED, responses=errors)
    async def add(
        body: AddBody | None = None,
        wait_s: Annotated[float, Query(ge=0, le=MOST_WAIT_S, allow_inf_nan=False)] = 0.0,
    ) -> Listing[Instance]:
        """Start instances; they are `starting` until they serve.

        `wait_s`: answer when they serve, or have failed, at the latest after so many seconds.
        """
        wanted = body or AddBody()
        names = await launcher.order(
            lambda call_id: AddInstances(
                call_id, wanted.count, wanted.flags, wanted.vllm, tuple(wanted.gpus), wanted.unit
            )
        )
        deadline = asyncio.get_running_loop().time() + wait_s
        while (found := listed(names)) and asyncio.get_running_loop().time() < deadline:
            if all(one.state != "starting" for one in found):
                break
            await asyncio.sleep(LOOK_S)
        return Listing(data=found)

    @restarting.post("/instances/restart", status_code=HTTPStatus.ACCEPTED, responses=errors)
    async def restart(body: RestartBody | None = None) -> Listing[Instance]:
        """Start them again, one after the other, each once its requests have gone elsewhere."""
        wanted = body or RestartBody()
        names = await launcher.order(
            lambda call_id: RestartInstances(
                call_id, tuple(wanted.instances), wanted.deadline_s, wanted.vllm
            )
        )
        return Listing(data=listed(names))

    @draining.delete("/instances/{name}", status_code=HTTPStatus.ACCEPTED, responses=errors)
    async def remove(
        name: str,
        now: bool = False,
        last: bool = False,
        deadline_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
    ) -> Listing[Instance]:
        """Drain it, then end it; `now`: end it at once, its requests run again elsewhere.

        `last`: also if no other one serves; it serves until nothing runs on it.
        """
        names = await launcher.order(
            lambda call_id: DrainInstance(call_id, name, deadline_s, leave=True, now=now, last=last)
        )
        return Listing(data=listed(names))

    @draining.post("/instances/{name}/drain", status_code=HTTPStatus.ACCEPTED, responses=errors)
    async def drain(name: str, body: DrainBody | None = None) -> Listing[Instance]:
        """Let its requests go elsewhere; it stays, and takes no new ones."""
        deadline_s = (body or DrainBody()).deadline_s
        names = await launcher.order(lambda call_id: DrainInstance(call_id, name, deadline_s))
        return Listing(data=listed(names))

    @draining.delete("/instances/{name}/drain", responses=errors)
    async def stop_drain(name: str) -> Listing[Instance]:
        """Let a draining instance serve again."""
        names = await launcher.order(lambda call_id: StopDrain(call_id, name))
        return Listing(data=listed(names))

    api = APIRouter(prefix=PREFIX, tags=["kvmig"], responses=PROBLEMS)
    api.include_router(adding)
    api.include_router(restarting)
    api.include_router(draining)
    return api


# -- the JSON, typed for /openapi.json

Row = TypeVar("Row", bound=BaseModel)


def whole(value: Any) -> Any:
    """JSON has one kind of numbers: 3.0 is an integer as good as 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Listing(BaseModel, Generic[Row]):
    """Many rows, as OpenAI's API lists things."""

    object: Literal["list"] = "list"
    data: list[Row]


class ReachBody(BaseModel):
    """What a model can use of one prompt."""

    tokens: int = Field(description="Of a prompt and its answer.")
    longest: int = Field(description="Bytes of its tokenizer's longest token.")
    media: bool = Field(description="Whether it takes images, audio or video.")


class ModelBody(BaseModel):
    """The served model."""

    id: str
    reach: ReachBody | None = Field(description="null where it isn't known.")


class OfUnit(BaseModel):
    """What an instance has of the KV cache of its unit. Bytes."""

    lease_bytes: int = Field(description="What it has not given back.")
    used_bytes: int = Field(description="By requests that run.")
    wanted_bytes: int = Field(description="By all its requests, those that wait, too.")
    guarantee_bytes: int = Field(description="What it gets back whenever it wants it.")
    connected: bool = Field(description="Whether the unit's agent is there.")

    @classmethod
    def of(cls, shared: InUnit) -> OfUnit:
        """The same as JSON has it."""
        return cls(
            lease_bytes=shared.lease,
            used_bytes=shared.used,
            wanted_bytes=shared.wanted,
            guarantee_bytes=shared.guarantee,
            connected=shared.connected,
        )


class Instance(BaseModel):
    """An instance as last heard of. Sizes in KV blocks, counts in requests."""

    id: str
    index: int = Field(description="The label `engine` of vLLM's metrics; -1 until it has served.")
    state: str = Field(description="starting, serving, draining, silent, hung, failed or lost.")
    detail: str = Field(description="Why it is in this state; empty when it serves.")
    model: str
    endpoint: str
    blocks_total: int
    blocks_limit: int = Field(
        description="What blocks_total could be if those gave that it shares KV cache with."
    )
    blocks_used: int
    running: int
    waiting: int
    freeness: float | None = Field(
        description="Blocks by which each of its requests can grow; below 0 when overloaded, "
        "null when it is idle or draining (infinite)."
    )
    migrations_in: int = Field(description="Under way now.")
    migrations_out: int = Field(description="Under way now.")
    staging_used: int = Field(description="Staging buffers held by migrations out of it.")
    unmovable: str = Field(
        description="Why no request can be moved from it or to it; empty when they can."
    )
    weights: str = Field(description="Identity of its weights; a stream goes on under no others.")
    numerics: str = Field(description="Its numerics class: instances of one round alike.")
    vllm: str = Field(description="Folder of its vLLM; empty: the installed one.")
    unit: str = Field(description="Name of where it is in a placement; empty: nobody said.")
    pid: int = Field(description="Id of its process on its host; 0 while it isn't connected.")
    host: str = Field(description="Name of the host that it runs on.")
    gpus: list[str] = Field(description="Ids of the GPUs that it may use.")
    shared: OfUnit | None = Field(
        description="What it has of its unit (--unit); null: its KV cache is its own alone."
    )

    @classmethod
    def of(cls, row: InstanceRow, model: str) -> Instance:
        """The row as JSON has it."""
        freeness = row.freeness if math.isfinite(row.freeness) else None
        shared = None if row.shared is None else OfUnit.of(row.shared)
        told = {
            "model": model,
            "freeness": freeness,
            "vllm": row.tree,
            "shared": shared,
            "gpus": list(row.gpus),
        }
        return cls(**{**asdict(row), **told})


class Request(BaseModel):
    """A live request: one sequence of a call."""

    id: str
    call_id: str = Field(description="The call's x-request-id.")
    instance: str
    state: str = Field(description="running, waiting, suspended or submitted.")
    tokens: int = Field(description="Prompt and output tokens.")
    output_tokens: int
    blocks: int
    priority: int
    unmovable: str = Field(description="Why it can't be moved now; empty when it can.")
    age_ms: float = Field(
        description="How old this is: while an instance is in a long step, its last word counts."
    )
    migrating_to: str | None = Field(
        description="Where it is being moved to, if that was asked for here."
    )

    @classmethod
    def of(cls, row: RequestRow) -> Request:
        """The row as JSON has it."""
        return cls(**asdict(row))


class MigrationBody(BaseModel):
    """Move this request there."""

    model_config = ConfigDict(extra="forbid", strict=True)

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


class ChangeBody(BaseModel):
    """Change an instance while it serves."""

    model_config = ConfigDict(extra="forbid", strict=True)

    guarantee_bytes: Annotated[int, BeforeValidator(whole)] = Field(
        ge=0,
        le=MOST_BYTES,
        description="KV cache of its unit that it gets back whenever it wants it; 0: a fair part "
        "of what others weren't promised.",
    )


class AddBody(BaseModel):
    """Start so many instances more."""

    model_config = ConfigDict(extra="forbid", strict=True)

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


class DrainBody(BaseModel):
    """Let an instance's requests go elsewhere."""

    model_config = ConfigDict(extra="forbid", strict=True)

    deadline_s: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="What is still there then goes on elsewhere by recompute, or ends with an "
        "error where no other instance has its weights; null: --drain-deadline, and such requests "
        "stay until they end.",
    )


class RestartBody(BaseModel):
    """Start instances again, one after the other."""

    model_config = ConfigDict(extra="forbid", strict=True)

    instances: list[str] = Field(
        default=[], max_length=MOST, description="Their ids; none: all that serve."
    )
    deadline_s: float | None = Field(default=None, ge=0, description="Of each drain, as there.")
    vllm: str | None = Field(
        default=None,
        description="Folder of the vLLM that they are from then on, on the server's disk; empty: "
        "the installed one; null: each as it was.",
    )


class StageParts(BaseModel):
    """Parts of a stage's time, in milliseconds summed over its chunks, which may overlap."""

    wait: float
    gather: float
    push: float
    scatter: float


class Stage(BaseModel):
    """One live copy stage."""

    blocks: int
    bytes: int
    ms: float
    parts: StageParts


class DowntimeParts(BaseModel):
    """The pause in named parts, milliseconds, one after the other."""

    drain: float
    tail_copy: float
    commit: float
    first_token: float | None


class Migration(BaseModel):
    """Report of one migration."""

    id: str
    request_id: str
    source: str
    destination: str
    state: Literal["committed", "aborted"]
    reason: str = Field(description="One word; empty when it committed.")
    detail: str
    why: str = Field(description="What it was for: the scheduler's word, or by-hand.")
    exact: bool | None = Field(
        description="Whether both instances are of one numerics class, so that the move changed no "
        "token; null when the destination wasn't asked."
    )
    transport: str
    hit_blocks: int = Field(description="Found in the destination's prefix cache, not sent.")
    stages: list[Stage]
    fused_chunks: int = Field(
        description="Chunks that shared a transfer with those of other migrations."
    )
    tail_blocks: int
    output_tokens: int | None = Field(
        description="Tokens that the source put out; the next one is the destination's. "
        "null when the request was never suspended."
    )
    bytes: int
    total_ms: float
    downtime_ms: DowntimeParts | None = Field(
        description="null when the request was never suspended."
    )
    ended_at: float = Field(description="Unix time.")

    @classmethod
    def of(cls, report: MigrationReport) -> Migration:
        """The report as JSON has it."""
        return cls.model_validate(msgspec.to_builtins(report))
