"""Every order of events in the life of a fleet's model: `kvmig.fleet.lifecycle` with one proxy.

The server sees what the proxy said last and tells it routes, both late; requests come, processes
get ready, fail, crash, hang and end, people switch the model off and on, the server is killed and
another takes over, the proxy is killed and comes back; room for it comes and goes, and others want
its own. Time stands still but for one event, after which everything is late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvmig.fleet.lifecycle import DesiredState, ModelStatus, ObservedState, reconcile
from kvmig_tools.check.explore import all_kept

FAILURES = 4
ORDERS = 2
"""Orders on their way to a deployment at once."""
LATE_S = 1e6
WISHES = {
    (on, parks): DesiredState(on=on, parks=parks) for on in (True, False) for parks in (True, False)
}


class World(Struct, frozen=True):
    """All that counts of one model. Times are relative to now."""

    most: int = 1
    """Requests that run, and that wait."""
    parks: bool = False
    """Whether it is parked where it would end."""
    life: ModelStatus = ModelStatus()
    on: bool = True
    process: bool = False
    ready: bool = False
    parked: bool = False
    orders: tuple[str, ...] = ()
    """park and unpark, on their way to the deployment; all but the newest are of servers that were
    killed."""
    refused: bool = False
    """Whether that was refused; the server has heard it."""
    stopping: bool = False
    hung: bool = False
    """Whether its process lives and does nothing any more, for good."""
    ended: str = ""
    """How its process ended; the server hasn't seen it yet."""
    idle: bool = False
    """Whether nothing was asked for long."""
    asked: bool = False
    """Whether the server has heard that it is wanted."""
    told: bool = False
    """What the server told proxies last: whether it is ready."""
    scarce: bool = False
    """Whether it has no room to start; or, once it is there, another one waits for its room."""
    # the proxy
    up: bool = True
    routed: bool = False
    news: tuple[bool, ...] = ()
    """Routes on their way to it."""
    held: int = 0
    running: int = 0
    # what the server knows of it
    said_held: int = 0
    said_running: int = 0
    said_unrouted: bool = False


class Broken(Exception):
    """An invariant is."""


def require(holds: bool, what: str) -> None:
    """Raises Broken."""
    if not holds:
        raise Broken(what)


# -- what may happen. Each gives the world after it; None: it can't happen now


def arrives(now: World) -> World | None:
    """A request comes to the proxy."""
    if not now.up or now.held >= now.most or now.running >= now.most:
        return None
    busy = replace(now, idle=False)
    if not now.routed or not now.process:
        return replace(busy, held=now.held + 1)
    require(not now.stopping, "a request is sent to a deployment that stops")
    return replace(busy, running=now.running + 1)


def wants(now: World) -> World | None:
    """The proxy says that a request waits."""
    return replace(now, asked=True) if now.up and now.held and not now.asked else None


def hears(now: World) -> World | None:
    """The proxy hears the next route; who waits goes on if it is ready."""
    if not now.up or not now.news:
        return None
    routed, *rest = now.news
    heard = replace(now, routed=routed, news=tuple(rest))
    if routed and now.held and now.process:
        require(not now.stopping, "who waits is sent to a deployment that stops")
        running = min(now.most, now.running + now.held)
        return replace(heard, running=running, held=0)
    return heard


def says(now: World) -> World | None:
    """The proxy tells the server what it does."""
    if not now.up:
        return None
    unrouted = not now.news and not now.routed
    return replace(now, said_held=now.held, said_running=now.running, said_unrouted=unrouted)


def finishes(now: World) -> World | None:
    """A request ends."""
    if not now.running or not now.process or now.hung:
        return None
    return replace(now, running=now.running - 1)


def gets_ready(now: World) -> World | None:
    """The deployment serves."""
    if not now.process or now.ready or now.stopping or now.hung:
        return None
    return replace(now, ready=True)


def obeys(now: World) -> World | None:
    """The deployment is parked, or wakes."""
    if not now.orders or not now.process or now.hung:
        return None
    order, *rest = now.orders
    if order == "park" and now.running:
        return None
    return replace(now, parked=order == "park", orders=tuple(rest))


def refuses(now: World) -> World | None:
    """It isn't; or an order is late."""
    if not now.orders or not now.process:
        return None
    return replace(now, orders=now.orders[1:], refused=True)


def ends(now: World) -> World | None:
    """A deployment that was told to has ended."""
    if not now.process or not now.stopping or now.hung:
        return None
    require(not now.running, "streams are cut")
    return gone(now, "exit code 0")


def crashes(now: World) -> World | None:
    """A deployment dies."""
    return gone(now, "killed") if now.process else None


def hangs(now: World) -> World | None:
    """A deployment stands still: its streams go on waiting until it is killed."""
    return replace(now, hung=True) if now.process and not now.hung else None


def gone(now: World, how: str) -> World:
    """Without its process; its streams have ended with an error."""
    return replace(
        now, process=False, ready=False, parked=False, orders=(), refused=False, stopping=False,
        hung=False, ended=how, running=0,
    )  # fmt: skip


def is_late(now: World) -> World | None:
    """All time-outs are over."""
    lost_at = None if now.life.lost_at is None else -LATE_S
    life = replace(now.life, since=-LATE_S, retry_at=0.0, lost_at=lost_at)
    late = replace(now, life=life, idle=not now.held and not now.running)
    return late if late != now else None


def switched(now: World) -> World | None:
    """Somebody switches the model off, or on."""
    return replace(now, on=not now.on)


def room_changes(now: World) -> World | None:
    """Others start, wait, or end."""
    return replace(now, scarce=not now.scarce)


def another_server(now: World) -> World | None:
    """The server is killed; the next one hears what runs, and tells what it knows: nothing."""
    fresh = replace(
        now, life=ModelStatus(), asked=False, told=False, ended="", idle=False, refused=False
    )
    news = (False,) if now.up else ()
    return replace(fresh, news=news, said_held=0, said_running=0, said_unrouted=False)


def another_proxy(now: World) -> World | None:
    """The proxy is killed with its connections, and the next one knows what the server tells."""
    fresh = replace(now, routed=False, news=(now.told,), held=0, running=0)
    return replace(fresh, said_held=0, said_running=0, said_unrouted=False)


def decides(now: World) -> World | None:
    """The server's next round."""
    running, told = now.said_running, now.running if now.ready and not now.hung else 0
    seen = ObservedState(
        deployment=now.process,
        ready=now.ready and not now.parked and not now.hung,
        tells=now.process and not now.hung,
        parked=now.parked and not now.hung,
        refused="refused" if now.refused else "",
        ended=now.ended,
        clean=now.ended == "exit code 0",
        wanted=now.asked or now.said_held > 0,
        running=max(running, told),  # its front end says so, too
        idle_s=LATE_S if now.idle and not running and not now.said_held else 0.0,
        unrouted=now.said_unrouted,
        no_room="no room" if now.scarce else "",
        yields=now.scarce,
    )
    life, action = reconcile(now.life, WISHES[now.on, now.parks], seen, 0.0)
    life = replace(life, failures=min(life.failures, FAILURES))
    after = replace(now, life=life, ended="")
    if life.state != now.life.state:
        after = replace(after, refused=False)
    if life.state in ("serving", "failed") and now.life.state != life.state:
        after = replace(after, asked=False)
    if action == "start":
        require(not now.process, "two deployments at once")
        require(not now.scarce, "one starts without room")
        after = replace(after, process=True, ready=False)
    elif action == "stop":
        require(not now.running, "a deployment is told to end while it answers")
        require(not now.routed and True not in now.news, "one that is told to end has its route")
        after = replace(after, stopping=True, ready=False)
    elif action in ("park", "unpark"):
        parks = action == "park"
        require(parks != seen.parked, "one is parked again, or woken again")
        require(not parks or not now.running, "a deployment is parked while it answers")
        after = replace(after, orders=(*now.orders, action)[-ORDERS:])
    elif action == "kill":
        require(not seen.ready, "a deployment that serves is killed")
        after = gone(after, "killed")
    told = life.state == "serving" and seen.ready and after.ready and after.on
    if told != now.told:
        news = (*now.news, told) if now.up else now.news
        after = replace(after, told=told, news=news[-3:])
        if not told:
            after = replace(after, said_unrouted=False)
    return after if after != now else None


Event = Callable[[World], World | None]
FAIR: tuple[Event, ...] = (
    decides, wants, hears, says, finishes, gets_ready, obeys, ends, is_late,
    room_changes,
)  # fmt: skip
"""What happens some time, if nobody prevents it."""
OTHER: tuple[Event, ...] = arrives, refuses, crashes, hangs, switched, another_server, another_proxy
AnyWorld = TypeVar("AnyWorld", bound=Struct)


@dataclass
class Lives:
    """What was found. violation: empty if every invariant holds; then trace says how it came."""

    states: int = 0
    events: int = 0
    seconds: float = 0.0
    violation: str = ""
    trace: list[str] = field(default_factory=list)


@all_kept()
def explore(most: int, *, parks: bool = False) -> Lives:
    """Every state that can be reached, and whether who waits can be served from each.

    most: requests that run, and that wait. parks: whether it is parked where it would end.
    """
    return explore_worlds(
        World(most=most, parks=parks),
        FAIR,
        OTHER,
        {"who waits is never served": lambda one: not one.held},
        expects=lambda one: one.on and one.up,
    )


def explore_worlds(
    start: AnyWorld,
    fair: Sequence[Callable[[AnyWorld], AnyWorld | None]],
    other: Sequence[Callable[[AnyWorld], AnyWorld | None]],
    goals: Mapping[str, Callable[[AnyWorld], bool]],
    expects: Callable[[AnyWorld], bool] = lambda one: True,
) -> Lives:
    """Every state that events lead to from the first one, and whether fair events can lead from
    each to one where a goal is reached. goals: by the violation if they can't. expects: of states
    from which they must."""
    began, found = time.process_time(), Lives()
    every = [*((True, one) for one in fair), *((False, one) for one in other)]
    worlds, numbers = [start], {start: 0}
    came, before = [(-1, "")], [list[int]()]
    """Of each world: what led to it first; those that a fair event leads from."""
    for at, now in enumerate(worlds):
        for is_fair, event in every:
            try:
                after = event(now)
            except Broken as broken:
                found.violation = str(broken)
                found.trace = [*_trace(came, at), event.__name__]
                break
            if after is None:
                continue
            found.events += 1
            number = numbers.setdefault(after, len(worlds))
            if number == len(worlds):
                worlds.append(after)
                came.append((at, event.__name__))
                before.append([])
            if is_fair:
                before[number].append(at)
        if found.violation:
            break
    else:
        for violation, is_reached in goals.items():
            can = _can_reach(worlds, before, is_reached)
            missed = [at for at, one in enumerate(worlds) if at not in can and expects(one)]
            if missed:
                found.violation, found.trace = violation, _trace(came, missed[0])
                break
    found.states = len(worlds)
    found.seconds = time.process_time() - began
    return found


def _can_reach(
    worlds: Sequence[AnyWorld], before: Sequence[list[int]], is_reached: Callable[[AnyWorld], bool]
) -> set[int]:
    """The states where a goal is reached, and from which fair events can lead to one of them."""
    found = {at for at, one in enumerate(worlds) if is_reached(one)}
    left = list(found)
    while left:
        for at in before[left.pop()]:
            if at not in found:
                found.add(at)
                left.append(at)
    return found


def _trace(came: list[tuple[int, str]], at: int) -> list[str]:
    steps: list[str] = []
    while at:
        at, name = came[at]
        steps.append(name)
    return steps[::-1]
