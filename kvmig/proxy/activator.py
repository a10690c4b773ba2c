"""Requests to models that are not there yet: who waits, for how long, who goes first. Pure.

And the count of all requests by model, by which the server decides how many instances to have.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from hashlib import blake2b
from http import HTTPStatus
from math import ceil
from typing import Literal, NamedTuple

from kvmig.asgi.body_budget import BodyBudget, BodyShare
from kvmig.proxy.messages import ModelDemand, ModelRoute
from kvmig.proxy.refusals import ProxyRefusal

BEAT_S = 10.0
"""Pause between two SSE keep-alives of a held stream."""
TRY_S = 0.25
"""Pause between two tries to reach a deployment whose route is ready."""
STAYS = 100
"""A draw that is above every share."""
SOON_S = 5.0
"""Retry-After for clients, where no better time is known."""


class WaitForRoute(NamedTuple):
    """Wait for news of the route, `seconds` at most. beat: send a keep-alive first."""

    seconds: float
    beat: bool


class ForwardCall(NamedTuple):
    """The decision to relay a call."""

    socket: str


@dataclass(eq=False)
class PendingRequest:
    """One request. Times in seconds of a steady clock."""

    model: str
    priority: int
    size: int
    """Bytes of its body."""
    since: float
    beats: bool
    """Whether its client can be kept with signs of life: it has asked for a stream."""
    sequences: int = 1
    """Sequences that the request asks for."""
    works: bool = True
    """Whether an engine works for it, and so may be started for it."""
    draw: int = STAYS
    """Decides which of two deployments gets it, 0 to 99; STAYS: never the new one."""
    account: str = ""
    """The account, which may have as much of the room as it leaves; empty: unknown."""
    share: BodyShare | None = None
    """What its body takes of the room for those that wait."""
    number: int = 0
    """Number of the arrival, from 1 on; 0: it has not waited."""
    beaten: float | None = None
    """When the last sign of life was sent; from the first on the answer's status is fixed."""
    tried: float | None = None
    """When the deployment could not be reached."""

    def leave_queue(self, now: float) -> None:
        """Let a call be tried later that its deployment has not taken; it may wait again."""
        self.number, self.share, self.tried = 0, None, now


class PendingRequests:
    """The requests that wait, within bounds."""

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: of their bodies."""
        self._budget = BodyBudget(most_bytes)
        self._arrived = 0
        self._waiting: defaultdict[str, set[PendingRequest]] = defaultdict(set)

    def enter(self, waiter: PendingRequest, route: ModelRoute) -> ProxyRefusal | None:
        """One more waits; or there are too many, and the request is refused."""
        waiting = self._waiting[waiter.model]
        own = sum(one.account == waiter.account for one in waiting) if waiter.account else 0
        share = self._budget.enter(waiter.account)
        if (count := len(waiting)) >= route.max_held:
            why = f"{count} requests wait for {route.name} to start, allowed are {route.max_held}"
        elif own and own >= route.max_held - count:
            why = f"{own} requests of yours wait for {route.name} to start, as many as others may"
        elif share.count_bytes(waiter.size):
            used = self._budget.used
            why = f"{used} bytes of requests wait for models to start, one more is too much"
        else:
            self._arrived += 1
            waiter.number = self._arrived
            waiter.share = share
            waiting.add(waiter)
            return None
        return ProxyRefusal(
            HTTPStatus.TOO_MANY_REQUESTS, why, "model_starting", route.start_s or SOON_S
        )

    def remove_request(self, waiter: PendingRequest) -> None:
        """Take the request out of the queue; a second call does nothing."""
        self._waiting[waiter.model].discard(waiter)
        if waiter.share is not None:
            waiter.share.give_back()
        if not self._waiting[waiter.model]:
            del self._waiting[waiter.model]

    def waiting(self, model: str) -> list[PendingRequest]:
        """The waiting requests in their order: by priority, then by arrival."""
        return sorted(
            self._waiting.get(model, ()), key=lambda waiter: (waiter.priority, waiter.number)
        )

    def models(self) -> list[str]:
        """The models that requests wait for."""
        return [model for model, waiters in self._waiting.items() if waiters]


def decide(
    route: ModelRoute | None, waiter: PendingRequest, now: float
) -> ForwardCall | WaitForRoute | ProxyRefusal:
    """What a request does now that waits, or has just come. route: None: the model is no more."""
    if route is None:
        message = f"no model {waiter.model!r} any more"
        return ProxyRefusal(HTTPStatus.NOT_FOUND, message, "model_not_found")
    if route.state in ("failed", "off"):
        again_s = (route.retry_s or SOON_S) if route.state == "failed" else None
        message = route.why or f"{route.name} is {route.state}"
        return ProxyRefusal(
            HTTPStatus.SERVICE_UNAVAILABLE, message, f"model_{route.state}", again_s
        )
    if route.state != "ready" and not waiter.works:
        message = (
            f"{route.name} is {route.state}: a request that its engine works for starts it, this"
            " one doesn't"
        )
        again_s = route.start_s or SOON_S
        return ProxyRefusal(
            HTTPStatus.SERVICE_UNAVAILABLE, message, f"model_{route.state}", again_s
        )
    left_s = waiter.since + route.start_timeout_s - now
    if left_s <= 0:
        why = f"{route.name} was not ready within {route.start_timeout_s:g} s"
        message = f"{why}: {route.why}" if route.why else why
        again_s = route.start_s or SOON_S
        return ProxyRefusal(HTTPStatus.SERVICE_UNAVAILABLE, message, "model_starting", again_s)
    retry_s = 0.0 if waiter.tried is None else waiter.tried + TRY_S - now
    if route.state == "ready" and route.socket and retry_s <= 0:
        # A new deployment that has died gets no call twice, also while no server says so.
        draw = waiter.draw if waiter.tried is None else STAYS
        return ForwardCall(socket_of(route, draw))
    waits_s = min(left_s, retry_s) if retry_s > 0 else left_s
    if not waiter.beats:
        return WaitForRoute(waits_s, beat=False)
    first = waiter.since + route.heartbeat_after_s
    due_s = (first if waiter.beaten is None else waiter.beaten + BEAT_S) - now
    if due_s <= 0:
        return WaitForRoute(min(waits_s, BEAT_S), beat=True)
    return WaitForRoute(min(waits_s, due_s), beat=False)


def drawn(call_id: str) -> int:
    """The draw of a call, 0 to 99: the same call draws the same again."""
    return int.from_bytes(blake2b(call_id.encode(), digest_size=8).digest(), "big") % STAYS


def socket_of(route: ModelRoute, draw: int) -> str:
    """The deployment that a call goes to, of a route that is ready."""
    return route.next_socket if draw < route.next_percent else route.socket


def left_s(route: ModelRoute, waiter: PendingRequest, now: float) -> int | None:
    """Seconds that the start still takes, by experience; None without any."""
    return None if route.start_s is None else max(0, ceil(waiter.since + route.start_s - now))


# -- how many there are


@dataclass
class _Count:
    running: int = 0
    held: int = 0
    arrivals: int = 0
    request_s: float = 0.0
    at: float = 0.0

    def tick(self, now: float) -> None:
        self.request_s += (self.running + self.held) * (now - self.at)
        self.at = now


State = Literal["running", "held", "over"]


class RequestCounts:
    """Requests by model and deployment."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}

    def move(
        self,
        model: str,
        socket: str,
        before: State,
        after: State,
        now: float,
        *,
        first: bool = False,
    ) -> None:
        """A request at a deployment goes from one state to another. first: it has just come."""
        count = self._count((model, socket), now)
        count.arrivals += first
        count.running += (after == "running") - (before == "running")
        count.held += (after == "held") - (before == "held")

    def demands(self, now: float) -> tuple[ModelDemand, ...]:
        """The demands since the last call; models without any are left out, and forgotten."""
        found = []
        for model, socket in list(self._counts):
            one = self._count((model, socket), now)
            if one.running or one.held or one.arrivals or one.request_s:
                found.append(
                    ModelDemand(model, one.running, one.held, one.arrivals, one.request_s, socket)
                )
                one.arrivals, one.request_s = 0, 0.0
            else:
                del self._counts[model, socket]
        return tuple(found)

    def states(self) -> dict[str, tuple[int, int]]:
        """Running and held, by model."""
        found: dict[str, tuple[int, int]] = {}
        for (model, _), one in self._counts.items():
            running, held = found.get(model, (0, 0))
            found[model] = (running + one.running, held + one.held)
        return found

    def _count(self, where: tuple[str, str], now: float) -> _Count:
        count = self._counts.setdefault(where, _Count(at=now))
        count.tick(now)
        return count


class CountedRequest:
    """One request in the counts."""

    def __init__(self, counts: RequestCounts, model: str) -> None:
        self._counts = counts
        self._model = model
        self._socket = ""
        self._came = False
        self.state: State = "over"

    def set_state(self, state: State, now: float, socket: str = "") -> None:
        """Change the request's state. Without effect for the same state again.

        socket: the deployment that it is relayed to.
        """
        where = self._socket if state == "over" else socket
        if state == self.state and where == self._socket and self._came:
            return
        if where != self._socket:
            self._counts.move(self._model, self._socket, self.state, "over", now)
            self.state = "over"
        self._counts.move(self._model, where, self.state, state, now, first=not self._came)
        self.state, self._socket, self._came = state, where, True
