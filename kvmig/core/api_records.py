"""Records of the admin API: a front end writes them, the fleet's server and a placement read them.

One struct is the row in a front end, its JSON and its schema in /openapi.json
(`kvmig.frontend.struct_answers`). A field without a default must be in an answer for its readers;
every other one may miss in the answer of an older deployment.
"""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvmig.core.start_times import StartTimes

Row = TypeVar("Row")


class RowListing(msgspec.Struct, Generic[Row], frozen=True, kw_only=True):
    """Many rows, as OpenAI's API lists things."""

    object: Literal["list"] = "list"
    data: list[Row]


class UnitMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance has of the KV cache of its unit. Bytes."""

    lease_bytes: Annotated[int, Meta(description="What it has not given back.")] = 0
    used_bytes: Annotated[int, Meta(description="By requests that run.")]
    wanted_bytes: Annotated[int, Meta(description="By all its requests, those that wait, too.")] = 0
    guarantee_bytes: Annotated[int, Meta(description="What it gets back whenever it wants it.")]
    connected: Annotated[bool, Meta(description="Whether the unit's agent is there.")] = False
    decode_share: Annotated[
        int,
        Meta(
            description="Percent of the device for its steps with decodes only; 0: steps don't ask"
            " (--unit-shares)."
        ),
    ] = 0


class InstanceRow(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as last reported. Sizes in KV blocks, counts in requests."""

    id: str
    index: Annotated[
        int, Meta(description="The label `engine` of vLLM's metrics; -1 until it has served.")
    ] = -1
    state: Annotated[
        str, Meta(description="starting, serving, draining, silent, hung, failed or lost.")
    ]
    detail: Annotated[
        str,
        Meta(
            description="Why it is in this state; empty when it serves and is not to start again."
        ),
    ] = ""
    model: str = ""
    endpoint: str = ""
    blocks_total: int = 0
    blocks_limit: Annotated[
        int,
        Meta(description="What blocks_total could be if those gave that it shares KV cache with."),
    ] = 0
    blocks_used: int = 0
    running: int = 0
    waiting: int = 0
    unread: Annotated[
        int,
        Meta(
            description="Ended requests whose KV blocks a KV connector still keeps for another "
            "engine that is to read them."
        ),
    ] = 0
    seats: Annotated[
        int, Meta(description="Requests that run at once; 0: as many as there are blocks for.")
    ] = 0
    freeness: Annotated[
        float | None,
        Meta(
            description="Blocks by which each of its requests can grow; below 0 when overloaded, "
            "null when it is idle or draining (infinite)."
        ),
    ] = None
    migrations_in: Annotated[int, Meta(description="Under way now.")] = 0
    migrations_out: Annotated[int, Meta(description="Under way now.")] = 0
    staging_used: Annotated[
        int, Meta(description="Staging buffers held by migrations out of it.")
    ] = 0
    unmovable: Annotated[
        str,
        Meta(description="Why no request can be moved from it or to it; empty when they can."),
    ] = ""
    weights: Annotated[
        str,
        Meta(description="Identity of its weights; a stream goes on under no others."),
    ] = ""
    numerics: Annotated[
        str, Meta(description="Its numerics class: instances of one round alike.")
    ] = ""
    vllm: Annotated[str, Meta(description="Folder of its vLLM; empty: the installed one.")] = ""
    unit: Annotated[str, Meta(description="Name of its unit in a placement; empty: not known.")] = (
        ""
    )
    flags: Annotated[
        str, Meta(description="Flags of the engine that it has besides those of all.")
    ] = ""
    pid: Annotated[
        int, Meta(description="Id of its process on its host; 0 while it isn't connected.")
    ] = 0
    host: Annotated[str, Meta(description="Name of the host that it runs on.")] = ""
    node: Annotated[
        str, Meta(description="Id of the Ray node that it was ordered to; empty: to none.")
    ] = ""
    server: Annotated[
        str, Meta(description="The server that it is of (KVMIG_JOIN); empty: this one.")
    ] = ""
    gpus: Annotated[tuple[str, ...], Meta(description="Ids of the GPUs that it may use.")] = ()
    block_bytes: Annotated[
        int, Meta(description="Bytes of a KV block; 0 while it isn't connected.")
    ] = 0
    beside_kv: Annotated[
        int,
        Meta(
            description="Most bytes of the host's memory that it has taken apart from its KV cache;"
            " 0: not known."
        ),
    ] = 0
    times: Annotated[
        StartTimes | None,
        Meta(description="How long the parts of its start took; null while it isn't connected."),
    ] = None
    shared: Annotated[
        UnitMemory | None,
        Meta(description="What it has of its unit (--unit); null: its KV cache is its own alone."),
    ] = None


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A live request: one sequence of a call."""

    id: str
    call_id: Annotated[str, Meta(description="The call's x-request-id.")] = ""
    instance: str
    state: Annotated[str, Meta(description="running, waiting, suspended or submitted.")]
    tokens: Annotated[int, Meta(description="Prompt and output tokens.")] = 0
    output_tokens: int = 0
    blocks: int
    priority: int = 0
    unmovable: Annotated[str, Meta(description="Why it can't be moved now; empty when it can.")] = (
        ""
    )
    age_ms: Annotated[
        float,
        Meta(
            description="How old this is: while an instance is in a long step, "
            "its last word counts."
        ),
    ] = 0.0
    migrating_to: Annotated[
        str | None, Meta(description="Where it is being moved to, if that was asked for here.")
    ] = None


DrainState = Literal["serving", "draining", "drained"]
"""The state of a whole server."""
DRAIN_ENDED = "it is empty"
"""Begin of an instance's detail once its drain has ended: its requests have gone, and its idle
sessions, as far as they could."""


class DrainingInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance of this server that drains."""

    id: str
    detail: Annotated[str, Meta(description="The reason of this state.")] = ""
    requests: Annotated[int, Meta(description="Requests that are left on it.")]
    unread: Annotated[
        int, Meta(description="Ended requests whose KV blocks another engine is still to read.")
    ] = 0
    migrations_out: Annotated[int, Meta(description="Under way now.")] = 0


class StayingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can't leave a draining instance now."""

    id: str
    call_id: Annotated[str, Meta(description="The call's x-request-id.")] = ""
    instance: str
    why: Annotated[str, Meta(description="The reason why it is still there.")]


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """The drains of this server."""

    state: Annotated[
        DrainState,
        Meta(
            description="serving: an instance of this server takes requests; draining: none does, "
            "and requests, or idle sessions on their way, are left; drained: nothing of any "
            "client is on its instances, and all their drains have ended."
        ),
    ]
    instances: Annotated[list[DrainingInstance], Meta(description="Instances that drain.")]
    blocked: Annotated[
        list[StayingRequest], Meta(description="Requests that can't leave now, and why.")
    ]


class ReachBody(msgspec.Struct, frozen=True):
    """What a model can use of one prompt."""

    tokens: Annotated[int, Meta(description="Of a prompt and its answer.")]
    longest: Annotated[int, Meta(description="Bytes of its tokenizer's longest token.")]
    media: Annotated[bool, Meta(description="Whether it takes images, audio or video.")]


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """The served model."""

    id: str = ""
    reach: Annotated[ReachBody | None, Meta(description="null where it isn't known.")] = None
