"""One model's life, from zero and back: what is to be done, from what is seen. Pure.

    zero -wanted-> starting -ready-> serving -idle-> emptying -empty-> stopping -ended-> zero
                      |                 ^---wanted------'
                      '--failed--> failed -retry-> starting

The server calls `turn` again and again for each model with what it sees then, so that a server
which has just been started goes on where another one was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

State = Literal["zero", "starting", "serving", "emptying", "stopping", "failed"]
Action = Literal["start", "stop", "kill"]

FIRST_RETRY_S = 10.0
LAST_RETRY_S = 300.0
STABLE_S = 60.0
"""A deployment that dies sooner after it was ready, for the second time, has failed."""
END_S = 60.0
"""For a deployment to end that was told to, beyond its requests' own time; then it is killed."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the catalogue says of the model."""

    on: bool = True
    least: int = 0
    """Instances at least; 0: none while nobody wants it."""
    zero_after_s: float = 300.0
    start_timeout_s: float = 600.0
    shutdown_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What is seen of it now."""

    deployment: bool = False
    """Whether a process is there, or ordered."""
    ready: bool = False
    """Whether it serves."""
    ended: str = ""
    """How its process ended since the last turn; empty: it didn't."""
    clean: bool = False
    """Whether it ended because it was told to."""
    wanted: bool = False
    """Whether a request waits for it, or somebody has asked to wake it."""
    running: int = 0
    """Requests that proxies relay to it now."""
    idle_s: float = 0.0
    """Since the last request ended; 0 while there is one."""
    unrouted: bool = False
    """Whether every proxy has said that it sends nothing to it any more."""


@dataclass(frozen=True, slots=True)
class Life:
    """Where it stands."""

    state: State = "zero"
    since: float = 0.0
    failures: int = 0
    """In a row."""
    retry_at: float = 0.0
    why: str = ""
    """Why it failed; empty otherwise."""

    @property
    def routed(self) -> bool:
        """Whether proxies may send requests to its deployment, once that is ready."""
        return self.state in ("starting", "serving")


def turn(life: Life, wish: Wish, seen: Seen, now: float) -> tuple[Life, Action | None]:
    """The next step, and what is to be done for it. now: seconds of any steady clock."""
    wanted = wish.on and (seen.wanted or wish.least > 0)
    match life.state:
        case "zero" | "failed":
            return _down(life, wish, seen, wanted, now)
        case "starting":
            return _starting(life, wish, seen, now)
        case "serving":
            return _serving(life, wish, seen, wanted, now)
        case "emptying":
            return _emptying(life, wish, seen, now)
        case "stopping":
            return _stopping(life, wish, seen, now)


def _up(seen: Seen) -> State:
    return "serving" if seen.ready else "starting"


def _to(life: Life, state: State, now: float) -> Life:
    return replace(life, state=state, since=now)


def _down(
    life: Life, wish: Wish, seen: Seen, wanted: bool, now: float
) -> tuple[Life, Action | None]:
    if seen.deployment:  # of a server before this one
        return _to(life, _up(seen) if wish.on else "emptying", now), None
    if life.state == "failed" and not wish.on:
        return Life(since=now), None
    if wanted and now >= life.retry_at:
        return _to(life, "starting", now), "start"
    return life, None


def _starting(life: Life, wish: Wish, seen: Seen, now: float) -> tuple[Life, Action | None]:
    if seen.clean:  # by a server before this one
        return Life(since=now), None
    if seen.ended or not seen.deployment:
        return _failed(life, seen.ended or "it has ended", now), None
    if not wish.on:
        return _to(life, "emptying", now), None
    if seen.ready:
        return replace(_to(life, "serving", now), why=""), None
    if now - life.since > wish.start_timeout_s:
        why = f"it was not ready within {wish.start_timeout_s:g} s"
        return replace(_to(life, "stopping", now), why=why), "kill"
    return life, None


def _serving(
    life: Life, wish: Wish, seen: Seen, wanted: bool, now: float
) -> tuple[Life, Action | None]:
    if seen.clean:
        return Life(since=now), None
    if seen.ended or not seen.deployment:
        soon = now - life.since < STABLE_S
        if soon and life.failures:
            return _failed(life, seen.ended or "it has ended", now), None
        return Life(since=now, failures=int(soon)), None  # it starts again, if it is wanted
    if not wish.on or (not wanted and seen.idle_s >= wish.zero_after_s):
        return _to(life, "emptying", now), None
    return replace(life, failures=0) if now - life.since >= STABLE_S else life, None


def _emptying(life: Life, wish: Wish, seen: Seen, now: float) -> tuple[Life, Action | None]:
    if seen.ended or not seen.deployment:
        return Life(since=now), None
    if wish.on and (seen.wanted or wish.least > 0):
        return _to(life, _up(seen), now), None
    if seen.unrouted and not seen.running:
        return _to(life, "stopping", now), "stop"
    return life, None


def _stopping(life: Life, wish: Wish, seen: Seen, now: float) -> tuple[Life, Action | None]:
    if seen.ended or not seen.deployment:
        return (_failed(life, life.why, now) if life.why else Life(since=now)), None
    late = now - life.since > wish.shutdown_timeout_s + END_S
    return (replace(life, since=now), "kill") if late else (life, None)


def _failed(life: Life, why: str, now: float) -> Life:
    failures = life.failures + 1
    pause_s = min(FIRST_RETRY_S * 2 ** (failures - 1), LAST_RETRY_S)
    return Life("failed", now, failures, now + pause_s, why)


def awake(life: Life, now: float) -> Life:
    """The same, to be tried again at once."""
    return replace(life, retry_at=now)
