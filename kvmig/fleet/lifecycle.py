"""One model's life, from zero and back: what is to be done, from what is seen. Pure.

    zero -wanted-> starting -ready-> serving -idle-> emptying -empty-> stopping -ended-> zero
      '-no room-> waiting  |            ^---wanted------'  |
                  -room-^  '--failed--> failed -retry->    '-empty-> parking -parked-> parked

A deployment that hangs (it no longer reports) is killed in any state, counts as failed with that
reason, and starts again when it is wanted.

A parked deployment has given the memory of its KV cache back. One that is wanted wakes, given room;
one whose room is wanted ends; one that won't be parked ends, and one that won't wake is killed.

An order of a server that was killed since may still be carried out, or refused. So what is seen
goes before what was ordered: nothing that serves is ordered to wake, nothing that is parked is
ordered to be parked, and a refusal ends nothing that is where it should be.

The server calls `reconcile` again and again for each model with what it sees then, so that a server
which has just been started goes on where another one was.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

State = Literal[
    "zero", "waiting", "starting", "serving", "emptying", "parking", "parked", "waking", "stopping",
    "failed",
]  # fmt: skip
Action = Literal["start", "stop", "kill", "park", "unpark"]

FIRST_RETRY_S = 10.0
LAST_RETRY_S = 300.0
STABLE_S = 60.0
"""A deployment that dies sooner after it was ready, for the second time, has failed."""
REST_S = 60.0
"""Time for a deployment to be parked, or to wake."""
HANG_S = 30.0
"""A deployment that should serve and says nothing of itself for this time hangs, and is killed."""
LET_END_S = 5.0
"""Time for requests to end that have come while their model was about to make room."""
END_S = 60.0
"""Time for a deployment to end, beyond its requests' own time; then it is killed."""


class DesiredState(Struct, frozen=True):
    """What the catalogue says of the model."""

    on: bool = True
    least: int = 0
    """Instances at least; 0: none while no request wants it."""
    zero_after_s: float = 300.0
    start_timeout_s: float = 600.0
    shutdown_timeout_s: float = 30.0
    parks: bool = False
    """Whether it is parked where it would end."""
    overdue: bool = False
    """Whether its requests have had their time: those that are left end with it."""


class ObservedState(Struct, frozen=True):
    """What is seen of it now."""

    deployment: bool = False
    """Whether a process is there, or ordered."""
    ready: bool = False
    """Whether it serves."""
    ended: str = ""
    """How its process ended since the last turn; empty: it didn't."""
    tells: bool = False
    """Whether it reports its instances, though none may serve."""
    parked: bool = False
    """Whether it has given the memory of its KV cache back; then it doesn't serve."""
    refused: str = ""
    """Why it was not parked, or did not wake; empty: it has not refused."""
    clean: bool = False
    """Whether it ended by order."""
    wanted: bool = False
    """Whether a request waits for it, or a person has ordered it to wake."""
    running: int = 0
    """Requests that proxies relay to it now."""
    idle_s: float = 0.0
    """Seconds since the last request ended; 0 while there is one."""
    unrouted: bool = False
    """Whether every proxy has confirmed that it sends nothing to it any more."""
    no_room: str = ""
    """Why it can't start now; empty: it can."""
    never: str = ""
    """Why it can't start at all."""
    yields: bool = False
    """Whether it is to end, if it is idle, for one that waits for room."""
    no_park: str = ""
    """Why it can't be parked now; empty: it can."""


class ModelStatus(Struct, frozen=True):
    """A model's state, and since when it is in it."""

    state: State = "zero"
    since: float = 0.0
    failures: int = 0
    """Failures in a row."""
    retry_at: float = 0.0
    why: str = ""
    """Why it failed, or waits; empty otherwise."""
    lost_at: float | None = None
    """Time since which it should serve, or be parked, but isn't; None: all is well."""
    there_since: float = 0.0
    """When it was ordered, or began to serve; one that was about to end and serves on has never
    left."""
    adopted: bool = False
    """Whether a server before this one has started it, and this one hasn't seen it serve yet."""

    @property
    def routed(self) -> bool:
        """Whether proxies may send requests to its deployment, once that is ready."""
        return self.state in ("starting", "serving")


def reconcile(
    life: ModelStatus, wish: DesiredState, seen: ObservedState, now: float
) -> tuple[ModelStatus, Action | None]:
    """The next step, and what is to be done for it. now: seconds of any steady clock."""
    if life.state in ("serving", "emptying", "parked") and seen.deployment and not seen.ended:
        life = _listened(life, seen, now)
        if why := _hangs(life, wish, seen, now):
            return replace(_to(life, "stopping", now), why=why), "kill"
    match life.state:
        case "zero" | "waiting" | "failed":
            return _down(life, wish, seen, now)
        case "starting":
            return _starting(life, wish, seen, now)
        case "serving":
            return _serving(life, wish, seen, now)
        case "emptying":
            return _emptying(life, wish, seen, now)
        case "parking" | "parked" | "waking":
            return _resting(life, wish, seen, now)
        case "stopping":
            return _stopping(life, wish, seen, now)


def _listened(life: ModelStatus, seen: ObservedState, now: float) -> ModelStatus:
    """The status with the time since which it should serve, or be parked, and does not."""
    if seen.parked or seen.ready:
        return replace(life, lost_at=None)
    return life if life.lost_at is not None else replace(life, lost_at=now)


def _hangs(life: ModelStatus, wish: DesiredState, seen: ObservedState, now: float) -> str:
    """Why it is given up; empty: it is not. One whose instances start by its own report gets the
    time of a start."""
    if life.lost_at is None:
        return ""
    if seen.tells:
        late = now - life.lost_at > wish.start_timeout_s
        return f"none of its instances served for {wish.start_timeout_s:g} s" if late else ""
    late = now - life.lost_at > HANG_S
    return f"it said nothing for {HANG_S:g} s and was killed" if late else ""


def _up(seen: ObservedState) -> State:
    if seen.parked:
        return "parked"
    return "serving" if seen.ready else "starting"


def _to(life: ModelStatus, state: State, now: float) -> ModelStatus:
    lost_at = life.lost_at if state == "stopping" else None
    stays = state == "emptying" or (life.state, state) == ("emptying", "serving")
    there = life.there_since if stays else now if state in ("starting", "serving") else 0.0
    return replace(life, state=state, since=now, lost_at=lost_at, there_since=there)


def wants_to_start(life: ModelStatus, wish: DesiredState, seen: ObservedState, now: float) -> bool:
    """Whether it would start now, given room."""
    down = life.state in ("zero", "waiting", "failed") and not seen.deployment
    asleep = life.state == "parked" and seen.deployment
    return (down or asleep) and _wanted(wish, seen) and now >= life.retry_at


def _wanted(wish: DesiredState, seen: ObservedState) -> bool:
    return wish.on and (seen.wanted or wish.least > 0)


def _down(
    life: ModelStatus, wish: DesiredState, seen: ObservedState, now: float
) -> tuple[ModelStatus, Action | None]:
    if seen.deployment:  # of a server before this one
        state = _up(seen) if wish.on else "emptying"
        return replace(_to(life, state, now), adopted=state == "starting"), None
    if life.state == "failed" and not wish.on:
        return ModelStatus(since=now), None
    if not wants_to_start(life, wish, seen, now):
        gave_up = life.state == "waiting"
        return (replace(_to(life, "zero", now), why="") if gave_up else life), None
    if seen.never:
        return _failed(life, seen.never, now), None
    if seen.no_room:
        waits = life if life.state == "waiting" else _to(life, "waiting", now)
        return replace(waits, why=seen.no_room), None
    why = "" if life.state == "waiting" else life.why
    return replace(_to(life, "starting", now), why=why), "start"


def _starting(
    life: ModelStatus, wish: DesiredState, seen: ObservedState, now: float
) -> tuple[ModelStatus, Action | None]:
    if seen.clean:  # by a server before this one
        return ModelStatus(since=now), None
    if seen.ended or not seen.deployment:
        if life.adopted:  # it may have served for long
            return ModelStatus(since=now, failures=1), None
        return _failed(life, seen.ended or "it has ended", now), None
    if not wish.on:
        return _to(life, "emptying", now), None
    if seen.ready or seen.parked:  # parked: by a server before this one
        return replace(_to(life, _up(seen), now), why="", adopted=False), None
    if now - life.since > wish.start_timeout_s:
        why = f"it was not ready within {wish.start_timeout_s:g} s"
        return replace(_to(life, "stopping", now), why=why), "kill"
    return life, None


def _serving(
    life: ModelStatus, wish: DesiredState, seen: ObservedState, now: float
) -> tuple[ModelStatus, Action | None]:
    if seen.clean:
        return ModelStatus(since=now), None
    if seen.ended or not seen.deployment:
        soon = now - life.since < STABLE_S
        if soon and life.failures:
            return _failed(life, seen.ended or "it has ended", now), None
        # It starts again, if it is wanted.
        return ModelStatus(since=now, failures=int(soon), why=seen.ended), None
    if seen.parked:  # by a server before this one
        return _to(life, "waking", now), "unpark"
    idle = seen.idle_s >= wish.zero_after_s or (seen.yields and not seen.running)
    if not wish.on or (idle and not _wanted(wish, seen)):
        return _to(life, "emptying", now), None
    stable = seen.ready and now - life.since >= STABLE_S
    return (replace(life, failures=0) if stable else life), None


def _emptying(
    life: ModelStatus, wish: DesiredState, seen: ObservedState, now: float
) -> tuple[ModelStatus, Action | None]:
    if seen.ended or not seen.deployment:
        return ModelStatus(since=now), None
    # Who waits for its room was there before those who want it now. Proxies learn a moment later
    # that it empties: what they have sent it until then ends first, unless that takes long.
    lasts = seen.running > 0 and now - life.since >= LET_END_S
    if _wanted(wish, seen) and (not seen.yields or lasts or wish.least > 0):
        return _to(life, _up(seen), now), None
    if not seen.unrouted or (seen.running and not wish.overdue):
        return life, None
    if wish.parks and wish.on and not seen.yields:
        if seen.parked:  # by a server before this one
            return _to(life, "parked", now), None
        if seen.ready and not seen.no_park:
            return _to(life, "parking", now), "park"
    return _to(life, "stopping", now), "stop"


def _resting(
    life: ModelStatus, wish: DesiredState, seen: ObservedState, now: float
) -> tuple[ModelStatus, Action | None]:
    """Take the next step of a model that parks, is parked, or wakes."""
    if seen.ended or not seen.deployment:
        return ModelStatus(since=now), None
    if life.state == "parking" and seen.parked:
        return _to(life, "parked", now), None
    if life.state in ("parked", "waking") and seen.ready:  # parked: a server before woke it
        return _to(replace(life, why=""), "serving", now), None
    if life.state == "parked":
        if seen.yields or not wish.on or not wish.parks:
            return _to(replace(life, why=""), "emptying", now), None
        if wants_to_start(life, wish, seen, now) and not seen.no_room and seen.parked:
            return _to(replace(life, why=""), "waking", now), "unpark"
        return replace(life, why=seen.no_room), None
    if seen.refused or now - life.since > REST_S:
        how: Action = "stop" if life.state == "parking" else "kill"
        return _to(life, "stopping", now), how
    return life, None


def _stopping(
    life: ModelStatus, wish: DesiredState, seen: ObservedState, now: float
) -> tuple[ModelStatus, Action | None]:
    if seen.ended or not seen.deployment:
        if not life.why:
            return ModelStatus(since=now), None
        failed = _failed(life, life.why, now)
        first_hang = life.lost_at is not None and not life.failures
        return (awake(failed, now) if first_hang else failed), None
    late = now - life.since > wish.shutdown_timeout_s + END_S
    return (replace(life, since=now), "kill") if late else (life, None)


def _failed(life: ModelStatus, why: str, now: float) -> ModelStatus:
    failures = life.failures + 1
    pause_s = min(FIRST_RETRY_S * 2 ** (failures - 1), LAST_RETRY_S)
    return ModelStatus("failed", now, failures, now + pause_s, why)


def awake(life: ModelStatus, now: float) -> ModelStatus:
    """The same, to be tried again at once."""
    return replace(life, retry_at=now)
