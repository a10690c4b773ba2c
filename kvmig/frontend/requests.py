"""A live request of this front end, the HTTP call that it belongs to, and the table of all."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kvmig.accounts.allowances import TokenAllowance
from kvmig.asgi.call import HttpCall, current_call
from kvmig.asgi.errors import AmbiguousRequest, RequestFinished, UnknownRequest
from kvmig.engines.base import Frames
from kvmig.frontend.ports import NOT_BEGUN, EngineArithmetic
from kvmig.frontend.splice import StreamSplicer

REMEMBERED = 4096
"""Names of ended requests, up to three of each, that are still known as ended ones."""
PATIENCE_S = 12.0
"""Longest wait for news of missing instances: a launcher ends a silent one after 10 s."""


@dataclass(eq=False, slots=True)
class BeamSearch:
    """A search for one prompt's best answers, of which the engine's application makes a request for
    each step of each beam: to its client, and in the ledger, they are one prompt and its answers.
    """

    width: int
    """Answers that its client gets."""
    prompt: int | None = None
    """Tokens of the prompt, with which the first step begins; later steps have longer ones."""
    output: int = 0
    """Tokens that its steps have decoded, or, once it is over, those of the answers."""

    def begin_step(self, prompt_tokens: int) -> None:
        """Begin a step; the first one's prompt is the search's."""
        if self.prompt is None:
            self.prompt = prompt_tokens

    def finish(self, prompt: int, output: int) -> None:
        """End the search, with the tokens that its client gets."""
        self.prompt, self.output = prompt, output


current_search: ContextVar[BeamSearch | None] = ContextVar("current_search", default=None)
"""The beam search that this task works for."""


@dataclass(slots=True)
class LiveRequest:
    """One live request: one sequence of an HTTP call."""

    request_id: str
    external_id: str
    """The engine's id of the client's request; several sequences may share it."""
    call_id: str
    """The x-request-id of the call."""
    splicer: StreamSplicer
    """The client's stream."""
    prompt_tokens: int
    priority: int
    payload: Frames
    """The request as submitted, to run it again elsewhere."""
    arrived: float
    """Time of arrival, in the router's clock."""
    placed: float = 0.0
    """When its present run was sent to an instance, in the router's clock."""
    call: HttpCall | None = None
    allowance: TokenAllowance[Any] | None = None
    """What pays for its tokens; None: they cost nothing."""
    search: BeamSearch | None = None
    """The beam search that it is a step of."""
    whole: bool = False
    """Whether its client gets no token before the last."""
    logprobs: int = 0
    """Log-probabilities that come with each of its tokens."""
    marks: Sequence[int] = ()
    """Marks of its prompt (`kvmig.core.prefix_marks`), if its session is remembered."""

    # what the client has
    first_at: float | None = None
    """When the first token came, in the router's clock."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache of the first run had."""
    queued_s: float = 0.0
    """Time in the queue of the instance of the first run, as far as the instance measured it."""
    begun: EngineArithmetic = NOT_BEGUN
    """Weights and numerics of the first token: the request goes on under no other weights."""
    output_token_ids: list[int] = field(default_factory=list)
    """Tokens that the client has got: the next run goes on after them."""

    # where it runs
    run: int = 0
    """A run starts with a Submit and goes on by migration, one epoch after the other. The next run
    starts when that one is lost."""
    destination: str | None = None
    """Instance to which this front end's own order moves the request."""
    moved_to: str | None = None
    """Instance that runs the request, as a report says, before any of its tokens has come."""
    moves: int = 0
    """How often the client's stream went over to another instance by migration."""
    moved_from_epoch: int = -1
    """Epoch of the owner that the request left for `moved_to`."""
    unplaced_since: float | None = None
    """Time since which the request has had no instance, in the router's clock."""
    crashes: InstanceCrashes = field(default_factory=lambda: InstanceCrashes())  # noqa: PLW0108 - defined below
    reconnected: set[str] = field(default_factory=set)
    """Instances that were missing during this run and came back: they may have dropped their copy,
    and its tokens may be lost."""

    @property
    def run_id(self) -> str:
        """The request's id at instances, in this run alone."""
        return f"{self.request_id}+{self.run}" if self.run else self.request_id

    @property
    def prompt(self) -> Hashable:
        """What names its prompt among those of its call: several requests may have one."""
        return self.search or self.external_id

    @property
    def position(self) -> int:
        """Tokens that its stream has."""
        return self.splicer.next

    @property
    def owner(self) -> str:
        """The instance whose tokens the client gets."""
        return self.splicer.owner

    @property
    def instance(self) -> str | None:
        """The instance that runs the request, as far as is known; None without one."""
        return None if self.unplaced_since is not None else self.moved_to or self.owner

    @property
    def holders(self) -> set[str]:
        """Every instance that may hold something of the present run."""
        if self.unplaced_since is not None:
            return set()
        return {one for one in (self.owner, self.destination, self.moved_to) if one is not None}

    def note_move(self, to: str, from_epoch: int) -> None:
        """Note a report by which the request went to `to` from the owner of `from_epoch`.

        Reports of a request that moves on and on come from different instances, in any order.
        """
        known = -1 if self.moved_to is None else self.moved_from_epoch
        if from_epoch >= self.splicer.epoch and from_epoch > known:
            self.moved_to, self.moved_from_epoch = to, from_epoch

    def note_switch(self, epoch: int) -> None:
        """The client gets tokens of `epoch` now: reports of moves up to there are no news."""
        self.moves += 1
        if epoch > self.moved_from_epoch:
            self.moved_to = None


Verdict = Literal["run", "wait", "poison"]


@dataclass(slots=True)
class InstanceCrashes:
    """Instances that hung or went while they ran the request. Pure.

    An instance is missing when its connection is lost or it is silent or failed: it may come back.
    Only the launcher, which sees the process, knows that it crashed. A hang is known at once, and
    counts as a crash does, whether the instance comes back or not.
    """

    crashed: list[str] = field(default_factory=list)
    """Names, in the order of their crashes and hangs; one that serves again may be in it again."""
    missing: dict[str, float] = field(default_factory=dict)
    """Name -> since when."""
    hangs: int = 0
    """How many of `crashed` are hangs."""
    judged: dict[str, int] = field(default_factory=dict)
    """Name -> the run of the request during which it last hung: that run counts once there."""

    def missed(self, instance: str, now: float, run: int) -> None:
        """The instance is missing, and this run of the request was there."""
        if self.judged.get(instance) != run:
            self.missing.setdefault(instance, now)

    def hung(self, instance: str, run: int, *, blamed: bool) -> None:
        """The instance hangs while it has this run of the request.

        blamed: whether the request was there before the hang began.
        """
        if self.judged.get(instance) == run:
            return
        self.judged[instance] = run
        self.missing.pop(instance, None)
        if blamed:
            self.crashed.append(instance)
            self.hangs += 1

    def returned(self, instance: str) -> None:
        """The instance is back. Unknown ones are ignored."""
        self.missing.pop(instance, None)

    def confirmed(self, instance: str) -> None:
        """The instance has crashed. Ignored if it wasn't missing: the request didn't run there."""
        if self.missing.pop(instance, None) is not None:
            self.crashed.append(instance)

    def sentence(self) -> str:
        """What became of the instances."""
        how = "crashed"
        if self.hangs:
            how = "hung" if self.hangs == len(self.crashed) else "hung or crashed"
        who = f"instance{'s' * (len(self.crashed) > 1)} {' and '.join(self.crashed)}"
        return f"{who} {how} while {'they' if len(self.crashed) > 1 else 'it'} ran this request"

    def decide(self, now: float, most: int) -> Verdict:
        """Whether the request may run on a further instance; `most` crashes make it poison.

        With as many missing as would make it poison, the request waits until their fate is known,
        so that it takes no further instance along; but no longer than PATIENCE_S.
        """
        if len(self.crashed) >= most:
            return "poison"
        if not self.missing or len(self.crashed) + len(self.missing) < most:
            return "run"
        return "wait" if now - max(self.missing.values()) < PATIENCE_S else "run"


def sequences_of_call() -> int:
    """How many sequences the call asks for that this task works for."""
    call = current_call.get()
    return 1 if call is None else call.sequences


def is_tenants_call() -> bool:
    """Whether that call is of a fleet's client, whose key the fleet's proxy has checked."""
    call = current_call.get()
    return call is not None and bool(call.account)


def priority_of_call(asked: int) -> int:
    """The priority of a request of that call. asked: as the engine's application found it, which
    reads the header on some of its routes only."""
    call = current_call.get()
    return asked if call is None or call.priority is None else call.priority


class RequestObserver(Protocol):
    """Learns when each request begins and ends: `kvmig.frontend.meter.UsageMeter`."""

    def began(self, request: LiveRequest) -> None:
        """The request is in the table now."""

    def ended(self, request: LiveRequest, failed: bool) -> None:
        """The request has left the table. failed: its client gets an error."""


class RunObserver(RequestObserver, Protocol):
    """Learns of each run, too: `kvmig.frontend.request_traces.RequestTraces`."""

    def lost_run(self, request: LiveRequest, run_id: str, now: float) -> None:
        """The run is given up, and the request has no instance until the next one."""

    def ran_again(self, request: LiveRequest, instance: str, tokens: int, now: float) -> None:
        """The next run is on its way to an instance, which recomputes that number of tokens."""

    def trace_id(self, run_id: str) -> str:
        """The id of a run's trace; empty: it has none."""


def ignore_ended(request: LiveRequest) -> None:
    """Remember nothing of a request that has ended."""


class RequestTable:
    """Live requests by id, and the ids of those that ended lately."""

    def __init__(
        self, meter: RequestObserver | None = None, traces: RunObserver | None = None
    ) -> None:
        """meter: learns of every request. traces: learns of each run, too; None: none are made."""
        self._meter = meter
        self.traces = traces
        self.on_ended: Callable[[LiveRequest], None] = ignore_ended
        """Called with each request that has ended without an error."""
        self.live: dict[str, LiveRequest] = {}
        """Live requests by request id; read only."""
        self.runs: dict[str, LiveRequest] = {}
        """Live requests by run id, which is what instances know; read only."""
        self._calls: defaultdict[str, set[str]] = defaultdict(set)
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(tuple(self.live.values()))

    def __len__(self) -> int:
        return len(self.live)

    def add(self, request: LiveRequest) -> None:
        """Raises ValueError if the id is taken: engines never use one twice."""
        if request.request_id in self.live:
            raise ValueError(f"request {request.request_id} is running already")
        self.live[request.request_id] = self.runs[request.run_id] = request
        for name in {request.call_id, request.external_id}:
            self._calls[name].add(request.request_id)
        if request.call is not None:
            request.call.submitted(request.request_id)
        if self._meter is not None:
            self._meter.began(request)
        if self.traces is not None:
            self.traces.began(request)

    def remove(self, request_id: str, *, failed: bool = False) -> LiveRequest | None:
        """Forget an ended request; None if it isn't here. failed: its client gets an error."""
        request = self.live.pop(request_id, None)
        if request is None:
            return None
        del self.runs[request.run_id]
        if request.call is not None:
            request.call.ended(request_id)
        if self._meter is not None:
            self._meter.ended(request, failed)
        if self.traces is not None:
            self.traces.ended(request, failed)
        if not failed:
            self.on_ended(request)
        names = {request.call_id, request.external_id}
        for name in names:
            self._calls[name].discard(request_id)
            if not self._calls[name]:
                del self._calls[name]
        for name in (request_id, *names):
            self._ended[name] = None
            self._ended.move_to_end(name)
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        return request

    def next_run(self, request: LiveRequest, now: float) -> None:
        """Give the present run up: nothing of it counts any more, and no instance has the next."""
        lost = request.run_id
        del self.runs[lost]
        request.run += 1
        self.runs[request.run_id] = request
        if self.traces is not None:
            self.traces.lost_run(request, lost, now)
        request.moved_to = request.destination = None
        request.reconnected = set()
        if request.unplaced_since is None:
            request.unplaced_since = now

    def find(self, any_id: str) -> LiveRequest:
        """Find a request by its id, external id or call id.

        Raises UnknownRequest, RequestFinished or AmbiguousRequest.
        """
        if any_id in self.live:
            return self.live[any_id]
        found = self._calls.get(any_id, set())
        if len(found) == 1:
            return self.live[next(iter(found))]
        if found:
            names = ", ".join(sorted(found))
            raise AmbiguousRequest(f"{any_id} has {len(found)} live sequences, name one: {names}")
        if any_id in self._ended:
            raise RequestFinished(f"request {any_id} has finished")
        raise UnknownRequest(f"there is no request {any_id}")


_EXTERNAL = re.compile(r"cmpl-(?P<completion>.+)-\d+|chatcmpl-(?P<chat>.+)", re.DOTALL)


def call_of(external_id: str) -> str:
    """The x-request-id in an engine's external id; the id itself where none is known to be.

    vLLM makes `cmpl-X-0` (prompt 0 of a completion) and `chatcmpl-X` of it.
    """
    found = _EXTERNAL.fullmatch(external_id)
    return (found["completion"] or found["chat"]) if found else external_id
