"""Requests whose instance is lost or ails run again elsewhere, from the tokens we have.

A run that is given up is one that may still go on where nobody sees it: the instance was
only silent, or it has just handed the request on to a third one. So the next run has an id
of its own (`Entry.run_id`). Nothing of an earlier run can be taken for it, neither here nor
by an engine that still holds something of it, and what such a run puts out is answered
with Discard like any output of a request that is over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvmig.controlplane.messages import Submit
from kvmig.gateway.endings import Endings
from kvmig.gateway.ports import Instances, Observer
from kvmig.gateway.requests import Entry, RequestTable
from kvmig.ground.clock import Clock
from kvmig.ground.errors import NoInstance
from kvmig.ground.faults import FaultConfig

MAX_RUNS = 16
"""Of one request whose tokens get lost though its instances live."""

log = logging.getLogger(__name__)


class Recovery:
    """Finds another instance for the requests of one that is missing, and waits for one."""

    def __init__(
        self,
        table: RequestTable,
        fleet: Instances,
        endings: Endings,
        observer: Observer,
        clock: Clock,
        config: FaultConfig,
        inexact: bool = False,
    ) -> None:
        """inexact: drains may cross numerics classes (`SchedulerConfig.inexact_moves`)."""
        self._inexact = inexact
        self._table = table
        self._fleet = fleet
        self._endings = endings
        self._observer = observer
        self._clock = clock
        self._config = config
        self._missing: dict[str, str] = {}
        """Instance -> what ails it."""
        self._unplaced: dict[str, tuple[Entry, str]] = {}
        """Requests without an instance, and why, by id."""

    @property
    def missing(self) -> list[str]:
        """Instances that ail, or were lost, when last looked at."""
        return list(self._missing)

    def lost(self, instance: str, reason: str) -> None:
        """The connection to it is gone, and what was on its way with it."""
        self._miss(instance, "lost")
        self._leave(self._running(instance), instance, reason)
        self.place()

    def removed(self, instance: str, reason: str, *, crashed: bool) -> None:
        """It is gone for good; one of its name that comes later is another one."""
        if crashed:
            self._miss(instance, "lost")
        self._missing.pop(instance, None)
        self._leave(self._running(instance), instance, reason)
        for entry in self._table:
            if crashed:
                entry.crashes.confirmed(instance)
            else:
                entry.crashes.returned(instance)
        self.place()

    def evacuate(self, instance: str, *, ends: bool = False) -> None:
        """It serves, but shall be empty: a drain has taken too long.

        The launcher says so again and again: nothing is done while no other one serves, nor with
        a request that could go on nowhere else. ends: then it goes on in another numerics class,
        and ends where nobody else has its weights.
        """
        if not self._fleet.others_serve(instance):
            return
        for entry in self._running(instance):
            begun = entry.begun
            if self._inexact or ends:
                begun = begun._replace(numerics="")
            if self._fleet.others_serve(instance, begun):
                self._displace(entry, f"instance {instance} drains")
            elif ends:
                late = f"instance {instance} had to be empty by now (deadline_s)"
                reason = f"{late}, and no other one has {_its_weights(entry)}"
                self._endings.give_up([entry], reason)
        self.place()

    def tick(self) -> None:
        """Look for instances that ail or are well again, and for places."""
        ailing = self._fleet.ailing()
        for instance in [one for one in self._missing if self._fleet.fit(one)]:
            log.warning("instance %s is back, it was %s", instance, self._missing.pop(instance))
            for entry in self._table:
                entry.crashes.returned(instance)
                entry.lost.add(instance)
        for instance, ailment in ailing.items():
            self._miss(instance, ailment)
            if self._fleet.any_fit():
                self._leave_ailing(instance, f"instance {instance} is {ailment}")
        self._leave_lost()
        self.place()

    def moved(self, entry: Entry, destination: str, epoch: int, before: int) -> None:
        """Its source let it go, from `before` on to `epoch`: is it known where it should run?

        The destination's word may have come to the source when this front end had given up
        waiting for it, and shut that epoch out: then it runs nowhere.
        """
        if entry.splicer.fenced(epoch):
            self.run_again([entry], f"instance {destination} answered too late")
            return
        entry.splicer.grant(epoch)
        entry.inherit(destination, before)

    def run_again(self, entries: Sequence[Entry], reason: str) -> None:
        """Tokens of these were lost though their instances live."""
        lasting = [entry for entry in entries if entry.run >= MAX_RUNS]
        self._endings.give_up(lasting, reason)
        for entry in entries:
            if entry.run < MAX_RUNS:
                self._displace(entry, reason)
        self.place()

    def place(self) -> None:
        """Run those that have no instance, as far as there is one: in dispatch's order."""
        now = self._clock()
        waiting = sorted(self._unplaced.values(), key=lambda one: (one[0].priority, one[0].arrived))
        for entry, reason in waiting:
            ended = self._table.entries.get(entry.request_id) is not entry
            if ended or self._settle(entry, reason, now):
                del self._unplaced[entry.request_id]

    # -- leaving an instance

    def _running(self, instance: str) -> list[Entry]:
        return [entry for entry in self._table if entry.instance == instance]

    def _miss(self, instance: str, ailment: str) -> None:
        if instance not in self._missing:
            log.warning("instance %s is %s", instance, ailment)
            self._observer.missing(instance, ailment)
        self._missing[instance] = ailment

    def _leave(self, entries: Sequence[Entry], instance: str, reason: str) -> None:
        now = self._clock()
        for entry in entries:
            entry.crashes.missed(instance, now)
            self._displace(entry, reason)

    def _leave_ailing(self, instance: str, reason: str) -> None:
        """It may come back: those that had better wait for its fate stay there."""
        now = self._clock()
        for entry in self._running(instance):
            entry.crashes.missed(instance, now)
            if entry.crashes.verdict(now, self._config.max_crashes) == "run":
                self._displace(entry, reason)

    def _leave_lost(self) -> None:
        """An instance may be lost before it is known that a request has moved there."""
        alive, now = {None, *self._fleet.alive}, self._clock()
        for entry in self._table:
            if (instance := entry.instance) not in alive and instance is not None:
                if instance in self._missing:
                    entry.crashes.missed(instance, now)
                self._displace(entry, f"instance {instance}, which ran it, is lost")
            elif entry.heir in entry.lost:
                self._displace(entry, f"instance {instance}, where it went, was lost meanwhile")

    def _displace(self, entry: Entry, reason: str) -> None:
        self._endings.abort([entry])
        self._table.next_run(entry, self._clock())
        entry.splicer.restart(entry.owner)
        self._unplaced[entry.request_id] = entry, reason

    # -- coming to another

    def _settle(self, entry: Entry, reason: str, now: float) -> bool:
        """Whether it needs no place any more: it runs, or it has failed."""
        verdict = entry.crashes.verdict(now, self._config.max_crashes)
        if verdict == "poison":
            names = " and ".join(entry.crashes.crashed)
            self._observer.poisoned()
            self._endings.give_up(
                [entry],
                f"instances {names} crashed while they ran this request: it isn't run again",
                retry=False,
            )
            return True
        if verdict == "wait":
            return False
        try:
            self._run(entry)
        except NoInstance:
            waited = now - (entry.unplaced_since or now)
            if waited <= self._config.instance_wait_s:
                return False
            other = f"instance with {_its_weights(entry)}" if entry.begun.weights else "other one"
            self._endings.give_up([entry], f"{reason}, and no {other} was there for {waited:.0f} s")
        return True

    def _run(self, entry: Entry) -> None:
        known = entry.output_token_ids
        tokens = entry.prompt_tokens + len(known)
        instance = self._fleet.dispatch(
            tokens,
            entry.priority,
            Submit(entry.run_id, tuple(known)),
            entry.payload,
            fit=True,
            begun=entry.begun,
        )
        entry.unplaced_since = None
        entry.splicer.restart(instance)
        self._observer.ran_again(tokens)
        log.warning("request %s runs again on %s from token %d", entry.run_id, instance, len(known))


def _its_weights(entry: Entry) -> str:
    return f"the weights that the request began with ({entry.begun.weights})"
