"""What the gateway needs of the front side: how to read outputs, and where to put them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvmig.kvtransfer.messages import Message
from kvmig.kvtransfer.report import MigrationReport
from kvmig.kvtransfer.wire import Frame


class Item(Protocol):
    """What one step gave one request (vLLM: `EngineCoreOutput`, as it is)."""

    request_id: str
    """The id under which it was submitted; the front end puts its own in the place of a run's."""

    @property
    def new_token_ids(self) -> Sequence[int]:
        """Its new tokens, in order."""
        ...

    @property
    def finished(self) -> bool:
        """Whether these are its last."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """A decoded `Outputs` payload.

    items: one a span of the message, in the same order; meta: the engine's own
    (vLLM: statistics), handed through with the batch, never with a held item.
    """

    items: Sequence[Item]
    meta: object = None


class Decode(Protocol):
    """The adapter's decoder of `Outputs` payloads."""

    def __call__(self, payload: Sequence[memoryview]) -> Batch:
        """May keep views into `payload`."""
        ...


class Arithmetic(NamedTuple):
    """By what an instance computes: what a stream that has begun there goes on with."""

    weights: str = ""
    """Their identity; empty: nothing has been computed, or it isn't known by what."""
    numerics: str = ""
    """The class; empty: no matter which."""

    def goes_on(self, there: Arithmetic) -> bool:
        """Whether what has begun so may go on there."""
        return self.weights in ("", there.weights) and self.numerics in ("", there.numerics)


NOT_BEGUN = Arithmetic()


class Instances(Protocol):
    """What decides about requests needs to know of instances: see `kvmig.gateway.fleet.Fleet`."""

    @property
    def alive(self) -> list[str]:
        """Those that are connected."""
        ...

    def fit(self, instance: str) -> bool:
        """Whether requests had better be there than elsewhere."""
        ...

    def any_fit(self) -> bool:
        """Whether there is one that is fit."""
        ...

    def others_serve(self, instance: str, begun: Arithmetic = NOT_BEGUN) -> bool:
        """Whether another one that is fit takes requests, also those that have begun so."""
        ...

    def ailing(self) -> dict[str, str]:
        """Those that are connected and not fit: silent, hung or failed."""
        ...

    def send(self, instance: str, message: Message, payload: Sequence[Frame] = ()) -> None:
        """Queue a message, at once. Raises InstanceLost."""
        ...

    def dispatch(
        self,
        tokens: int,
        priority: int,
        message: Message,
        payload: Sequence[Frame],
        *,
        fit: bool = False,
        begun: Arithmetic = NOT_BEGUN,
    ) -> str:
        """Send a request of so many tokens somewhere. Raises NoInstance."""
        ...


class Sink(Protocol):
    """Where streams end: the front side. Called on the event loop; must not block."""

    def deliver(self, index: int, items: Sequence[Item], meta: object) -> None:
        """Tokens in their right order. `index`: the engine index of the instance they are from."""
        ...

    def fail(self, request_ids: Sequence[str], reason: str, retry: bool) -> None:
        """These requests get no more tokens; `reason` is a sentence for the client.

        retry: it may go well another time; otherwise the request is to blame.
        """
        ...


class Observer(Protocol):
    """Who counts what happened (see `kvmig.gateway.metrics`)."""

    def migrated(self, report: MigrationReport, priority: int | None) -> None:
        """A migration ended. priority: the request's, if it is one of this front end's."""
        ...

    def switched(self, gap_s: float | None) -> None:
        """A stream went over to a new owner; the gap is None when no token came before."""
        ...

    def began(self, priority: int, ttft_s: float) -> None:
        """A request's first token came, so long after the request."""
        ...

    def ended(self, priority: int, whole_s: float, decode_s: float, tokens: int) -> None:
        """A request's last token came, the `tokens`th, `decode_s` after the first."""
        ...

    def missing(self, instance: str, ailment: str) -> None:
        """An instance can't be relied on any more: it is silent, hung, failed or lost."""
        ...

    def ran_again(self, tokens: int) -> None:
        """A request runs on another instance; KV of so many tokens is to be computed again."""
        ...

    def poisoned(self) -> None:
        """A request was failed because instances crashed while they ran it."""
        ...

    def messages_refused(self, process: str, counts: Mapping[str, int]) -> None:
        """So many messages a process has refused since its start, by reason. Told often."""
        ...

    def unread(self) -> None:
        """A request was failed because its client didn't read."""
        ...


class Unobserved:
    """Counts nothing."""

    def migrated(self, report: MigrationReport, priority: int | None) -> None:
        """Not counted."""

    def switched(self, gap_s: float | None) -> None:
        """Not counted."""

    def began(self, priority: int, ttft_s: float) -> None:
        """Not counted."""

    def ended(self, priority: int, whole_s: float, decode_s: float, tokens: int) -> None:
        """Not counted."""

    def missing(self, instance: str, ailment: str) -> None:
        """Not counted."""

    def ran_again(self, tokens: int) -> None:
        """Not counted."""

    def poisoned(self) -> None:
        """Not counted."""

    def messages_refused(self, process: str, counts: Mapping[str, int]) -> None:
        """Not counted."""

    def unread(self) -> None:
        """Not counted."""
