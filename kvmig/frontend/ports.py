"""Ports of the gateway: outputs, the sink of streams, instances, and an observer that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvmig.controlplane.front_messages import FrontAsked, FrontReply
from kvmig.controlplane.messages import Submit
from kvmig.core.errors import Failure
from kvmig.engines.base import Frames
from kvmig.engines.client_request import PromptMarks
from kvmig.kvtransfer.report import MigrationReport
from kvmig.rpc.messages import RpcMessage


class OtherFronts(Protocol):
    """The other front ends of this server: `kvmig.frontend.launcher_link.LauncherLink`."""

    async def ask_fronts(
        self, asked: FrontAsked, front: str = "", timeout_s: float = 2.0
    ) -> Mapping[str, FrontReply]:
        """The replies, by front end, of those that give one in time. front: only this one. Raises
        LauncherGone."""
        ...


class OutputItem(Protocol):
    """Tokens of one request from one step (vLLM: `EngineCoreOutput`, as it is)."""

    request_id: str
    """The run's id, as submitted; the front end puts the request's own in its place."""

    @property
    def new_token_ids(self) -> Sequence[int]:
        """The new tokens, in order."""
        ...

    @property
    def finished(self) -> bool:
        """Whether these are the request's last tokens."""
        ...


@dataclass(frozen=True, slots=True)
class OutputBatch:
    """A decoded `Outputs` payload.

    items: one a span of the message, in the same order; meta: the engine's own
    (vLLM: statistics), handed through with the batch, never with a held item.
    """

    items: Sequence[OutputItem]
    meta: object = None
    cached: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens that the prefix cache had, for runs whose first tokens these are."""
    queued: Mapping[str, float] = field(default_factory=dict)
    """Seconds in the instance's queue, for the same runs, where the engine measures them."""


class OutputDecoder(Protocol):
    """The adapter's decoder of `Outputs` payloads."""

    def __call__(self, payload: Sequence[memoryview]) -> OutputBatch:
        """May keep views into `payload`."""
        ...


class OutputSink(Protocol):
    """End of all streams: the engine's front half. Called on the event loop; must not block."""

    def deliver(self, index: int, items: Sequence[OutputItem], meta: object) -> None:
        """Tokens in their right order. index: the engine index of the instance they are from."""
        ...

    def finish(self, request_ids: Sequence[str]) -> None:
        """End requests after the tokens that were delivered, for their length."""
        ...

    def fail(self, request_ids: Sequence[str], reason: str, kind: Failure) -> None:
        """End requests that get no more tokens; `reason` is the error message for the client."""
        ...


class EngineArithmetic(NamedTuple):
    """Weights and numerics of an instance: a stream that has begun there goes on with the same."""

    weights: str = ""
    """Identity of the weights; empty: nothing has been computed, or it isn't known."""
    numerics: str = ""
    """The numerics class; empty: no matter which."""

    def can_continue_on(self, there: EngineArithmetic) -> bool:
        """Whether a stream that has begun so may go on there."""
        return self.weights in ("", there.weights) and self.numerics in ("", there.numerics)


NOT_BEGUN = EngineArithmetic()


class DispatchOrder(NamedTuple):
    """A run of a request, for the instance that the policy picks."""

    tokens: int
    """Tokens of the prompt and of what was answered so far."""
    priority: int
    submit: Submit
    payload: Frames
    fit: bool = False
    """Whether only a healthy instance will do."""
    begun: EngineArithmetic = NOT_BEGUN
    """Weights and numerics that computed its tokens so far."""
    marks: PromptMarks | None = None
    """Computes the marks of its prompt (`kvmig.core.prefix_marks`); None: it has none."""
    session: int | None = None
    """What stands for its session (`kvmig.asgi.session_id`); None: it names none."""
    payer: str = ""
    """The account whose session that is; empty: it is unknown."""


class InstancePort(Protocol):
    """The part of `kvmig.frontend.instances.InstancePool`, described there, that decisions need."""

    @property
    def alive(self) -> list[str]: ...
    def is_healthy(self, instance: str) -> bool: ...
    def any_healthy(self) -> bool: ...
    def others_serve(self, instance: str, begun: EngineArithmetic = NOT_BEGUN) -> bool: ...
    def unhealthy_instances(self) -> dict[str, str]: ...
    def index(self, instance: str) -> int: ...
    def arithmetic(self, instance: str) -> EngineArithmetic: ...
    def send(self, instance: str, message: RpcMessage, payload: Frames = ()) -> None: ...
    def dispatch(self, order: DispatchOrder) -> str: ...
    def note_prompt(self, tokens: int, seconds: float) -> None: ...


class RouterObserver:
    """An observer that counts nothing; `kvmig.frontend.metrics.FrontendMetrics` counts."""

    def migrated(self, report: MigrationReport, priority: int | None) -> None:
        """A migration ended. priority: the request's, if it is one of this front end's."""

    def switched(self, gap_s: float | None) -> None:
        """A stream went over to a new owner; the gap is None when no token came before."""

    def began(self, priority: int, ttft_s: float) -> None:
        """A request's first token came, `ttft_s` after the request."""

    def ended(self, priority: int, whole_s: float, decode_s: float, tokens: int) -> None:
        """A request's last token came, the `tokens`th, `decode_s` after the first."""

    def missing(self, instance: str, ailment: str) -> None:
        """An instance became silent, hung, failed or lost."""

    def ran_again(self, tokens: int) -> None:
        """A request runs again on another instance, where `tokens` tokens are to be recomputed."""

    def poisoned(self) -> None:
        """A request was failed because instances crashed or hung while they ran it."""

    def messages_refused(self, process: str, counts: Mapping[str, int]) -> None:
        """Messages that a process has refused since its start, by reason. Reported often."""

    def gone(self, instance: str) -> None:
        """An instance is there no more, or another one of its name will be."""

    def unread(self) -> None:
        """A request was failed because its client didn't read."""
