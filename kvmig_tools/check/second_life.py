"""Every order of events in a roll-out: `kvmig.fleet.rollout` with two deployments and one proxy.

The old deployment serves, and a new one is to take its place by steps. Requests come, deployments
get ready, crash, fail and end, there is room for both or not, people pause, resume, promote and
undo, and the server is killed: the next one knows the roll-out as it was stored, perhaps a step
late, and finds what runs. The proxy learns of routes late, and the server of what the proxy does.
Each deployment's own life is simpler here than in `kvmig_tools.check.life`: it is ready or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kvmig.core.errors import ConfigError
from kvmig.fleet.rollout import (
    RolloutPlan,
    RolloutTerms,
    RolloutView,
    advance,
    begun,
    gives_way,
    is_overdue,
    paused,
    promoted,
    resumed,
    takes_all,
)
from kvmig_tools.check.explore import all_kept
from kvmig_tools.check.life import Lives, explore_worlds, require

HOLD_S, DEADLINE_S = 60.0, 100.0
LATE_S = 1000.0
"""Time after which all that waits for a time is due."""
START = begun(
    RolloutTerms(canary=(50,), hold_s=HOLD_S, deadline_s=DEADLINE_S), base=1, target=2, now=0.0
)

Stage = Literal["none", "starting", "ready", "ending"]


class Route(NamedTuple):
    """Where a proxy sends new calls."""

    old: bool = True
    new: bool = False
    """Whether some of them, or all where the old one gets none, go to the new deployment."""


class RollingWorld(Struct, frozen=True):
    """All that counts of a model that rolls out."""

    old: Stage = "ready"
    new: Stage = "none"
    new_fails: bool = False
    """Whether the last start of the new one has failed."""
    on_old: int = 0
    """Streams there."""
    on_new: int = 0
    held: int = 0
    """Calls that wait at the proxy."""
    plan: RolloutPlan | None = START
    """None: it is done, or undone."""
    undone: bool = False
    """Whether the old deployment is to be the model's again, and the new one to end."""
    stored: RolloutPlan | None = START
    """The roll-out as the next server finds it."""
    worse: bool = False
    """Whether the calls at the new one are known to be worse."""
    scarce: bool = False
    """Whether there is no room for both."""
    late: bool = False
    """Whether all times are over since the plan's last change."""
    told: Route = Route()
    """The route that the server has sent last."""
    routed: Route = Route()
    """The route that the proxy has."""
    heard: bool = True
    """Whether the server knows that the proxy has the route that was sent last."""


def now_of(now: RollingWorld) -> float:
    """The time of a decision, after the plan's last change."""
    since = 0.0 if now.plan is None else now.plan.since
    return since + (LATE_S if now.late else 0.0)


# -- what may happen. Each gives the world after it; None: it can't happen now


def calls_the_old(now: RollingWorld) -> RollingWorld | None:
    """A call comes, and the old deployment's part of calls gets it."""
    if not now.routed.old or now.on_old:
        return None
    if now.old == "none":
        return replace(now, held=1) if not now.held else None
    require(now.old != "ending", "a call is sent to an old deployment that ends")
    return replace(now, on_old=1)


def calls_the_new(now: RollingWorld) -> RollingWorld | None:
    """A call comes, and the new deployment's part of calls gets it."""
    if not now.routed.new or now.on_new:
        return None
    if now.new == "none":
        return replace(now, held=1) if not now.held else None
    require(now.new != "ending", "a call is sent to a new deployment that ends")
    return replace(now, on_new=1)


def waits(now: RollingWorld) -> RollingWorld | None:
    """A call comes that has nowhere to go yet."""
    if now.routed.old or now.routed.new or now.held:
        return None
    return replace(now, held=1)


def hears(now: RollingWorld) -> RollingWorld | None:
    """The proxy takes the newest route, and calls that wait go on."""
    if now.routed == now.told:
        return None
    return _served(replace(now, routed=now.told))


def _served(now: RollingWorld) -> RollingWorld:
    if not now.held:
        return now
    if now.routed.old and now.old == "ready":
        return replace(now, held=0, on_old=1)
    if now.routed.new and now.new == "ready":
        return replace(now, held=0, on_new=1)
    return now


def tries_again(now: RollingWorld) -> RollingWorld | None:
    """A call that waits tries its route again."""
    after = _served(now)
    return after if after != now else None


def says(now: RollingWorld) -> RollingWorld | None:
    """The server learns that the proxy has the newest route."""
    return replace(now, heard=True) if not now.heard and now.routed == now.told else None


def old_finishes(now: RollingWorld) -> RollingWorld | None:
    """A stream of the old deployment ends."""
    return replace(now, on_old=0) if now.on_old else None


def new_finishes(now: RollingWorld) -> RollingWorld | None:
    """A stream of the new deployment ends."""
    return replace(now, on_new=0) if now.on_new else None


def gets_ready(now: RollingWorld) -> RollingWorld | None:
    """A deployment serves."""
    if now.old == "starting":
        return replace(now, old="ready")
    return replace(now, new="ready") if now.new == "starting" else None


def ends(now: RollingWorld) -> RollingWorld | None:
    """A deployment that was told to has ended."""
    if now.old == "ending":
        return replace(now, old="none", on_old=0)
    return replace(now, new="none", on_new=0) if now.new == "ending" else None


def old_crashes(now: RollingWorld) -> RollingWorld | None:
    """The old deployment dies with its streams."""
    return replace(now, old="none", on_old=0) if now.old != "none" else None


def new_crashes(now: RollingWorld) -> RollingWorld | None:
    """The new deployment dies with its streams; before it was ready, its start has failed."""
    if now.new == "none":
        return None
    return replace(now, new="none", on_new=0, new_fails=now.new == "starting")


def gets_worse(now: RollingWorld) -> RollingWorld | None:
    """Calls at the new deployment are found to be worse."""
    shared = now.plan is not None and now.plan.share and not now.worse
    return replace(now, worse=True) if shared else None


def is_late(now: RollingWorld) -> RollingWorld | None:
    """All that waits for a time is due."""
    return replace(now, late=True) if not now.late else None


def room_changes(now: RollingWorld) -> RollingWorld | None:
    """Others start, or end."""
    return replace(now, scarce=not now.scarce)


def _ordered(
    now: RollingWorld, order: Callable[[RolloutPlan, float], RolloutPlan]
) -> RollingWorld | None:
    if now.plan is None:
        return None
    try:
        after = order(now.plan, 0.0)
    except ConfigError:
        return None  # it is refused
    fresh = replace(after, since=0.0)
    return replace(now, plan=fresh, stored=fresh, late=False, worse=False, new_fails=False)


def pauses(now: RollingWorld) -> RollingWorld | None:
    """Somebody pauses the roll-out; an order is stored before it is answered."""
    return _ordered(now, paused)


def resumes(now: RollingWorld) -> RollingWorld | None:
    """Somebody lets it go on."""
    return _ordered(now, resumed)


def promotes(now: RollingWorld) -> RollingWorld | None:
    """Somebody takes the next step at once."""
    return _ordered(now, promoted)


def undoes(now: RollingWorld) -> RollingWorld | None:
    """Somebody goes back: the newest revision is started as the old one again, which is stored
    before it is answered."""
    if now.plan is None:
        return None
    fresh = replace(now, plan=None, stored=None, undone=True)
    return replace(fresh, late=False, worse=False, new_fails=False)


def stores(now: RollingWorld) -> RollingWorld | None:
    """A step that the server has taken is stored."""
    return replace(now, stored=now.plan) if now.stored != now.plan else None


def another_server(now: RollingWorld) -> RollingWorld | None:
    """The server is killed, and the next one finds what is stored and what runs."""
    if now.undone:
        return replace(now, heard=False)
    if now.stored is None or now.plan is None:
        return None  # it is done: what is left ends with its streams
    fresh = replace(now, plan=now.stored, late=False, worse=False, new_fails=False)
    return replace(fresh, heard=False)


def decides(now: RollingWorld) -> RollingWorld | None:
    """The server's next round, as `ModelRollouts` and the lives of both deployments have it."""
    if now.undone:
        return goes_back(now)
    if now.plan is None:
        return None
    at = now_of(now)
    view = RolloutView(
        old_ended=now.old == "none" and _is_over(now),
        new_ready=now.new == "ready",
        new_failed="it can't start" if now.new_fails else "",
        worse="it is worse" if now.worse else "",
    )
    plan = advance(now.plan, view, at)
    if plan is None:
        require(now.old == "none", "it is done while the old deployment is there")
        require(now.new == "ready" or not now.on_old, "it is done without a deployment")
        return replace(now, plan=None, told=Route(False, now.new == "ready"), heard=False)
    after = replace(now, plan=replace(plan, since=0.0))
    if plan != now.plan:
        after = replace(after, late=False, worse=False)
    stands_by = plan.state != "stopped"
    lacks_room = stands_by and now.new == "none" and now.scarce and now.old != "none"
    yields = gives_way(plan, no_room=lacks_room, running=now.on_old, now=at)
    retires = takes_all(plan, new_ready=view.new_ready) or yields
    after = _with_routes(after, plan, retires=retires)
    waits_in_vain = now.old == "ready" and not yields and not any(after.told)
    require(not waits_in_vain, "calls wait while the old deployment serves")
    after = _with_old(after, plan, at, retires=retires)
    after = with_new(after, stands_by=stands_by)
    return after if after != now else None


def goes_back(now: RollingWorld) -> RollingWorld | None:
    """A round after an undo: the old deployment gets all new calls, and starts again where it has
    ended; the new one ends after its streams."""
    route = Route(now.old == "ready", False)
    after = replace(now, told=route, heard=False) if route != now.told else now
    require(now.old != "ready" or after.told.old, "calls wait while the old deployment serves")
    if now.old == "none" and now.held and not (now.scarce and now.new != "none"):
        after = replace(after, old="starting")
    after = with_new(after, stands_by=False)
    require(not (after.new == "ending" != now.new and now.on_new), "an undo cuts streams")
    return after if after != now else None


def _is_over(now: RollingWorld) -> bool:
    """Whether nothing of the old deployment is to start again: at 100 %, or where the last round
    has let it end."""
    assert now.plan is not None
    gone = not now.told.old
    return now.plan.share == 100 or (now.plan.step < 0 and gone and now.new == "ready")


def _with_routes(now: RollingWorld, plan: RolloutPlan, *, retires: bool) -> RollingWorld:
    ready = now.new == "ready"
    route = Route(not retires and now.old == "ready", ready and (retires or plan.share > 0))
    return replace(now, told=route, heard=False) if route != now.told else now


def _with_old(now: RollingWorld, plan: RolloutPlan, at: float, *, retires: bool) -> RollingWorld:
    if retires and now.old == "ready" and now.heard:
        cut = is_overdue(plan, at)
        if not now.on_old or cut:
            return replace(now, old="ending", on_old=0)
    wanted = now.held or plan.share < 100
    if not retires and now.old == "none" and wanted and not (now.scarce and now.new != "none"):
        return replace(now, old="starting")
    return now


def with_new(now: RollingWorld, *, stands_by: bool) -> RollingWorld:
    """The new deployment, which starts where it is to stand by, and else ends after its streams."""
    if stands_by and now.new == "none" and not now.new_fails:
        room = not now.scarce or now.old == "none"
        return replace(now, new="starting") if room else now
    if not stands_by and now.new in ("starting", "ready") and now.heard and not now.on_new:
        return replace(now, new="ending")
    return now


Event = Callable[[RollingWorld], RollingWorld | None]
FAIR: tuple[Event, ...] = (
    decides, hears, tries_again, says, old_finishes, new_finishes, gets_ready, ends, is_late,
    stores, room_changes,
)  # fmt: skip
"""What happens some time, if nothing prevents it."""
OTHER: tuple[Event, ...] = (
    calls_the_old, calls_the_new, waits, old_crashes, new_crashes, gets_worse, pauses, resumes,
    promotes, undoes, another_server,
)  # fmt: skip


@all_kept()
def explore() -> Lives:
    """Every state of a roll-out: whether a call that waits can be served from each, and whether a
    roll-out that runs can be done, or stop, and one that is undone leaves the old deployment alone.
    """
    goals = {
        "who waits is never served": _is_served,
        "a roll-out neither ends nor stops, or an undone one is left": _is_settled,
    }
    return explore_worlds(RollingWorld(), FAIR, OTHER, goals)


def _is_served(now: RollingWorld) -> bool:
    return not now.held or (now.plan is None and not now.undone)


def _is_settled(now: RollingWorld) -> bool:
    if now.undone:
        return now.new == "none"
    return now.plan is None or now.plan.state != "running"
