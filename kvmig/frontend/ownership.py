"""Which instance runs a request, what becomes of it when that one is lost, and how it ends.

A request whose instance is lost or unhealthy runs again elsewhere, from the tokens that the client
has. A run that is given up may still go on unseen: the instance was only silent, or it has just
handed the request on to a third one. So the next run has an id of its own (`LiveRequest.run_id`).
Nothing of an earlier run can be taken for it, neither here nor by an engine that still holds
something of it, and outputs of such a run are answered with Discard like any unknown output.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvmig.asgi.errors import InstanceLost
from kvmig.controlplane.messages import AbortRequests, Discard, OutputSpan, Resolve, Submit
from kvmig.core.config import FaultConfig
from kvmig.core.errors import Failure, NoInstance
from kvmig.frontend.ports import DispatchOrder, InstancePort, RouterObserver
from kvmig.frontend.requests import LiveRequest, RequestTable
from kvmig.frontend.splice import Action, OwnerSwitched, StaleCopy, StreamGap
from kvmig.rpc.messages import RpcMessage

MAX_RUNS = 16
"""Most runs of one request whose tokens get lost though its instances live."""
REMEMBERED = 4096
"""Discards of unknown outputs that aren't sent a second time."""

Owner = Literal["source", "destination", "nobody"]
"""The owner of a request after a migration whose Commit got no answer."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class RequestOwnership:
    """Keeps every request of the table on one instance, or waits for one, or ends it."""

    table: RequestTable
    instances: InstancePort
    fail: Callable[[Sequence[str], str, Failure], None]
    """`RequestStreams.fail`."""
    observer: RouterObserver
    clock: Callable[[], float]
    config: FaultConfig
    inexact: bool = False
    """Whether drains may cross numerics classes (`SchedulerConfig`)."""
    missing: dict[str, str] = field(default_factory=dict, init=False)
    """Instance -> what is wrong with it, or lost; as last looked at."""
    _unplaced: dict[str, tuple[LiveRequest, str]] = field(default_factory=dict, init=False)
    """Requests without an instance, and why, by id."""
    _discarded: OrderedDict[tuple[str, str, int], None] = field(
        default_factory=OrderedDict, init=False
    )
    """Unknown outputs that were answered: instance, run id, epoch."""

    # -- what outputs lead to

    def act(self, request: LiveRequest, action: Action) -> None:
        """Carry out what the request's splicer asks for."""
        match action:
            case StaleCopy(instance, epoch):
                if self.send_quietly(instance, Discard(request.run_id, epoch)):
                    request.splicer.mark_discarded(action)
            case OwnerSwitched(_, _, epoch, gap_s):
                request.note_switch(epoch)
                self.observer.switched(gap_s)
            case StreamGap(reason):
                self.run_again([request], reason)

    def stop_unknown_output(self, instance: str, span: OutputSpan, last: bool) -> None:
        """Discard this copy at the instance, once. last: no more will come."""
        key = (instance, span.request_id, span.epoch)
        if last or key in self._discarded:
            return
        if self.send_quietly(instance, Discard(span.request_id, span.epoch)):
            self._discarded[key] = None
            if len(self._discarded) > REMEMBERED:
                self._discarded.popitem(last=False)

    # -- migrations

    def moved(self, request: LiveRequest, destination: str, epoch: int, before: int) -> None:
        """The source let the request go: `before` was its epoch, `epoch` is the destination's.

        The destination's word may have come to the source when this front end had given up
        waiting for it, and fenced that epoch: then the request runs nowhere.
        """
        if request.splicer.fenced(epoch):
            self.run_again([request], f"instance {destination} answered too late")
            return
        request.splicer.grant(epoch)
        request.note_move(destination, before)

    def owner(self, question: Resolve) -> Owner | None:
        """The answer to `Resolve`, which never changes; None: ask the destination first.

        The source has suspended the request and its Commit got no answer. On the wire, `nobody` is
        `Resolved.moved` like `destination`: either way the source shall free its copy.
        """
        request = self.table.runs.get(question.request_id)
        if request is None:  # ended, or runs again elsewhere
            self._discard(question)
            return "nobody"
        if request.splicer.fenced(question.epoch):
            return "source"
        return "destination" if request.splicer.reached(question.epoch) else None

    def decide(self, question: Resolve, committed: bool) -> Owner:
        """The answer to `Resolve`, now that the destination said, or can't say, that it committed.

        Without its word the epoch is fenced: no token of it ever reaches the client.
        """
        request = self.table.runs.get(question.request_id)
        if request is None:
            self._discard(question)
            return "nobody"
        if committed:
            request.splicer.grant(question.epoch)
            request.note_move(question.destination, question.epoch - 1)
            return "destination"
        if not request.splicer.fence(question.epoch):
            return "destination"  # its tokens came while we asked
        self._discard(question)
        return "source"

    def _discard(self, question: Resolve) -> None:
        self.send_quietly(question.destination, Discard(question.request_id, question.epoch))

    # -- instances that go, and come back

    def lost(self, instance: str, reason: str) -> None:
        """The connection is gone, and what was on its way with it."""
        self._miss(instance, "lost")
        self._leave(self._running(instance), instance, reason)
        self.place()

    def removed(self, instance: str, reason: str, *, crashed: bool) -> None:
        """The instance is gone for good; one of its name that comes later is another one."""
        if crashed:
            self._miss(instance, "lost")
        self.missing.pop(instance, None)
        self._leave(self._running(instance), instance, reason)
        for request in self.table:
            if crashed:
                request.crashes.confirmed(instance)
            else:
                request.crashes.returned(instance)
        self.place()

    def evacuate(self, instance: str, *, ends: bool = False) -> None:
        """Run the instance's requests elsewhere, by recompute: its drain has taken too long.

        The launcher repeats it: nothing is done while no other one serves, nor with
        a request that could go on nowhere else. ends: such a request goes on in another numerics
        class, and ends where no other has its weights.
        """
        if not self.instances.others_serve(instance):
            return
        for request in self._running(instance):
            begun = request.begun
            if self.inexact or ends:
                begun = begun._replace(numerics="")
            if self.instances.others_serve(instance, begun):
                self._displace(request, f"instance {instance} drains")
            elif ends:
                late = f"instance {instance} had to be empty by now (deadline_s)"
                reason = f"{late}, and no other one has {_its_weights(request)}"
                self.give_up([request], reason)
        self.place()

    def tick(self) -> None:
        """Look for instances that are unhealthy or well again, and for places."""
        ailing = self.instances.unhealthy_instances()
        for instance in [one for one in self.missing if self.instances.is_healthy(one)]:
            log.warning("instance %s is back, it was %s", instance, self.missing.pop(instance))
            for request in self.table:
                request.crashes.returned(instance)
                request.reconnected.add(instance)
        for instance, ailment in ailing.items():
            if ailment == "hung" and self.missing.get(instance) != "hung":
                self._blame_for_hang(instance)
            self._miss(instance, ailment)
            self._leave_ailing(instance, f"instance {instance} is {ailment}")
        self._leave_lost()
        self.place()

    def _running(self, instance: str) -> list[LiveRequest]:
        """The requests that run there, as far as is known. Tokens from there that wait for those of
        the instance before show it, too; once they are the client's, the loss is past."""
        return [
            request
            for request in self.table
            if request.instance == instance or request.splicer.holds(instance)
        ]

    def _miss(self, instance: str, ailment: str) -> None:
        if instance not in self.missing:
            log.warning("instance %s is %s", instance, ailment)
            self.observer.missing(instance, ailment)
        self.missing[instance] = ailment

    def _leave(self, requests: Sequence[LiveRequest], instance: str, reason: str) -> None:
        now = self.clock()
        for request in requests:
            request.crashes.missed(instance, now, request.run)
            self._displace(request, reason)

    def _blame_for_hang(self, instance: str) -> None:
        """A step has been running for `step_timeout_s`, as far as the instance can measure it: who
        came during it isn't to blame.
        """
        began = self.clock() - self.config.step_timeout_s / 2
        for request in self._running(instance):
            request.crashes.hung(instance, request.run, blamed=request.placed <= began)

    def _leave_ailing(self, instance: str, reason: str) -> None:
        """The instance may come back: requests that had better wait for its fate stay there, and
        all do that have nowhere to go.
        """
        now, fit = self.clock(), self.instances.any_healthy()
        for request in self._running(instance):
            if fit:
                request.crashes.missed(instance, now, request.run)
            verdict = request.crashes.decide(now, self.config.max_crashes)
            if verdict == "poison" or (fit and verdict == "run"):
                self._displace(request, reason)

    def _leave_lost(self) -> None:
        """An instance may be lost before it is known that a request has moved there."""
        alive, now = {None, *self.instances.alive}, self.clock()
        for request in self.table:
            if (instance := request.instance) not in alive and instance is not None:
                if instance in self.missing:
                    request.crashes.missed(instance, now, request.run)
                self._displace(request, f"instance {instance}, which ran it, is lost")
            elif request.moved_to in request.reconnected:
                self._displace(request, f"instance {instance}, where it went, was lost meanwhile")

    # -- another run

    def run_again(self, requests: Sequence[LiveRequest], reason: str) -> None:
        """Tokens of these were lost though their instances live."""
        self.give_up([request for request in requests if request.run >= MAX_RUNS], reason)
        for request in requests:
            if request.run < MAX_RUNS:
                self._displace(request, reason)
        self.place()

    def _displace(self, request: LiveRequest, reason: str) -> None:
        self.abort([request])
        self.table.next_run(request, self.clock())
        request.splicer.restart(request.owner)
        self._unplaced[request.request_id] = request, reason

    def place(self) -> None:
        """Run those that have no instance, as far as there is one: in dispatch's order."""
        now = self.clock()
        waiting = sorted(self._unplaced.values(), key=lambda one: (one[0].priority, one[0].arrived))
        for request, reason in waiting:
            ended = self.table.live.get(request.request_id) is not request
            if ended or self._settle(request, reason, now):
                del self._unplaced[request.request_id]

    def _settle(self, request: LiveRequest, reason: str, now: float) -> bool:
        """Whether the request needs no place any more: it runs, or it has failed."""
        verdict = request.crashes.decide(now, self.config.max_crashes)
        if verdict == "poison":
            self.observer.poisoned()
            told = f"{request.crashes.sentence()}: it isn't run again"
            self.give_up([request], told, "final")
            return True
        if verdict == "wait":
            return False
        try:
            self._run(request)
        except NoInstance:
            waited = now - (request.unplaced_since or now)
            if waited <= self.config.failover_timeout_s:
                return False
            other = "other one"
            if request.begun.weights:
                other = f"instance with {_its_weights(request)}"
            self.give_up([request], f"{reason}, and no {other} was there for {waited:.0f} s")
        except Exception:
            # Else it would be tried, and fail, again and again, before all that wait behind it.
            log.exception("request %s can't be run again", request.run_id)
            self.give_up([request], f"{reason}, and it could not be run again", "final")
        return True

    def _run(self, request: LiveRequest) -> None:
        known = request.output_token_ids
        tokens = request.prompt_tokens + len(known)
        submit = Submit(request.run_id, tuple(known))
        instance = self.instances.dispatch(
            DispatchOrder(
                tokens, request.priority, submit, request.payload, fit=True, begun=request.begun
            )
        )
        request.unplaced_since, request.placed = None, self.clock()
        request.splicer.restart(instance)
        self.observer.ran_again(tokens)
        trace_id = ""
        if (traces := self.table.traces) is not None:
            traces.ran_again(request, instance, tokens, request.placed)
            trace_id = traces.trace_id(request.run_id)
        log.warning(
            "request %s runs again on %s from token %d%s",
            request.run_id,
            instance,
            len(known),
            f" trace_id={trace_id}" if trace_id else "",
        )

    # -- ends before the last token

    def give_up(
        self, requests: Sequence[LiveRequest], reason: str, kind: Failure = "retry"
    ) -> None:
        """End requests that can't go on."""
        if not requests:
            return
        for request in requests:
            self.table.remove(request.request_id, failed=True)
        self.abort(requests)
        self.fail([request.request_id for request in requests], reason, kind)

    def abort(self, requests: Iterable[LiveRequest]) -> None:
        """End the present run of each, wherever it may be."""
        runs: defaultdict[str, list[str]] = defaultdict(list)
        for request in requests:
            for instance in request.holders:
                runs[instance].append(request.run_id)
        for instance, run_ids in runs.items():
            self.send_quietly(instance, AbortRequests(run_ids))

    def send_quietly(self, instance: str, message: RpcMessage) -> bool:
        """Send a message that a lost instance needn't have: its requests are gone with it.

        Whether it could be sent.
        """
        try:
            self.instances.send(instance, message)
        except InstanceLost:
            return False
        return True


def _its_weights(request: LiveRequest) -> str:
    return f"the weights that the request began with ({request.begun.weights})"
