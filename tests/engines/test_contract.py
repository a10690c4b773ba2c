"""An adapter that breaks the Engine port's contract is told which rule, and the request is safe."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from kvmig.core.errors import ContractViolation
from kvmig.engines.base import EmittedTokens, Frame, RequestExport, RequestTail, StagedBlocks
from kvmig.engines.checked import RULES, CheckedServingEngine
from kvmig.engines.toy.engine import ToyEngine
from kvmig.engines.transformers.payload import StepOutput
from kvmig.kvtransfer.report import MigrationReport
from kvmig.migrator import Migrator

PROMPT, LENGTH = list(range(43)), 60


@dataclass
class Pair:
    """Two toys in their wrappers, and what their requests put out."""

    a: CheckedServingEngine
    b: CheckedServingEngine
    migrator: Migrator
    tokens: dict[str, list[int]]

    def submit(self, request_id: str, prompt: Sequence[int] = PROMPT) -> None:
        payload = ToyEngine.encode_request(self.a, prompt, LENGTH)  # type: ignore[arg-type]
        self.a.submit(1, request_id, payload)

    async def reach(self, request_id: str, count: int) -> list[int]:
        async with asyncio.timeout(20):
            while len(self.tokens.get(request_id, ())) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return self.tokens[request_id]

    @property
    def rules(self) -> set[str]:
        return {one.rule for one in (*self.a.violations, *self.b.violations)}


@asynccontextmanager
async def pair(a: ToyEngine, b: ToyEngine) -> AsyncIterator[Pair]:
    tokens: dict[str, list[int]] = {}

    def take(client: int, emitted: list[EmittedTokens], frames: list[Frame]) -> None:
        for one in a.decode_outputs(frames):
            tokens.setdefault(one.request_id, []).extend(one.token_ids)

    checked = {"a": CheckedServingEngine(a, content=True), "b": CheckedServingEngine(b, True)}
    migrator = Migrator(
        checked, on_commit=lambda request_id, name: checked[name].assign(request_id, 1)
    )
    for name, engine in checked.items():
        engine.connect(migrator.tap(name, take), lambda *done: None, lambda error: None)
    try:
        yield Pair(checked["a"], checked["b"], migrator, tokens)
    finally:
        await migrator.close()
        await asyncio.gather(a.close(5), b.close(5))


async def moved(a: ToyEngine, b: ToyEngine) -> tuple[MigrationReport, Pair, bool]:
    """Report, and whether the request got the tokens of one that stayed."""
    async with pair(a, b) as them:
        them.submit("stays")
        expected = list(await them.reach("stays", LENGTH))
        them.submit("moves")
        await them.reach("moves", 5)
        report = await them.migrator.migrate("moves", "a", "b")
        await them.reach("moves", LENGTH)
        await asyncio.sleep(0.01)
        return report, them, them.tokens["moves"] == expected


class SourceBug(ToyEngine):
    """Tells or does something wrong, as `bug` has it."""

    stage_bug: Callable[[ToyEngine, StagedBlocks], StagedBlocks] = staticmethod(
        lambda engine, stage: stage
    )
    tail_bug: Callable[[RequestTail], RequestTail] = staticmethod(lambda tail: tail)

    async def stage(self, request_id: str, sent: int) -> StagedBlocks:
        return type(self).stage_bug(self, await super().stage(request_id, sent))

    async def suspend(
        self, request_id: str, sent: int, out: memoryview | None = None
    ) -> RequestTail:
        return type(self).tail_bug(await super().suspend(request_id, sent, out))


class PartFull(SourceBug):
    stage_bug = staticmethod(
        lambda engine, stage: structs.replace(stage, block_ids=[*stage.block_ids, 200, 201])
    )


class NoSuchBlock(SourceBug):
    stage_bug = staticmethod(
        lambda engine, stage: structs.replace(stage, block_ids=[256, *stage.block_ids[1:]])
    )


class ShortTail(SourceBug):
    tail_bug = staticmethod(lambda tail: structs.replace(tail, block_ids=tail.block_ids[:-1]))


class FewerTokens(SourceBug):
    tail_bug = staticmethod(lambda tail: structs.replace(tail, num_tokens=tail.num_tokens - 30))


class WritesStaged(ToyEngine):
    async def suspend(
        self, request_id: str, sent: int, out: memoryview | None = None
    ) -> RequestTail:
        request = self._batch.find(request_id)
        assert request is not None
        self._cache.write(request.blocks, 0, np.zeros((1, 2), np.uint64))
        return await super().suspend(request_id, sent, out)


class OwnError(ToyEngine):
    async def stage(self, request_id: str, sent: int) -> StagedBlocks:
        raise KeyError(request_id)


class NoChecksums(ToyEngine):
    def __init__(self) -> None:
        super().__init__()
        whole = self.gather

        async def gather(
            block_ids: Sequence[int], out: memoryview, urgent: bool = False
        ) -> list[int]:
            return (await whole(block_ids, out, urgent))[1:]

        self.gather = gather


class OtherLayout(ToyEngine):
    async def stage(self, request_id: str, sent: int) -> StagedBlocks:
        self.layout = replace(self.layout, block_tokens=16)
        return await super().stage(request_id, sent)


class BlockTwice(ToyEngine):
    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        block_ids = await super().grow(request_id, num_tokens)
        return [block_ids[0], *block_ids[:-1]]


class TooFew(ToyEngine):
    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        return (await super().grow(request_id, num_tokens))[:3]


class Shuffles(ToyEngine):
    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        block_ids = await super().grow(request_id, num_tokens)
        self.turns = getattr(self, "turns", 0) + 1
        return block_ids[::-1] if self.turns > 1 else block_ids


class Eager(ToyEngine):
    async def reserve(self, export: RequestExport) -> int:
        hits = await super().reserve(export)
        asyncio.get_running_loop().call_soon(self._put_out, 0, [StepOutput("moves", [])])
        return hits


class Lingers(ToyEngine):
    async def release(self, request_id: str) -> None:
        await super().release(request_id)
        loop = asyncio.get_running_loop()
        loop.call_later(0.003, self._put_out, 0, [StepOutput(request_id, [])])


SAFE: list[tuple[str, type[ToyEngine], type[ToyEngine]]] = [
    ("full-blocks", PartFull, ToyEngine),
    ("known-blocks", NoSuchBlock, ToyEngine),
    ("whole-tail", ShortTail, ToyEngine),
    ("growing-tokens", FewerTokens, ToyEngine),
    ("known-errors", OwnError, ToyEngine),
    ("one-checksum-a-block", NoChecksums, ToyEngine),
    ("same-layout", OtherLayout, ToyEngine),
    ("known-blocks", ToyEngine, BlockTwice),
    ("enough-blocks", ToyEngine, TooFew),
    ("stable-blocks", ToyEngine, Shuffles),
]


@pytest.mark.parametrize(("rule", "source", "destination"), SAFE)
async def test_a_broken_rule_is_named_and_the_request_goes_on_where_it_was(
    rule: str, source: type[ToyEngine], destination: type[ToyEngine]
) -> None:
    report, them, exact = await moved(source(), destination())
    assert them.rules == {rule}
    assert (report.state, report.reason) == ("aborted", "error")
    assert rule in report.detail
    assert RULES[rule] in report.detail
    assert exact


@pytest.mark.parametrize(
    ("rule", "source", "destination"),
    [("silent-until-commit", ToyEngine, Eager), ("gone-after-release", Lingers, ToyEngine)],
)
async def test_an_output_at_the_wrong_moment_is_reported(
    rule: str, source: type[ToyEngine], destination: type[ToyEngine]
) -> None:
    _, them, _ = await moved(source(), destination())
    assert them.rules == {rule}


async def test_blocks_that_change_after_they_were_staged_are_noticed_in_the_pause() -> None:
    report, them, _ = await moved(WritesStaged(), ToyEngine())
    assert them.rules == {"same-content"}
    assert (report.state, report.reason) == ("aborted", "error")


class Leaks(ToyEngine):
    def put_out_more(self, request_id: str) -> None:
        self._put_out(1, [StepOutput(request_id, [7])])


async def test_a_suspended_request_that_puts_something_out_is_reported() -> None:
    leaks = Leaks()
    async with pair(leaks, ToyEngine()) as them:
        them.submit("moves")
        await them.reach("moves", 5)
        await them.a.export("moves")
        await them.a.suspend("moves", 0)
        leaks.put_out_more("moves")
        (violation,) = them.a.violations
        assert violation.rule == "still-when-suspended"
        assert violation.history == ("export", "suspend 0")
        assert "history: export > suspend 0" in str(violation)


class GivesBackTwice(ToyEngine):
    async def cancel(self, request_id: str) -> None:
        request = self._destination.arriving.get(request_id)
        again = list(request.blocks) if request else []
        await super().cancel(request_id)
        self._cache.free[:0] = again[:3]


async def test_blocks_that_were_given_back_twice_are_noticed_when_two_requests_get_them() -> None:
    async with pair(ToyEngine(), GivesBackTwice(num_blocks=40)) as them:
        for name in ("one", "two"):
            them.submit(name)
            await them.reach(name, 5)
        exports = [await them.a.export(name) for name in ("one", "two")]
        await them.b.reserve(exports[0])
        await them.b.grow("one", 50)
        await them.b.cancel("one")
        for export in exports:
            await them.b.reserve(export)
        await them.b.grow("one", 200)
        with pytest.raises(ContractViolation, match="own-blocks"):
            await them.b.grow("two", 128)


def test_the_documentation_lists_all_rules() -> None:
    text = (Path(__file__).parents[2] / "docs" / "own-engine.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", text, re.MULTILINE))
    listed = {rule: row.replace("`", "") for rule, row in rows.items() if rule in RULES}
    assert listed == RULES
