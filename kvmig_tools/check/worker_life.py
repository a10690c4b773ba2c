"""Every order of events among a model's instances on two workers: `kvmig.fleet.leaving_instances`.

One instance is wanted, and one stream never ends. Workers are drained and used again, and their
nodes are lost and join again; instances get ready, fail, let the stream move and end; there is room
for more or not. Orders to the deployment are late or break off, and the server is killed with each
of them on its way: the next one knows the wishes, and finds what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kvmig.core.order_fence import OrderFence, OrderToken
from kvmig.fleet.autoscale import counted, next_order
from kvmig.fleet.leaving_instances import leaving_step
from kvmig.fleet.workers import Leaving
from kvmig_tools.check.explore import all_kept
from kvmig_tools.check.life import Lives, explore_worlds, require

WANTED = 1
MOST = 4
"""Instances at once."""
CHANGES = 5
"""Orders of people, faults, and nodes that are lost or join, in all."""
PLACES = 2
"""Instances that a node has room for."""
WAITS = -1
"""The place of the stream while no instance has it."""
EARLIER, NOW = OrderToken(1, 1), OrderToken(1, 2)


class PlacedInstance(NamedTuple):
    """An instance on the node of a worker."""

    node: int
    state: Literal["starting", "serving", "draining", "failed"] = "starting"
    home: Literal["there", "lost", "over"] = "there"
    """Whether its node is there; over: it was lost longer ago than a lease."""


class InstanceOrder(NamedTuple):
    """An order to the deployment. at: a node for `add`, else an instance."""

    what: Literal["add", "end", "serve"]
    at: int


class ReportedInstance(NamedTuple):
    """An instance as the deployment reports it; implements `InstanceLoad`."""

    id: str
    state: str
    blocks_total: int = 1000
    blocks_used: int = 0
    running: int = 0
    waiting: int = 0


class WorkersWorld(Struct, frozen=True):
    """All that counts of one model."""

    instances: tuple[PlacedInstance | None, ...] = (
        PlacedInstance(0, "serving"),
        *(None,) * (MOST - 1),
    )
    stream: int = 0
    """The instance that it runs on, or `WAITS`."""
    there: tuple[bool, ...] = (True, True)
    """Whether workers have a node."""
    drained: tuple[bool, ...] = (False, False)
    changes: int = CHANGES
    """How many of `CHANGES` may still happen."""
    scarce: bool = False
    """Whether no worker has room for one more."""
    late: InstanceOrder | None = None
    """An order of a contact before this one, on its way."""
    stale: bool = False
    """Whether another contact has begun since that order was given."""
    # the server
    hears: bool = True
    """Whether its contact with the deployment has begun."""
    orders: tuple[InstanceOrder, ...] = ()
    """Those that it gives, one after the other; the first one is on its way."""
    departing: frozenset[int] = frozenset()


def live(now: WorkersWorld) -> Iterator[tuple[int, PlacedInstance]]:
    """The instances that there are, by their numbers."""
    return ((at, one) for at, one in enumerate(now.instances) if one is not None)


def reported(now: WorkersWorld) -> list[ReportedInstance]:
    """What the deployment reports."""
    return [ReportedInstance(str(at), one.state) for at, one in live(now)]


def leaving(now: WorkersWorld) -> dict[str, Leaving]:
    """Why instances leave."""
    found: dict[str, Leaving] = {}
    for at, one in live(now):
        if one.home == "over":
            found[str(at)] = "lost"
        elif one.home == "there" and now.drained[one.node]:
            found[str(at)] = "drain"
    return found


def place(now: WorkersWorld) -> int | None:
    """A worker that takes one more instance."""
    for node in range(len(now.there)):
        here = sum(one.node == node and one.home == "there" for _, one in live(now))
        if now.there[node] and not (now.drained[node] or now.scarce) and here < PLACES:
            return node
    return None


def changed(now: WorkersWorld, at: int, to: PlacedInstance | None) -> WorkersWorld:
    """The same with an instance changed, or gone."""
    instances = (*now.instances[:at], to, *now.instances[at + 1 :])
    stream = WAITS if now.stream == at and to is None else now.stream
    return replace(now, instances=instances, stream=stream)


# -- what may happen. Each gives the world after it; None: it can't happen now


def decides(now: WorkersWorld) -> WorkersWorld | None:
    """The server's next round, as `ModelController` has it."""
    rows, leaves = reported(now), leaving(now)
    if not now.hears or now.orders or not counted(rows):
        return None
    known = {at for at, one in live(now) if one.state == "draining" or str(at) in leaves}
    departing = now.departing & known
    staying = [one for one in rows if one.id not in leaves]
    order, free = next_order(staying, WANTED), place(now)
    orders: list[InstanceOrder] = []
    if order is not None and order.failed:
        orders = [InstanceOrder("end", int(one)) for one in order.failed]
    elif order is not None and order.more > 0 and free is not None:
        orders = [InstanceOrder("add", free)]
    elif order is not None and order.more < 0:
        serving = [one for one in staying if one.state == "serving"]
        orders = [InstanceOrder("end", int(one.id)) for one in serving[1:2]]
    elif leaves or departing:
        no_room = "" if free is not None else "no room"
        names = [str(one) for one in departing]
        step = leaving_step(rows, leaves, names, WANTED, no_room)
        serve = any(one.state == "serving" for one in staying)
        require(not step.drained or serve, "an instance is drained before another one serves")
        orders += (InstanceOrder("serve", int(one)) for one in step.kept)
        orders += (InstanceOrder("end", int(one)) for one in (*step.removed, *step.drained))
        departing |= {int(one) for one in step.drained}
    after = replace(now, orders=tuple(orders), departing=departing)
    return after if after != now else None


def hears(now: WorkersWorld) -> WorkersWorld | None:
    """The server's contact begins: it learns what is there."""
    return replace(now, hears=True, stale=now.late is not None) if not now.hears else None


def obeys(now: WorkersWorld) -> WorkersWorld | None:
    """The deployment carries out the server's order."""
    if not now.hears or not now.orders:
        return None
    order, *rest = now.orders
    after = carried_out(now, order)
    if after is None:  # the others of this round are not given
        return replace(now, orders=())
    departing = after.departing - {order.at} if order.what == "serve" else after.departing
    return replace(after, orders=tuple(rest), departing=departing)


def comes_late(now: WorkersWorld) -> WorkersWorld | None:
    """An order of an earlier contact comes to the deployment."""
    if now.late is None:
        return None
    after = replace(now, late=None, stale=False)
    if OrderFence(NOW if now.stale else EARLIER).refuse(EARLIER):
        return after
    require(not now.stale, "an order is carried out that the server takes for lost")
    return carried_out(after, now.late) or after


def carried_out(now: WorkersWorld, order: InstanceOrder) -> WorkersWorld | None:
    """The same after an order; None: the deployment refuses it."""
    if order.what == "add":
        home: Literal["there", "lost"] = "there" if now.there[order.at] else "lost"
        at = next((at for at, one in enumerate(now.instances) if one is None), None)
        require(at is not None, "more instances than are ever needed")
        assert at is not None
        return changed(now, at, PlacedInstance(order.at, home=home))
    one = now.instances[order.at]
    if one is None:
        return None
    if order.what == "serve":
        back = one.state == "draining" and one.home == "there"
        return changed(now, order.at, one._replace(state="serving")) if back else None
    if one.state in ("serving", "draining"):
        others = any(it.state == "serving" for at, it in live(now) if at != order.at)
        return changed(now, order.at, one._replace(state="draining")) if others else None
    return without(now, order.at)


def without(now: WorkersWorld, at: int) -> WorkersWorld:
    """The same once an instance has ended."""
    after = changed(now, at, None)
    require(counted(reported(after)) > 0, "the model's last instance ends")
    return after


def gets_ready(now: WorkersWorld) -> WorkersWorld | None:
    """An instance that starts serves."""
    for at, one in live(now):
        if one.state == "starting" and one.home == "there":
            return changed(now, at, one._replace(state="serving"))
    return None


def fails(now: WorkersWorld) -> WorkersWorld | None:
    """An instance beside another one doesn't start."""
    for at, one in live(now):
        if one.state == "starting" and one.home == "there":
            after = changed(now, at, one._replace(state="failed"))
            require(counted(reported(after)) > 0, "all instances are given up")
            return after
    return None


def moves(now: WorkersWorld) -> WorkersWorld | None:
    """The stream goes on at an instance that serves."""
    of = None if now.stream == WAITS else now.instances[now.stream]
    if of is not None and of.state != "draining":
        return None
    to = next((at for at, one in live(now) if one.state == "serving"), None)
    return None if to is None else replace(now, stream=to)


def ends(now: WorkersWorld) -> WorkersWorld | None:
    """An instance that is drained, and has no stream any more, has ended."""
    for at, one in live(now):
        if one.state == "draining" and now.stream != at:
            return without(now, at)
    return None


def lease_ends(now: WorkersWorld) -> WorkersWorld | None:
    """A node was lost longer ago than a lease."""
    for at, one in live(now):
        if one.home == "lost":
            return changed(now, at, one._replace(home="over"))
    return None


def room_changes(now: WorkersWorld) -> WorkersWorld | None:
    """Others take the room, or leave it."""
    return replace(now, scarce=not now.scarce)


def breaks_off(now: WorkersWorld) -> WorkersWorld | None:
    """An order has no answer: the server makes its contact again."""
    if not now.orders:
        return None
    return replace(now, hears=False, orders=(), late=now.orders[0], stale=False)


def another_server(now: WorkersWorld) -> WorkersWorld | None:
    """The server is killed; the next one knows the wishes."""
    killed = replace(now, hears=False, orders=(), departing=frozenset())
    return replace(killed, late=now.orders[0], stale=False) if now.orders else killed


def _flipped(values: tuple[bool, ...], at: int) -> tuple[bool, ...]:
    return (*values[:at], not values[at], *values[at + 1 :])


def _of_worker(node: int, event: Callable[[WorkersWorld, int], WorkersWorld | None]) -> Event:
    def happens(now: WorkersWorld) -> WorkersWorld | None:
        return event(now, node)

    happens.__name__ = f"{event.__name__} {node}"
    return happens


def is_drained_or_used(now: WorkersWorld, node: int) -> WorkersWorld | None:
    """Somebody drains a worker, or uses it again."""
    return replace(now, drained=_flipped(now.drained, node))


def comes_or_goes(now: WorkersWorld, node: int) -> WorkersWorld | None:
    """The node of a worker is lost with what runs there, or another one joins in its place."""
    after = replace(now, there=_flipped(now.there, node))
    if not now.there[node]:
        return after
    for at, one in live(now):
        if one.node == node:
            after = changed(after, at, PlacedInstance(node, home="lost"))
            after = replace(after, stream=WAITS) if after.stream == at else after
    return after


Event = Callable[[WorkersWorld], WorkersWorld | None]


def change(event: Event) -> Event:
    """The event as one of `CHANGES`."""

    def happens(now: WorkersWorld) -> WorkersWorld | None:
        after = event(now) if now.changes else None
        return None if after is None else replace(after, changes=now.changes - 1)

    happens.__name__ = event.__name__
    return happens


FAIR: tuple[Event, ...] = (
    decides, hears, obeys, gets_ready, moves, ends, lease_ends, room_changes
)  # fmt: skip
OTHER: tuple[Event, ...] = (
    comes_late,
    *map(change, (fails, breaks_off, another_server)),
    *(
        change(_of_worker(node, one))
        for node in (0, 1)
        for one in (is_drained_or_used, comes_or_goes)
    ),
)


def is_settled(now: WorkersWorld) -> bool:
    """Whether the stream runs, and as many instances serve as are wanted, where they may be."""
    every = list(live(now))
    serve = all(one.state == "serving" for _, one in every)
    return serve and len(every) == WANTED and not leaving(now) and now.stream != WAITS


def has_worker(now: WorkersWorld) -> bool:
    """Whether a worker may have instances."""
    return any(there and not gone for there, gone in zip(now.there, now.drained, strict=True))


GOALS: Mapping[str, Callable[[WorkersWorld], bool]] = {
    "a worker is never emptied, or its instances are never replaced": is_settled
}


@all_kept()
def explore() -> Lives:
    """Every state that can be reached, and whether all settles from each."""
    return explore_worlds(WorkersWorld(), FAIR, OTHER, GOALS, expects=has_worker)
