"""Real vLLM engines in this process, two a test, stepped by hand: step boundaries are where a test
puts them. (vLLM's CPU attention has one scratch buffer a process, so nothing may run at once.)"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from kvmig.core.errors import MigrationRefused
from kvmig.engines.base import CameBlocks, RequestExport, RequestTail, StagedBlocks
from tests.support.vllm_side import Configuration, Output, Side, remembered

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec

T = TypeVar("T")

TOKENS = 48
"""Of an answer, where a test doesn't say."""
PROMPT = [40 + number * number % 90 for number in range(100)]
LONG = [40 + number * number % 90 for number in range(600)]

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.9},
    "penalties": {
        "temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5,
    },
    "truncated": {"temperature": 1.2, "seed": 8, "top_k": 20, "min_p": 0.01},
    "frequency penalty": {"temperature": 0.8, "seed": 4, "frequency_penalty": 0.7},
    "stop tokens": {
        "temperature": 1.5, "seed": 5, "min_tokens": 40, "stop_token_ids": [*range(50, 70)],
    },
    "allowed tokens": {"temperature": 1.0, "seed": 6, "allowed_token_ids": [50, 51, 52, 53]},
    "biased": {"temperature": 1.0, "seed": 9, "logit_bias": {50: 3.0}},
}  # fmt: skip
"""One of each kind of sampling, for every way that a request can go on elsewhere.

Stop tokens end theirs at its 45th token: behind `min_tokens`, and behind where tests move it."""
SEEDED = SAMPLING["seeded"]

MOST_TAIL = 64
"""Blocks, or units, that a test's tail has at most."""
PATIENCE = 2000
"""Rounds without progress after which a test is stuck."""


class Pair:
    """Engines `a` and `b`, and everything that their requests gave, in order of arrival."""

    def __init__(self, a: Side, b: Side) -> None:
        self.a, self.b = a, b
        self.outputs: dict[str, Output] = {}

    def towards(self, other: Side) -> Pair:
        """Engine `a` again, with another one as `b`; what they give is kept together."""
        pair = copy.copy(self)
        pair.b = other
        other.listen(self.outputs)
        return pair

    def begin(self) -> None:
        """For each test, inside its event loop."""
        self.outputs = {}
        for side in (self.a, self.b):
            side.listen(self.outputs)
            side.scheduler.reset_prefix_cache()

    def submit(
        self,
        side: Side,
        request_id: str,
        prompt: Sequence[int],
        *,
        lora: LoRARequest | None = None,
        priority: int = 0,
        resumable: bool = False,
        images: list[MultiModalFeatureSpec] | None = None,
        again: Sequence[int] = (),
        salt: str | None = None,
        **params: Any,
    ) -> None:
        """A new request: greedy, 60 tokens, with log-probabilities, unless `params` differ.

        salt: of those with whom it shares its prefix. again: output tokens that it has from
        elsewhere; then it comes by `Side.entered`.
        """
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackEncoder

        wanted = {
            "temperature": 0.0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "logprobs": 1,
            **params,
        }
        request = EngineCoreRequest(
            request_id, list(prompt), images, SamplingParams(**wanted), None, time.time(), lora,
            salt, None, priority=priority, resumable=resumable,
        )  # fmt: skip
        side.engine.submit(1, request_id, MsgpackEncoder().encode(request), again)
        side.wait_for_new()

    async def run(
        self, side: Side, request_id: str, prompt: Sequence[int], *, until: int, **params: Any
    ) -> None:
        """A new request, until it has so many tokens."""
        self.submit(side, request_id, prompt, **params)
        await self.step(side, until=(request_id, until))

    async def exported(
        self, request_id: str, prompt: Sequence[int], *, until: int, **params: Any
    ) -> RequestExport:
        """The export of a new request on `a` that has so many tokens."""
        await self.run(self.a, request_id, prompt, until=until, **params)
        return await self.done(self.a.engine.export(request_id))

    async def refused(self, request_id: str, export: RequestExport, match: str) -> None:
        """`b` refuses the request, which goes on at `a`, to its end."""
        with pytest.raises(MigrationRefused, match=match):
            await self.done(self.b.engine.reserve(export))
        await self.done(self.a.engine.resume(request_id))
        await self.finish(request_id)

    async def settle(self) -> None:
        """Let what the engines said reach the event loop."""
        for _ in range(3):
            await asyncio.sleep(0)

    async def done(self, call: Awaitable[T]) -> T:
        """Await an engine call; both engines take calls, neither steps."""
        task = asyncio.ensure_future(call)
        for _ in range(PATIENCE):
            self.a.take_calls()
            self.b.take_calls()
            done, _ = await asyncio.wait([task], timeout=0.005)
            if done:
                return task.result()
        task.cancel()
        raise AssertionError("the call does not end")

    async def step(self, *sides: Side, until: tuple[str, int]) -> None:
        """Step until the request has so many tokens."""
        request_id, tokens = until
        for _ in range(PATIENCE):
            output = self.outputs.get(request_id)
            if output is not None and len(output.tokens) >= tokens:
                return
            for side in sides:
                side.step()
            await self.settle()
        raise AssertionError(f"{request_id} stands still at {self.outputs.get(request_id)}")

    async def finish(self, request_id: str) -> Output:
        """Step both until it ends."""
        for _ in range(PATIENCE):
            output = self.outputs.get(request_id)
            if output is not None and output.finish_reason is not None:
                return output
            self.a.step()
            self.b.step()
            await self.settle()
        raise AssertionError(f"{request_id} does not end")

    async def unmoved(self, prompt: Sequence[int], **params: Any) -> Output:
        """The same request, left alone on engine `a`; its prefix cache is empty afterwards.

        Asked for again, with plain `params`, it is the first answer: an engine gives no other.
        """
        plain = not params.keys() & {"lora", "images"}
        key = repr((list(prompt), sorted(params.items())))
        if plain and key in self.a.unmoved:
            self.a.scheduler.reset_prefix_cache()
            return self.a.unmoved[key]
        self.submit(self.a, "unmoved", prompt, **params)
        await self.finish("unmoved")
        await self.idle()
        output = self.outputs.pop("unmoved")
        assert str(output.finish_reason) != "error", "there is nothing to compare with"
        self.a.scheduler.reset_prefix_cache()
        if plain:
            self.a.unmoved[key] = output
        return output

    async def copy_stage(self, source: Side, to: Side, request_id: str, sent: int) -> int:
        """One live stage: pre-allocate, copy the new full blocks; how many are sent now."""
        stage = await self.done(source.engine.stage(request_id, sent))
        blocks = await self.done(to.engine.grow(request_id, stage.num_tokens))
        await self.copy(source, to, stage.block_ids, [blocks[place] for place in stage.places])
        return sent + len(stage.block_ids)

    async def copy(self, source: Side, to: Side, ids: Sequence[int], into: Sequence[int]) -> None:
        """Blocks `ids` into blocks `into`, checked."""
        if not ids:
            return
        buffer = memoryview(bytearray(source.engine.layout.block_bytes * len(ids)))
        sums = await self.done(source.engine.gather(ids, buffer))
        assert await self.done(to.engine.scatter(into, buffer)) == sums

    async def suspend(
        self, side: Side, request_id: str, sent: int, out: memoryview | None = None
    ) -> RequestTail:
        """Out of the batch; the engine steps as far as it must."""
        task = asyncio.ensure_future(side.engine.suspend(request_id, sent, out))
        for _ in range(PATIENCE):
            await self.settle()
            side.take_calls()
            done, _ = await asyncio.wait([task], timeout=0.005)
            if done:  # a step too many would be one of another batch than the unmoved requests'
                return task.result()
            side.step()
        raise AssertionError("the request is not let go")

    async def move(self, source: Side, to: Side, request_id: str, *, steps: int = 2) -> int:
        """A whole migration with the source stepping in between; how many blocks were a hit.

        The tail is gathered when the request is suspended, and scattered by the commit.
        """
        export = await self.done(source.engine.export(request_id))
        sent = hit = await self.done(to.engine.reserve(export))
        for _ in range(steps):
            sent = await self.copy_stage(source, to, request_id, sent)
            source.step()
            to.step()
            await self.settle()
        await self.done(source.engine.stage(request_id, sent))
        await self.done(to.engine.prepare(request_id))
        buffer = memoryview(bytearray(source.engine.layout.block_bytes * MOST_TAIL))
        tail = await self.suspend(source, request_id, sent, buffer)
        last = None
        if tail.block_ids:
            assert len(tail.checksums) == len(tail.block_ids)
            blocks = await self.done(to.engine.grow(request_id, tail.num_tokens))
            into = [blocks[place] for place in tail.places]
            fused = buffer[: source.engine.layout.block_bytes * len(tail.block_ids)]
            last = CameBlocks(sent, into, fused, tail.checksums)
        to.engine.assign(request_id, 1)
        await self.done(to.engine.commit(request_id, tail, last))
        await self.done(source.engine.release(request_id))
        return hit

    async def idle(self) -> None:
        """Step until neither engine has anything to do."""
        for _ in range(PATIENCE):
            self.a.step()
            self.b.step()
            await self.settle()
            if not self.a.core.has_work() and not self.b.core.has_work():
                return
        raise AssertionError("an engine does not come to rest")

    async def assert_empty(self) -> None:
        """No request, block, reservation or worker state is left at either side."""
        await self.idle()
        for side in (self.a, self.b):
            assert side.scheduler.requests == {}
            assert side.engine._incoming.submitted == {}
            assert side.engine._destination.reserved() == 0
            assert side.engine._source._leaving == {}
            assert side.used_blocks == 0
            assert not any(side.core.model_executor.collective_rpc(remembered))

    async def there_and_back(self, prompt: Sequence[int], **params: Any) -> Output:
        """A request that moves at its 10th token, and back at its 30th."""
        await self.run(self.a, "moved", prompt, until=10, **params)
        await self.move(self.a, self.b, "moved")
        await self.step(self.b, until=("moved", 30))
        await self.move(self.b, self.a, "moved")
        return await self.finish("moved")

    async def moved_in_prefill(
        self, prompt: Sequence[int], *, chunks: int = 1, steps: int = 1, **params: Any
    ) -> Output:
        """A request that moves when so many chunks of its prompt are computed."""
        self.submit(self.a, "moved", prompt, **params)
        for _ in range(chunks):
            self.a.step()
        await self.settle()
        assert "moved" not in self.outputs, "its prompt was shorter"
        await self.move(self.a, self.b, "moved", steps=steps)
        return await self.finish("moved")

    async def hand_over(self, prompt: Sequence[int], *, steps: int = 0, **params: Any) -> list[int]:
        """A request whose prompt `a` computes, while its chunks go to `b`, where it is afterwards.

        steps: of its prompt that are done before it is exported. Returns how many blocks went
        before each of the others, which are all but the tail's.
        """
        self.submit(self.a, "moved", prompt, **params)
        for _ in range(steps):
            self.a.step()
        await self.settle()
        export = await self.done(self.a.engine.export("moved"))
        sent = await self.done(self.b.engine.reserve(export))
        blocks = await self.done(self.b.engine.grow("moved", export.num_tokens))
        went: list[int] = []
        while isinstance(found := await self._follow(sent, export.num_tokens + 1), StagedBlocks):
            assert not found.decoding
            into = [blocks[place] for place in found.places]
            await self.copy(self.a, self.b, found.block_ids, into)
            sent += len(found.block_ids)
            went.append(len(found.block_ids))
        into = [blocks[place] for place in found.places]
        await self.copy(self.a, self.b, found.block_ids, into)
        self.b.engine.assign("moved", 1)
        await self.done(self.b.engine.commit("moved", found))
        await self.done(self.a.engine.release("moved"))
        assert len(self.outputs["moved"].tokens) == found.num_output_tokens == 1
        return went

    async def _follow(self, sent: int, most_tokens: int) -> StagedBlocks | RequestTail:
        """What is new at the next step boundary of `a`; then it steps, as far as it must."""
        task = asyncio.ensure_future(self.a.engine.follow_prompt("moved", sent, most_tokens))
        for _ in range(PATIENCE):
            await self.settle()
            self.a.take_calls()
            done, _ = await asyncio.wait([task], timeout=0.005)
            if done and isinstance(task.result(), RequestTail):
                return task.result()
            self.a.step()
            await self.settle()
            if done:
                return task.result()
        raise AssertionError("the prompt is never computed")


def assert_same(moved: Output, unmoved: Output) -> None:
    """To the last digit of the log-probabilities."""
    assert moved.tokens == unmoved.tokens
    assert moved.logprobs == unmoved.logprobs
    assert moved.finish_reason == unmoved.finish_reason


def preempt(side: Side, request_id: str) -> None:
    """What vLLM's scheduler does when it runs out of blocks."""
    scheduler = side.scheduler
    request = scheduler.requests[request_id]
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)


class Engines:
    """Engines by configuration: one that a test started serves the tests after it, too."""

    def __init__(self) -> None:
        self._started: dict[tuple[Configuration, int], Side] = {}

    def side(self, wanted: Configuration, number: int = 0) -> Side:
        """The engine of this configuration and number."""
        key = wanted, number
        if key not in self._started:
            self._started[key] = Side(wanted)
        return self._started[key]

    @asynccontextmanager
    async def lent(self, a: Configuration, b: Configuration) -> AsyncIterator[Pair]:
        """Two for one test, inside its event loop. Where they aren't left empty, all end."""
        pair = Pair(self.side(a), self.side(b, int(a == b)))
        try:
            pair.begin()
            yield pair
            await pair.assert_empty()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all: the first that ends takes vLLM's process groups along, which are everyone's."""
        while self._started:
            self._started.popitem()[1].close()
