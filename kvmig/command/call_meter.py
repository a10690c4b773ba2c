"""What each call of a deployment has used, for its records. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvmig.accounts.usage import UsageRecord
from kvmig.asgi.call import HttpCall
from kvmig.asgi.metered_call import MeteredCall
from kvmig.command.answer_count import AnswerCount


@dataclass(eq=False)
class CountedCall(MeteredCall):
    """A call of a command's server."""

    entered: float
    """When it began, by a steady clock."""
    count: AnswerCount | None = None
    """What its answer says; None: no server has it."""
    attempts: int = 0
    """Servers that got it."""


class CallMeter:
    """Counts for one deployment."""

    def __init__(self, model: str, wall: Callable[[], float], clock: Callable[[], float]) -> None:
        """model: its name in records. wall: Unix time. clock: a steady one."""
        self.model = model
        self._wall = wall
        self._clock = clock
        self._next = 1
        self._calls: dict[HttpCall, CountedCall] = {}

    def enter(self, call: HttpCall) -> CountedCall:
        """The call's count, which begins now unless it has begun."""
        found = self._calls.get(call)
        if found is None:
            found = self._calls[call] = CountedCall(self._next, self._wall(), self._clock())
            self._next += 1
        return found

    def take_records(self) -> list[UsageRecord]:
        """Records of all calls; those that are over are let go."""
        records = [self._record(call, found) for call, found in self._calls.items()]
        for call in [one for one in self._calls if one.over]:
            del self._calls[call]
        return records

    def _record(self, call: HttpCall, found: CountedCall) -> UsageRecord:
        count = None if call.refused else found.count
        return msgspec.structs.replace(
            found.begin_record(call, self.model, self._wall() if call.over else None),
            prompt=0 if count is None else count.prompt,
            cached=0 if count is None else min(count.prompt, count.cached),
            output=0 if count is None else count.output,
            characters=0 if count is None else count.characters,
            seconds=0 if count is None else count.seconds,
            images=0 if count is None else count.images,
            sequences=call.sequences,
            reruns=max(0, found.attempts - 1),
        )
