"""Two real vLLM engines in this process, stepped by hand: step boundaries are where a test puts
them. (vLLM's CPU attention has one scratch buffer a process, so nothing may run at once.)"""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvmig.engines.base import Emitted, Frame, Pace, Tail
from kvmig.models import BUNDLED

T = TypeVar("T")

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
FLAGS = (
    "--enforce-eager", "--block-size=32", "--max-model-len=1216", "--max-num-seqs=4",
    "--max-num-batched-tokens=128", "--num-gpu-blocks-override=40",
)  # fmt: skip
PATIENCE = 2000
"""Rounds without progress after which a test is stuck."""


@dataclass
class Output:
    """What a request gave so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: Any = None


def remembered(worker: Any) -> list[str]:
    """Requests that a worker knows; runs there."""
    return list(worker.model_runner.requests)


class Side:
    """One engine, with what its clients got."""

    def __init__(
        self, async_scheduling: bool, own_flags: Sequence[str] = (), unit_tokens: int = 0
    ) -> None:
        from kvmig.engines.vllm import flags
        from kvmig.engines.vllm.config import engine_config
        from kvmig.engines.vllm.serving import ServingVllm

        config = engine_config(flags.parse([str(BUNDLED), *FLAGS, *own_flags]))
        # vLLM's CPU platform turns it off; the machinery is the same as on a GPU.
        config.scheduler_config.async_scheduling = async_scheduling
        self.engine = ServingVllm(config, unit_tokens=unit_tokens)
        self.core = self.engine._core
        self.core.process_input_queue_block = False

    def listen(self, outputs: dict[str, Output]) -> None:
        from kvmig.engines.vllm.front import decode_outputs

        def on_outputs(client: int, emitted: list[Emitted], frames: list[Frame]) -> None:
            for one in decode_outputs(frames).outputs:
                output = outputs.setdefault(one.request_id, Output())
                output.tokens += one.new_token_ids
                if one.new_logprobs is not None:
                    output.logprobs += one.new_logprobs.logprobs.tolist()
                output.finish_reason = one.finish_reason

        self.engine._loop = asyncio.get_running_loop()
        self.engine._on_outputs = on_outputs

    def take_calls(self) -> None:
        """What the engine's thread does between two steps."""
        while not self.core.input_queue.empty():
            self.core._handle_client_request(*self.core.input_queue.get_nowait())

    def step(self) -> None:
        """Calls, then one step if there is work."""
        self.take_calls()
        if self.core.has_work():
            self.core._process_engine_step()

    @property
    def used_blocks(self) -> int:
        pool = self.engine._scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


class Pair:
    """Engines `a` and `b`, and everything that their requests gave, in order of arrival."""

    def __init__(
        self,
        async_scheduling: bool,
        a_flags: Sequence[str] = (),
        b_flags: Sequence[str] = (),
        unit_tokens: int = 0,
    ) -> None:
        os.environ.update(ENVIRONMENT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from kvmig.engines.vllm import flags

            flags.set_environment()
            self.a, self.b = (
                Side(async_scheduling, own, unit_tokens) for own in (a_flags, b_flags)
            )
        self.outputs: dict[str, Output] = {}

    def begin(self) -> None:
        """For each test, inside its event loop."""
        self.outputs = {}
        for side in (self.a, self.b):
            side.listen(self.outputs)
            side.engine._scheduler.reset_prefix_cache()

    def submit(self, side: Side, request_id: str, prompt: Sequence[int], **params: Any) -> None:
        """A new request: greedy, 60 tokens, with log-probabilities, unless `params` differ."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackEncoder

        wanted = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, "logprobs": 1, **params}
        request = EngineCoreRequest(
            request_id, list(prompt), None, SamplingParams(**wanted), None, time.time(), None,
            None, None,
        )  # fmt: skip
        side.engine.submit(1, MsgpackEncoder().encode(request))
        side.engine._builder.submit(lambda: None).result(10)

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
        """The same request, left alone on engine `a`; its prefix cache is empty afterwards."""
        self.submit(self.a, "unmoved", prompt, **params)
        await self.finish("unmoved")
        await self.idle()
        output = self.outputs.pop("unmoved")
        self.a.engine._scheduler.reset_prefix_cache()
        return output

    async def copy_stage(self, source: Side, to: Side, request_id: str, sent: int) -> int:
        """One live stage: pre-allocate, copy the new full blocks; how many are sent now."""
        stage = await self.done(source.engine.stage(request_id, sent))
        blocks = await self.done(to.engine.grow(request_id, stage.num_tokens))
        await self.copy(source, to, stage.block_ids, blocks[sent : sent + len(stage.block_ids)])
        return sent + len(stage.block_ids)

    async def copy(self, source: Side, to: Side, ids: Sequence[int], into: Sequence[int]) -> None:
        """Blocks `ids` into blocks `into`, checked."""
        if not ids:
            return
        buffer = memoryview(bytearray(source.engine.layout.block_bytes * len(ids)))
        sums = await self.done(source.engine.gather(ids, buffer))
        assert await self.done(to.engine.scatter(into, buffer)) == sums

    async def suspend(self, side: Side, request_id: str, sent: int) -> Tail:
        """Out of the batch; the engine steps as far as it must."""
        task = asyncio.ensure_future(side.engine.suspend(request_id, sent))
        for _ in range(PATIENCE):
            side.take_calls()
            await self.settle()
            if task.done():
                return task.result()
            side.step()
        raise AssertionError("the request is not let go")

    async def move(self, source: Side, to: Side, request_id: str, *, steps: int = 2) -> int:
        """A whole migration with the source stepping in between; how many blocks were a hit."""
        export = await self.done(source.engine.export(request_id))
        sent = hit = await self.done(to.engine.reserve(export))
        for _ in range(steps):
            sent = await self.copy_stage(source, to, request_id, sent)
            source.step()
            to.step()
            await self.settle()
        await self.done(source.engine.stage(request_id, sent))
        tail = await self.suspend(source, request_id, sent)
        if tail.block_ids:
            blocks = await self.done(to.engine.grow(request_id, tail.num_tokens))
            end = sent + len(tail.block_ids)
            await self.copy(source, to, tail.block_ids, blocks[sent:end])
        to.engine.assign(request_id, 1)
        await self.done(to.engine.commit(request_id, tail))
        await self.done(source.engine.release(request_id))
        return hit

    async def fork(self, source: Side, to: Side, request_id: str) -> list[int]:
        """All of a migration up to following; what the source puts out from then on."""
        export = await self.done(source.engine.export(request_id))
        sent = await self.done(to.engine.reserve(export))
        sent = await self.copy_stage(source, to, request_id, sent)
        assert (await self.done(source.engine.stage(request_id, sent))).decoding
        said: list[int] = []
        fork = await self.done(source.engine.fork(request_id, sent, said.extend))
        blocks = await self.done(to.engine.grow(request_id, fork.num_tokens))
        end = sent + len(fork.block_ids)
        await self.copy(source, to, fork.block_ids, blocks[sent:end])
        await self.done(to.engine.follow(request_id, fork))
        return said

    async def extend(self, to: Side, request_id: str, said: list[int]) -> Pace:
        """Hand over what was said since."""
        start = len(self.outputs[request_id].tokens) - len(said)
        pace = await self.done(to.engine.extend(request_id, start, said))
        said.clear()
        return pace

    async def switch(self, source: Side, to: Side, request_id: str) -> None:
        """From following to running there."""
        tail = await self.suspend(source, request_id, 10**6)
        assert tail.block_ids == []
        to.engine.assign(request_id, 1)
        await self.done(to.engine.commit(request_id, tail))
        await self.done(source.engine.release(request_id))

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
            assert side.engine._scheduler.requests == {}
            assert side.engine._submitted == {}
            assert side.engine._destination.reserved() == 0
            assert side.engine._source._leaving == {}
            assert side.used_blocks == 0
            assert not any(side.core.model_executor.collective_rpc(remembered))

    def close(self) -> None:
        for side in (self.a, self.b):
            side.engine._memory.close()
            side.engine._builder.shutdown()
            side.core.shutdown()
