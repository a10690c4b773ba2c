"""The live requests of this front end, found by their own id or by their call's."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvmig.gateway.caller import Caller
from kvmig.gateway.crashes import Crashes
from kvmig.gateway.errors import AmbiguousRequest, RequestFinished, UnknownRequest
from kvmig.gateway.ports import NOT_BEGUN, Arithmetic
from kvmig.gateway.splice import Splicer
from kvmig.kvtransfer.wire import Frame

REMEMBERED = 4096
"""Ended requests that are still told apart from unknown ones."""

_EXTERNAL = re.compile(r"cmpl-(?P<completion>.+)-\d+|chatcmpl-(?P<chat>.+)", re.DOTALL)


def call_of(external_id: str) -> str:
    """The x-request-id in an engine's external id; the id itself where none is known to be.

    vLLM makes `cmpl-X-0` (prompt 0 of a completion) and `chatcmpl-X` of it.
    """
    found = _EXTERNAL.fullmatch(external_id)
    return (found["completion"] or found["chat"]) if found else external_id


@dataclass(slots=True)
class Entry:
    """One live request (one sequence of a call)."""

    request_id: str
    external_id: str
    """The engine's id of what the client asked for: several sequences may share it."""
    call_id: str
    splicer: Splicer
    prompt_tokens: int
    priority: int
    payload: Sequence[Frame]
    """As submitted, so that it can run again elsewhere."""
    arrived: float
    """In the router's clock."""
    caller: Caller | None = None
    """Whose it is."""
    destination: str | None = None
    """Where it is being moved to, when this front end asked for it."""
    first_at: float | None = None
    """When its first token came, in the router's clock."""
    heir: str | None = None
    """Who is known to run it now, though none of its tokens has come yet."""
    bequeathed: int = -1
    """Under which epoch it ran at the instance that it went to the heir from."""
    begun: Arithmetic = NOT_BEGUN
    """By what its first token was computed: it goes on under no other weights."""
    output_token_ids: list[int] = field(default_factory=list)
    """What the client has got: from there it runs again when its instance is lost."""
    run: int = 0
    """A run starts with a Submit and goes on by migration, one epoch after the other; the next
    one starts when that is lost."""
    unplaced_since: float | None = None
    """Since when it has had no instance to run on; in the router's clock."""
    crashes: Crashes = field(default_factory=Crashes)
    lost: set[str] = field(default_factory=set)
    """Instances that came back during this run: what they had of it then, they may have dropped,
    and tokens of it that nobody expected may be lost."""

    @property
    def run_id(self) -> str:
        """Its id at instances, of this run alone."""
        return f"{self.request_id}+{self.run}" if self.run else self.request_id

    @property
    def instance(self) -> str | None:
        """Where it runs, as far as is known; None without an instance."""
        return None if self.unplaced_since is not None else self.heir or self.owner

    @property
    def owner(self) -> str:
        """The instance that runs it, as far as the client has seen."""
        return self.splicer.owner

    @property
    def holders(self) -> set[str]:
        """Every instance that may hold something of its present run."""
        if self.unplaced_since is not None:
            return set()
        return {one for one in (self.owner, self.destination, self.heir) if one is not None}

    def inherit(self, heir: str, epoch: int) -> None:
        """It went to `heir`, from where it ran under `epoch`.

        What different instances tell of a request that moves on and on comes in any order.
        """
        known = -1 if self.heir is None else self.bequeathed
        if epoch >= self.splicer.epoch and epoch > known:
            self.heir, self.bequeathed = heir, epoch

    def reached(self, epoch: int) -> None:
        """The client gets tokens of `epoch` now: whoever it came from is no news any more."""
        if epoch > self.bequeathed:
            self.heir = None


class RequestTable:
    """All live requests, and the ids of those that ended lately."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        """By request id; read only."""
        self.runs: dict[str, Entry] = {}
        """By run id, which is what instances know; read only."""
        self._calls: defaultdict[str, set[str]] = defaultdict(set)
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self.entries.values()))

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entry: Entry) -> None:
        """Raises ValueError if the id is taken: engines never use one twice."""
        if entry.request_id in self.entries:
            raise ValueError(f"request {entry.request_id} is running already")
        self.entries[entry.request_id] = self.runs[entry.run_id] = entry
        for name in {entry.call_id, entry.external_id}:
            self._calls[name].add(entry.request_id)
        if entry.caller is not None:
            entry.caller.submitted(entry.request_id)

    def remove(self, request_id: str) -> Entry | None:
        """Forget an ended request; None if it isn't here."""
        entry = self.entries.pop(request_id, None)
        if entry is None:
            return None
        del self.runs[entry.run_id]
        if entry.caller is not None:
            entry.caller.ended(request_id)
        names = {entry.call_id, entry.external_id}
        for name in names:
            self._calls[name].discard(request_id)
            if not self._calls[name]:
                del self._calls[name]
        for name in (request_id, *names):
            self._ended[name] = None
            self._ended.move_to_end(name)
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        return entry

    def next_run(self, entry: Entry, now: float) -> None:
        """Its present run is lost: nothing of it counts any more, and it has no instance."""
        del self.runs[entry.run_id]
        entry.run += 1
        self.runs[entry.run_id] = entry
        entry.heir = entry.destination = None
        entry.lost = set()
        if entry.unplaced_since is None:
            entry.unplaced_since = now

    def find(self, any_id: str) -> Entry:
        """By request id, external id or call id.

        Raises UnknownRequest, RequestFinished or AmbiguousRequest.
        """
        if any_id in self.entries:
            return self.entries[any_id]
        live = self._calls.get(any_id, set())
        if len(live) == 1:
            return self.entries[next(iter(live))]
        if live:
            names = ", ".join(sorted(live))
            raise AmbiguousRequest(f"{any_id} has {len(live)} live sequences, name one: {names}")
        if any_id in self._ended:
            raise RequestFinished(f"request {any_id} has finished")
        raise UnknownRequest(f"there is no request {any_id}")
