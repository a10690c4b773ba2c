"""A trainer's rounds: answers of very different lengths on four engines, then other weights.

The last answers of a round move onto fewer engines; one that is left empty gives its memory back at
once. Weights are replaced in place between two rounds, and each answer's record has theirs.

python -m examples.rollout
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, Self

import kvmig
from kvmig.core.errors import NotParked
from kvmig.engines.base import EmittedTokens, Frame, TrainableEngine
from kvmig.engines.toy.engine import ToyEngine
from kvmig.engines.toy.script import ScriptFile, ToyScript
from kvmig.kvtransfer.report import MigrationReport
from kvmig.testing.subject import EngineUnderTest

CLIENT = 1
PATIENCE_S = 60.0
"""Longest time in which no answer makes progress."""


class RolloutEngine(TrainableEngine, EngineUnderTest, Protocol):
    """An engine that loads weights, and takes and gives tokens."""


@dataclass
class Answer:
    """The record of an answer, which a trainer keeps."""

    tokens: list[int] = field(default_factory=list)
    weights: set[str] = field(default_factory=set)
    """The identities of the weights that its tokens are of: one."""
    engines: list[str] = field(default_factory=list)
    """Where it ran, in order."""
    finish_reason: str = ""


class RoundFailed(RuntimeError):
    """A round can't be used."""


def pack_tail(left: Mapping[str, Sequence[str]], seats: int) -> list[tuple[str, str, str]]:
    """(answer, source, destination): moves that leave an engine empty; none if no other has room.

    left: the answers that each engine still has. seats: how many it takes at most.
    """
    busy = sorted((name for name in left if left[name]), key=lambda name: len(left[name]))
    if not busy:
        return []
    source, *others = busy
    places = [name for name in reversed(others) for _ in range(seats - len(left[name]))]
    if len(places) < len(left[source]):
        return []
    return [(one, source, place) for one, place in zip(left[source], places, strict=False)]


class RolloutRounds:
    """Engines of one process, which answer in rounds."""

    def __init__(
        self,
        engines: Mapping[str, RolloutEngine],
        seats: int,
        on_free: Callable[[str], None] = lambda name: None,
    ) -> None:
        """seats: answers per engine. on_free: an engine has given its memory back for now."""
        self.engines, self._seats, self._on_free = engines, seats, on_free
        self.reports: list[MigrationReport] = []
        self._migrator = kvmig.Migrator(engines, on_commit=self._assign)
        self._numbers = itertools.count()
        self._running: dict[str, Answer] = {}
        self._parked: set[str] = set()
        self._changed = asyncio.Event()
        self._failed: BaseException | None = None

    async def __aenter__(self) -> Self:
        await self._migrator.__aenter__()
        for name, engine in self.engines.items():
            take = self._migrator.tap(name, partial(self._take, name))
            engine.connect(take, lambda *done: None, self._exited)
            await engine.warm_up()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._migrator.close()
        await asyncio.gather(*(engine.close(5.0) for engine in self.engines.values()))

    async def load_weights(self, source: Path) -> str:
        """Replace the weights of all engines; returns their identity."""
        await self._unpark()
        found = {await engine.load_weights(source) for engine in self.engines.values()}
        if len(found) != 1:
            raise RoundFailed(f"engines have loaded different weights: {found}")
        return found.pop()

    async def answer(self, asked: Sequence[tuple[Sequence[int], int]]) -> list[Answer]:
        """Answer prompts, each with so many tokens; all by the same weights."""
        await self._unpark()
        names = list(self.engines)
        answers = [Answer() for _ in asked]
        for answer, name, (prompt, length) in zip(answers, itertools.cycle(names), asked):
            request_id, engine = f"answer-{next(self._numbers)}", self.engines[name]
            answer.engines.append(name)
            self._running[request_id] = answer
            engine.submit(CLIENT, request_id, engine.encode_request(prompt, length))
        while self._running:
            self._changed.clear()
            await self._pack()
            if self._running:
                await asyncio.wait_for(self._changed.wait(), PATIENCE_S)
            if self._failed is not None:
                raise RoundFailed("an engine has ended") from self._failed
        await self._free_empty()
        used = {identity for one in answers for identity in one.weights}
        if len(used) > 1 or any(one.finish_reason != "length" for one in answers):
            raise RoundFailed(f"weights {used}, ends {[one.finish_reason for one in answers]}")
        return answers

    async def _pack(self) -> None:
        """Free the engines that are empty, and leave another one empty if the others have room."""
        await self._free_empty()
        for request_id, source, destination in pack_tail(self._left(), self._seats):
            if request_id in self._running:
                report = await self._migrator.migrate(request_id, source, destination)
                self.reports.append(report)
        await self._free_empty()

    async def _free_empty(self) -> None:
        left = self._left()
        for name, engine in self.engines.items():
            if not left[name] and name not in self._parked:
                await _park(engine)
                self._parked.add(name)
                self._on_free(name)

    async def _unpark(self) -> None:
        for name in list(self._parked):
            await self.engines[name].unpark()
            self._parked.discard(name)

    def _left(self) -> dict[str, list[str]]:
        left: dict[str, list[str]] = {name: [] for name in self.engines}
        for request_id, answer in self._running.items():
            left[answer.engines[-1]].append(request_id)
        return left

    def _assign(self, request_id: str, destination: str) -> None:
        """The answer goes on there, just now."""
        self.engines[destination].assign(request_id, CLIENT)
        self._running[request_id].engines.append(destination)

    def _take(
        self, name: str, client: int, emitted: list[EmittedTokens], frames: list[Frame]
    ) -> None:
        engine = self.engines[name]
        for one in engine.decode_outputs(frames):
            answer = self._running[one.request_id]
            answer.tokens += one.token_ids
            answer.weights.add(engine.layout.weights)
            answer.finish_reason = one.finish_reason
            if one.finish_reason:
                del self._running[one.request_id]
                self._changed.set()

    def _exited(self, error: BaseException | None) -> None:
        self._failed = error
        self._changed.set()


async def _park(engine: RolloutEngine) -> None:
    """Give its memory back; its last answer may be there for one step more."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await engine.park()
        except NotParked:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.01)


async def main() -> None:
    began = time.monotonic()

    def report_free(name: str) -> None:
        print(f"  {time.monotonic() - began:4.1f} s: engine {name} is empty")

    lengths = [600 // (1 + number) for number in range(32)]
    asked = [(b"Count: 0017 0018", length) for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        async with RolloutRounds({name: ToyEngine() for name in "abcd"}, 16, report_free) as rounds:
            for step in (1, 2):
                weights = Path(folder) / f"step-{step}"
                ScriptFile(str(weights)).write(ToyScript(counts_by=step))
                identity, began = await rounds.load_weights(weights), time.monotonic()
                answers = await rounds.answer(asked)
                moved = sum(len(one.engines) > 1 for one in answers)
                print(f"round {step}: {len(answers)} answers by {identity}, {moved} of them moved")


if __name__ == "__main__":
    asyncio.run(main())
