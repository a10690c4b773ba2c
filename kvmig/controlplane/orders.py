"""Messages about the lives of instances: orders to the launcher, and what it tells others."""

from __future__ import annotations

from typing import Literal

from kvmig.ground.errors import KvmigError
from kvmig.kvtransfer.messages import Message

Refusal = Literal["", "unknown", "conflict", "invalid", "failed"]
"""Why an order isn't carried out: no such instance, not in its present state, bad values; or
the launcher failed at it."""


class OrderRefused(KvmigError):
    """An order can't be carried out, and nothing was changed; one sentence says why."""

    def __init__(self, refusal: Refusal, sentence: str) -> None:
        super().__init__(sentence)
        self.refusal = refusal


class AddInstances(Message, frozen=True, tag=True):
    """Front end to the launcher: start so many more, with these flags of vLLM's besides."""

    call_id: int
    count: int = 1
    flags: str = ""


class DrainInstance(Message, frozen=True, tag=True):
    """Front end to the launcher: let its requests go elsewhere.

    deadline_s: after so long by recompute, or with an error where no other instance has the
    request's weights; None: the launcher's --drain-deadline, and no such error.
    leave: end it when it is empty. now: end it at once.
    """

    call_id: int
    instance: str
    deadline_s: float | None = None
    leave: bool = False
    now: bool = False


class StopDrain(Message, frozen=True, tag=True):
    """Front end to the launcher: let it serve again."""

    call_id: int
    instance: str


class RestartInstances(Message, frozen=True, tag=True):
    """Front end to the launcher: start these again, one after the other, each once it is drained.

    instances: none: all that serve. deadline_s: as in DrainInstance, of each.
    """

    call_id: int
    instances: tuple[str, ...] = ()
    deadline_s: float | None = None


class OrderDone(Message, frozen=True, tag=True):
    """Launcher to the front end: the order is being carried out on these, or why not."""

    call_id: int
    instances: tuple[str, ...] = ()
    refused: Refusal = ""
    error: str = ""


class Evacuate(Message, frozen=True, tag=True):
    """Launcher to front ends: run what is still on this instance again elsewhere."""

    instance: str
    ends: bool = False
    """What could go on nowhere, for nobody else has its weights, ends with an error."""


class SetState(Message, frozen=True, tag=True):
    """Launcher to a llumlet: this is your state from now on; tell it in your reports."""

    state: Literal["serving", "draining"]


class Scale(Message, frozen=True, tag=True):
    """Scheduler to the launcher: start so many instances more, or end this one by a drain."""

    add: int = 0
    drain: str = ""


LifecycleMessage = (
    AddInstances
    | DrainInstance
    | StopDrain
    | RestartInstances
    | OrderDone
    | Evacuate
    | SetState
    | Scale
)
