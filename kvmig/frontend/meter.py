"""What each call uses, counted where tokens are spliced: moves and re-runs count once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import msgspec

from kvmig.accounts.usage import UsageRecord
from kvmig.asgi.answer_usage import CallUsage
from kvmig.asgi.call import HttpCall
from kvmig.asgi.metered_call import MeteredCall
from kvmig.frontend.requests import BeamSearch, LiveRequest


@dataclass(eq=False)
class _Metered(MeteredCall):
    """A call of which something is live, or whose end isn't written yet."""

    live: dict[str, LiveRequest] = field(default_factory=dict)
    prompts: dict[Hashable, int] = field(default_factory=dict)
    """Prompt tokens by `LiveRequest.prompt`, which several answers may share."""
    cached: dict[Hashable, int] = field(default_factory=dict)
    """Cached tokens of prompts with a first token, as of their first computation."""
    searches: set[BeamSearch] = field(default_factory=set)
    output: int = 0
    """Output tokens of ended sequences, except for steps of beam searches."""
    sequences: int = 0
    moves: int = 0
    reruns: int = 0
    changed: bool = True


class UsageMeter:
    """Counts for one front end. The `RequestTable` reports its requests."""

    def __init__(self, model: str, wall: Callable[[], float]) -> None:
        """model: what it is called in records. wall: Unix time."""
        self.model = model
        self._wall = wall
        self._next = 1
        self._calls: dict[HttpCall, _Metered] = {}

    def began(self, request: LiveRequest) -> None:
        """A call has one more sequence."""
        call = request.call
        if call is None:  # not of a client
            return
        found = self._found(call)
        found.live[request.request_id] = request
        search = request.search
        if search is None:
            found.prompts[request.prompt] = request.prompt_tokens
            found.sequences += 1
        else:
            search.begin_step(request.prompt_tokens)
            if search not in found.searches:
                found.sequences += search.width
                found.searches.add(search)
        found.changed = True

    def enter(self, call: HttpCall) -> tuple[int, float]:
        """The number of a call's record, and when it began (Unix time)."""
        found = self._found(call)
        return found.seq, found.began

    def _found(self, call: HttpCall) -> _Metered:
        found = self._calls.get(call)
        if found is None:
            found = self._calls[call] = _Metered(self._next, self._wall())
            self._next += 1
        return found

    def ended(self, request: LiveRequest, failed: bool) -> None:
        """A sequence gets no more tokens. failed: but an error."""
        found = None if request.call is None else self._calls.get(request.call)
        if found is None or found.live.pop(request.request_id, None) is None:
            return
        if request.search is None:
            found.output += request.splicer.next
        else:
            request.search.output += request.splicer.next
        found.moves += request.moves
        found.reruns += request.run
        found.failed = found.failed or failed
        self._note_first(found, request)
        found.changed = True

    def take_records(self) -> list[UsageRecord]:
        """Records of all calls of which something has changed since; the ended ones are let go."""
        records = []
        for call, found in list(self._calls.items()):
            running = sum(one.splicer.next for one in found.live.values())
            for one in found.live.values():
                self._note_first(found, one)
            over = call.over and not found.live
            if over or found.changed or running:
                records.append(self._record(call, found, running, over))
            found.changed = False
            if over:
                del self._calls[call]
        return records

    def _note_first(self, found: _Metered, request: LiveRequest) -> None:
        if request.first_at is None:
            return
        found.cached.setdefault(request.prompt, request.cached_tokens)
        if found.ttft_ms is None:
            found.ttft_ms = (request.first_at - request.arrived) * 1e3

    def _record(self, call: HttpCall, found: _Metered, running: int, over: bool) -> UsageRecord:
        live = found.live.values()
        used = _due(call, found) if over else _so_far(found, running)
        return msgspec.structs.replace(
            found.begin_record(call, self.model, self._wall() if over else None),
            prompt=used.prompt,
            cached=min(used.prompt, sum(found.cached.values())),
            output=used.output,
            seconds=0 if call.refused else call.seconds,
            sequences=found.sequences,
            moves=found.moves + sum(one.moves for one in live),
            reruns=found.reruns + sum(one.run for one in live),
        )


def _so_far(found: _Metered, running: int) -> CallUsage:
    """The usage of all that has begun. running: tokens of what is live."""
    prompts = sum(found.prompts.values()) + sum(one.prompt or 0 for one in found.searches)
    return CallUsage(prompts, found.output + running + sum(one.output for one in found.searches))


def _due(call: HttpCall, found: _Metered) -> CallUsage:
    """What a call that is over has used: nothing, if it was answered with an error; what its answer
    says; or what its client was sent until it left or something failed."""
    if call.refused:
        return CallUsage(0, 0)
    if call.told is not None and call.answered:
        return call.told
    if not found.failed or call.left:
        return _so_far(found, 0)
    begun = _so_far(found, 0)
    unused = sum(tokens for one, tokens in found.prompts.items() if one not in found.cached)
    unused += sum(one.prompt or 0 for one in found.searches if one not in found.cached)
    return begun._replace(prompt=begun.prompt - unused)
