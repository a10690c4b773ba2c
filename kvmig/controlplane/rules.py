"""The rules of a round, each of which decides pairs on the round's ledger. Pure.

`kvmig` runs drain, relieve, protect, move_queues, make_room, gather and balance, in this order; the
paper's policies run pair_extremes.
"""

from __future__ import annotations

import math

import numpy as np

from kvmig.controlplane.freeness import freenesses, slack
from kvmig.controlplane.messages import Why
from kvmig.controlplane.scheduler import DestinationHeap, RoundPlan
from kvmig.controlplane.view import Column, InstanceView, Mask

OPEN_SHARE = 0.5
"""Share of the serving instances that shall be able to start a prompt at once."""
OPEN_BLOCKS = 20.0
"""Free blocks that make an instance without a queue open."""


def drain(ledger: RoundPlan) -> None:
    """Pair each draining instance with the roomiest, an equal share of its requests each."""
    columns = ledger.columns
    held = columns.running + columns.waiting
    sources = ledger.worst(ledger.draining & (held > columns.out), held)
    if not sources:
        return
    takers = DestinationHeap(ledger, ledger.serving, ledger.slacks(), ledger.slack)
    for source, roomiest in takers.offer(sources):
        _empty(ledger, source, roomiest)


def _empty(ledger: RoundPlan, source: int, roomiest: list[int]) -> None:
    columns = ledger.columns
    held = float(columns.running[source] + columns.waiting[source])
    wanted = float(columns.used[source] + columns.head[source] + columns.behind[source])
    average = max(wanted / held, 1.0)
    left, out = math.ceil(held), float(columns.out[source])
    for place, destination in enumerate(roomiest):
        free = float(ledger.free[destination])
        seats = float(columns.seats[destination] - ledger.batch[destination])
        share = math.ceil(left / (len(roomiest) - place))
        requests = math.floor(max(min(share, free / average, seats), 0.0))
        if requests < 1 and columns.waiting[source] == 0 and (free < 1 or seats < 1):
            continue
        # Those that wait take no room from anybody who runs: they go whatever the budget is.
        budget = max(requests - out, 0.0) * average
        out = max(out - requests, 0.0)
        left -= requests
        ledger.pair(
            source,
            destination,
            requests,
            requests * average,
            budget=budget,
            room=max(free, 0.0),
            why="drain",
        )


def relieve(ledger: RoundPlan) -> None:
    """Pair instances that hold more than their quota with those that have room.

    The quota of an instance shrinks when others of its unit want back what they have lent it. It
    admits no request as long as it owes, and soon preempts those that hold that: a request that
    goes elsewhere before goes on.
    """
    columns = ledger.columns
    owed = columns.used - columns.total
    sources = ledger.worst(ledger.serving & (owed > 0) & (columns.running > columns.out), -owed)
    if not sources:
        return
    takers = _takers(ledger)
    for source, roomiest in takers.offer(sources):
        _share_out(ledger, source, float(owed[source]), roomiest, "relieve")


def protect(ledger: RoundPlan) -> None:
    """Pair instances that keep less free than their headroom with ones that keep none: those who
    run alongside a protected request give way when its headroom is used."""
    columns = ledger.columns
    if not columns.kept.any():
        return
    over = columns.used + columns.kept - columns.total
    crowded = ledger.serving & (columns.kept > 0) & (over > 0) & (columns.lower > 0)
    sources = ledger.worst(crowded & (columns.running > columns.out), -over)
    slacks = ledger.slacks()
    roomy = ledger.serving & (columns.kept == 0) & (slacks > ledger.rounds.destination_above)
    roomy &= ledger.batch < columns.seats
    takers = DestinationHeap(ledger, roomy, slacks, ledger.slack)
    for source, roomiest in takers.offer(sources):
        need = min(float(over[source]), float(columns.lower[source]))
        _clear(ledger, source, need, roomiest)


def _clear(ledger: RoundPlan, source: int, need: float, roomiest: list[int]) -> None:
    columns = ledger.columns
    average = max(float(columns.used[source] / columns.running[source]), 1.0)
    out = float(columns.out[source]) * average
    for row in roomiest:
        room = ledger.capacity_of(row)
        blocks = min(need, room)
        if blocks < 1:
            return
        ledger.pair(
            source,
            row,
            math.ceil(blocks / average),
            blocks,
            budget=max(blocks - out, 0.0),
            room=room,
            why="priority",
            priority=protected_priority(ledger.view.instances[source]),
        )
        out = max(out - blocks, 0.0)
        need -= blocks


def protected_priority(one: InstanceView) -> int | None:
    """The first priority with headroom that has a running request there."""
    running = [its.priority for its in one.load.classes if its.running] or [0]
    return min((priority for priority in running if one.headroom.get(priority)), default=None)


def unheld_blocks(ledger: RoundPlan) -> Column:
    """Free blocks of each instance."""
    free: Column = ledger.columns.total - ledger.columns.used
    return free


def missing_blocks(ledger: RoundPlan) -> Column:
    """Blocks that the head of each queue lacks; 0 or less: it can start."""
    columns = ledger.columns
    return np.where(columns.waiting > 0, columns.head - unheld_blocks(ledger), 0.0)


def move_queues(ledger: RoundPlan) -> None:
    """Pair instances whose head can't start with ones where it can, at once.

    The head of a queue may want more blocks than its instance has free, or a seat in a full
    batch. If another instance has them, waiting requests go there: they hold nothing, so that
    costs nothing. A head that fits nowhere lets those behind it pass, as many as fit elsewhere.
    """
    columns = ledger.columns
    missing = missing_blocks(ledger)
    seated = (columns.waiting > 0) & (columns.running >= columns.seats)
    stuck = ledger.worst(ledger.serving & ((missing > 0) | seated), -missing)
    if not stuck:
        return
    takers = _takers(ledger)
    keepers = _keepers(ledger)
    blocked = [
        source
        for source in stuck
        if not _move_queue(ledger, source, takers, 0.0)
        and not _move_queue(ledger, source, keepers, 1.0)
    ]
    for source in blocked:
        _pass_head(ledger, source, takers)


def _move_queue(ledger: RoundPlan, source: int, takers: DestinationHeap, borrowed: float) -> bool:
    """Move a queue to the first taker, which lends `borrowed` of its headroom; whether it may."""
    columns = ledger.columns
    roomiest = takers.pop_best(source)
    wanted = float(columns.head[source])
    room = -1.0
    if roomiest:
        destination = roomiest[0]
        room = ledger.capacity_of(destination) + borrowed * float(columns.kept[destination])
        if room >= wanted:
            queue = wanted + float(columns.behind[source])
            blocks = min(queue, room)
            requests = math.ceil(columns.waiting[source] * blocks / queue)
            ledger.pair(
                source, destination, requests, blocks, budget=blocks, room=room, why="queue"
            )
    takers.put_back(roomiest)
    return room >= wanted


def _pass_head(ledger: RoundPlan, source: int, takers: DestinationHeap) -> None:
    """Pair an instance with the first of `takers` that requests behind its head fit on."""
    columns = ledger.columns
    behind, count = float(columns.behind[source]), float(columns.waiting[source]) - 1
    if count < 1:
        return
    roomiest = takers.pop_best(source)
    if roomiest:
        destination = roomiest[0]
        room = ledger.capacity_of(destination)
        if room >= 1:
            blocks = min(room, behind)
            requests = math.ceil(count * blocks / max(behind, 1.0))
            ledger.pair(
                source, destination, requests, blocks, budget=blocks, room=room, why="queue"
            )
    takers.put_back(roomiest)


def make_room(ledger: RoundPlan) -> None:
    """Pair instances whose head fits nowhere with those who can take enough of what runs.

    Where the blocks are nowhere in one place, running requests of the head's own instance go to
    where there is room, no more than it takes to let the head in.
    """
    columns = ledger.columns
    missing = missing_blocks(ledger)
    possible = (columns.total >= columns.head) & (columns.running > columns.out)
    stuck = ledger.worst(ledger.serving & (missing > 0) & possible, missing)
    if not stuck:
        return
    takers = _takers(ledger)
    for source, roomiest in takers.offer(stuck):
        _let_in(ledger, source, float(missing[source]), roomiest)


def _let_in(ledger: RoundPlan, source: int, need: float, roomiest: list[int]) -> None:
    """Move `need` blocks, if there is room for all of them: fewer would help no request."""
    if sum(max(ledger.capacity_of(row), 0.0) for row in roomiest) >= need and not ledger.is_source(
        source
    ):
        _share_out(ledger, source, need, roomiest, "defragment")


def _share_out(ledger: RoundPlan, source: int, need: float, roomiest: list[int], why: Why) -> None:
    """Move `need` blocks, as far as there is room for them."""
    average = _average(ledger, source)
    out = float(ledger.columns.out[source]) * average
    for row in roomiest:
        room = ledger.capacity_of(row)
        share = min(room, need)
        if share < 1:
            return
        budget, out = max(share - out, 0.0), max(out - share, 0.0)
        need -= share
        ledger.pair(source, row, share / average, share, budget=budget, room=room, why=why)


def _keepers(ledger: RoundPlan) -> DestinationHeap:
    """Instances with a headroom, the most room with it and no queue: better than waiting."""
    kept = ledger.columns.kept
    free = ledger.serving & (ledger.columns.waiting == 0) & (kept > 0)
    free &= ledger.batch < ledger.columns.seats
    return DestinationHeap(
        ledger, free, ledger.rooms() + kept, lambda row: ledger.capacity_of(row) + kept[row]
    )


def _takers(ledger: RoundPlan) -> DestinationHeap:
    """Instances with the most room and no queue of their own."""
    free = ledger.serving & (ledger.columns.waiting == 0) & (ledger.batch < ledger.columns.seats)
    return DestinationHeap(ledger, free, ledger.rooms(), ledger.capacity_of)


def gather(ledger: RoundPlan) -> None:
    """Pair instances that give their queues with ones that have to keep theirs, so that prompts
    that come find others open.

    An engine starts requests in order: one that needs more blocks than are free holds up all behind
    it, and all that come. When memory is short everywhere each instance has such a head, one
    that was preempted and is large by then, and a short prompt waits behind it wherever it is
    dispatched, though there are blocks for it. What waits holds nothing, so a queue can be moved at
    once: half of the instances are kept open, and the others, to which nothing new is dispatched,
    leave what becomes free there to their queues.

    Only queues with a preempted request are stuck in this sense: long prompts that come in a burst
    wait for each other's prefill, and would only wait longer behind more of them.
    """
    columns, serving = ledger.columns, ledger.serving
    free = unheld_blocks(ledger)
    roomy = serving & (free >= OPEN_BLOCKS)
    lacking = int(OPEN_SHARE * serving.sum()) - int((roomy & (columns.waiting == 0)).sum())
    stuck: Mask = serving & (missing_blocks(ledger) > 0) & (columns.preempted > 0)
    if lacking <= 0 or stuck.sum() < 2:
        return
    # The fewest requests to move; of equals where most is free. Not where room is being made.
    by = columns.waiting - free / np.maximum(columns.total, 1)
    givers = [row for row in ledger.worst(stuck & roomy, by) if not ledger.is_source(row)][:lacking]
    queued = columns.head + columns.behind
    keepers = [row for row in ledger.best(stuck, free - queued) if row not in givers]
    length = {row: float(queued[row] - free[row]) for row in keepers}
    for source in givers:
        able = [row for row in keepers if ledger.may_pair(source, row)]
        if not able:
            continue
        destination = min(able, key=lambda row: length[row])
        blocks = float(queued[source])
        length[destination] += blocks
        requests = float(columns.waiting[source])
        ledger.pair(source, destination, requests, blocks, budget=blocks, room=blocks, why="queue")


def balance(ledger: RoundPlan) -> None:
    """Pair who is short of room with who has much, where that helps.

    Sources lie below one threshold of slack and destinations above another. The lowest is
    paired with the highest, then with the next highest, until it is above its threshold:
    k average requests of the source go, k the largest number for which the destination

    - stays at or above its threshold, so that the predicted effect of a round never calls for
      the way back, and
    - stays at or above the source, so that no more goes than evens the two out,

    and the lower of the two must come up by `min_gain`.
    """
    columns, rounds = ledger.columns, ledger.rounds
    slacks = ledger.slacks()
    movable = columns.running > columns.out
    low = ledger.serving & movable & (slacks < rounds.source_below)
    high = ledger.serving & (slacks > rounds.destination_above) & ~low
    high &= ledger.batch < columns.seats
    sources = [row for row in ledger.worst(low, slacks) if not _slow(ledger, row)]
    if not sources:
        return
    takers = DestinationHeap(ledger, high, slacks, ledger.slack)
    for source, highest in takers.offer(sources):
        _relieve(ledger, source, highest)


def _slow(ledger: RoundPlan, row: int) -> bool:
    """Whether one average request would be on its way for too long."""
    bandwidth = ledger.view.instances[row].bandwidth
    return bandwidth > 0 and _average(ledger, row) > bandwidth * ledger.rounds.longest_move_s


def _average(ledger: RoundPlan, row: int) -> float:
    """Blocks of one running request."""
    return max(float(ledger.columns.used[row] / ledger.columns.running[row]), 1.0)


def _relieve(ledger: RoundPlan, source: int, highest: list[int]) -> None:
    """Pair one source with the highest, until it needs no more."""
    out = float(ledger.columns.out[source])
    for destination in highest:
        moves = _moves(ledger, source, destination)
        if moves < 1:  # nobody else is higher
            return
        out = _pair(ledger, source, destination, moves, out)
        if ledger.slack(source) >= ledger.rounds.source_below:
            return


def _pair(ledger: RoundPlan, source: int, destination: int, moves: int, out: float) -> float:
    """Decide a pair. What moves already (`out`) uses the budget up; returns how much is left."""
    average = _average(ledger, source)
    budget = max(moves - out, 0.0) * average
    room = ledger.capacity_of(destination)
    ledger.pair(
        source, destination, moves, moves * average, budget=budget, room=room, why="balance"
    )
    return max(out - moves, 0.0)


def _moves(ledger: RoundPlan, source: int, destination: int) -> int:
    """How many average requests go; 0: the pair doesn't help."""
    average = _average(ledger, source)
    floor = ledger.floor
    free_s, batch_s = float(ledger.free[source]), float(ledger.batch[source])
    free_d, batch_d = float(ledger.free[destination]), float(ledger.batch[destination])
    # (free_d - k average) / (batch_d + k) >= floor
    most = (free_d - floor * batch_d) / (average + floor)
    # (free_s + k a) / (batch_s - k) <= (free_d - k a) / (batch_d + k): k^2 cancels out, and
    # k <= gap / slope. A slope below 0: the source stays below 0 whatever moves.
    gap = free_d * batch_s - free_s * batch_d
    slope = free_s + free_d + average * (batch_s + batch_d)
    level = gap / slope if slope > 0 else math.inf
    running = float(ledger.columns.running[source])
    seats = float(ledger.columns.seats[destination]) - batch_d
    moves = math.floor(min(most, level, running, batch_s, seats))
    if moves < 1:
        return 0
    low = slack(free_s + moves * average, int(batch_s) - moves)
    high = slack(free_d - moves * average, int(batch_d) + moves)
    gain = min(low, high) - slack(free_s, int(batch_s))
    return moves if gain >= ledger.rounds.min_gain else 0


def pair_extremes(ledger: RoundPlan) -> None:
    """The paper's pairing (Llumnix, section 4.4.3), literally; draining instances are the lowest.

    Sources have a freeness below one threshold, destinations above another; the lowest is
    paired with the highest, the next lowest with the next highest, each once. No budget: a
    source moves one request after the other until it isn't paired any more. In the artifact,
    instances where preempted requests wait are sources, too.
    """
    columns, rounds = ledger.columns, ledger.rounds
    freeness = freenesses(ledger.free, ledger.batch)
    movable = (ledger.serving | ledger.draining) & (columns.running > 0)
    short = columns.preempted > 0 if rounds.preempted_give else np.zeros(len(columns), bool)
    sources = ledger.worst(movable & (short | (freeness < rounds.source_below)), freeness)
    roomy = ledger.serving & ~short & (freeness > rounds.destination_above)
    destinations = ledger.best(roomy, freeness)
    for kind in dict.fromkeys(ledger.kinds[sources].tolist()):
        able = [row for row in destinations if ledger.kinds[row] == kind]
        give = [row for row in sources if ledger.kinds[row] == kind]
        for source, destination in zip(give, able, strict=False):
            if source != destination:
                why: Why = "drain" if ledger.draining[source] else "balance"
                ledger.pair(source, destination, 0, 0, budget=math.inf, room=math.inf, why=why)
