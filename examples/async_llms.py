"""Several of vLLM's AsyncLLM in one process, whose requests move between them.

AsyncLLM starts its engine core in another process, where no other engine can reach it. These have
theirs in this process (`kvmig.engines.vllm.embedded`); all else of them is vLLM's.

python -m examples.async_llms
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from vllm import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from kvmig.core.config import MigrationConfig
from kvmig.core.errors import ConfigError, MigrationRefused, NoInstance
from kvmig.engines.base import EmittedTokens, Frame, Frames
from kvmig.engines.client_request import ClientRequest
from kvmig.engines.vllm import factory, flags
from kvmig.engines.vllm.config import engine_config
from kvmig.engines.vllm.embedded import EmbeddedVllm
from kvmig.engines.vllm.front import OutputQueue, RoutedLLM, apply_described, decode_outputs
from kvmig.kvtransfer.report import MigrationReport
from kvmig.migrator import Migrator
from kvmig.models import BUNDLED

CALL_TIMEOUT_S = 600.0
"""Timeout of a call of an engine's method; new weights take their time."""
CLOSE_S = 10.0
_Answer = asyncio.Future[tuple[str | None, list[Frame]]]


@dataclass
class PlacedRequest:
    """A request that has not ended. external_id: as `generate` got it; client: of its AsyncLLM."""

    external_id: str
    client: int
    engine: str


class OwnRouter:
    """Implements `kvmig.engines.vllm.front.RequestRouter` for one AsyncLLM: its requests begin at
    its own engine, and get their tokens from wherever they are."""

    def __init__(self, llms: MovableLLMs, name: str, client: int) -> None:
        self._llms, self._name, self._client = llms, name, client

    async def submit(self, request: ClientRequest) -> None:
        """Let it begin. Raises NoInstance."""
        placed = PlacedRequest(request.external_id, self._client, self._name)
        self._llms.submit(request.request_id, placed, request.payload)

    def priority_of_call(self, asked: int) -> int:
        """The priority that was asked for."""
        return asked

    def sequences_of_call(self) -> int:
        """The number of grammars that a call may have."""
        return 1

    def is_tenants_call(self) -> bool:
        """Whether the call may say nothing to a KV connector."""
        return False

    async def abort(self, request_ids: Sequence[str], complete: bool) -> None:
        """End them where they are."""
        self._llms.abort(request_ids)

    async def call(self, method: str, payload: Frames) -> Mapping[str, Frames]:
        """Call a method of its own engine. Raises RuntimeError and TimeoutError."""
        return {self._name: await self._llms.call(self._name, method, payload)}


class MovableLLMs:
    """Several AsyncLLM by name, on one event loop."""

    def __init__(
        self, flags_of: Mapping[str, Sequence[str]], config: MigrationConfig | None = None
    ) -> None:
        """Load all models: minutes.

        flags_of: by name, MODEL and any of vLLM's flags. Raises as `kvmig.engines.vllm.factory`.
        """
        self.engines = {name: factory(*given) for name, given in flags_of.items()}
        self._configs = {
            name: engine_config(flags.parse(list(given))) for name, given in flags_of.items()
        }
        self._migration = config
        self._llms: dict[str, AsyncLLM] = {}
        self._queues: dict[int, OutputQueue] = {}
        self._requests: dict[str, PlacedRequest] = {}
        self._calls: dict[int, _Answer] = {}
        self._call_ids = itertools.count(1)
        self._ended: dict[str, str] = {}
        """Engines that have ended, and why."""

    def __getitem__(self, name: str) -> AsyncLLM:
        return self._llms[name]

    async def __aenter__(self) -> Self:
        self._migrator = Migrator(self.engines, self._migration, on_commit=self._assign)
        await self._migrator.__aenter__()
        try:
            for client, (name, engine) in enumerate(self.engines.items(), 1):
                self._queues[client] = OutputQueue()
                take = self._migrator.tap(name, partial(self._take, client))
                engine.connect(take, self._called, partial(self._exited, name))
                self._llms[name] = self._made(name, engine, client)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all. Requests that run end without a word."""
        await self._migrator.close()
        for llm in self._llms.values():
            llm.shutdown()
        await asyncio.gather(*(engine.close(CLOSE_S) for engine in self.engines.values()))

    async def migrate(self, request_id: str, destination: str) -> list[MigrationReport]:
        """Move a request, as `generate` got its id; a report for each of its answers that runs.

        Raises ConfigError for a name that is none's.
        """
        if destination not in self.engines:
            names = ", ".join(self.engines)
            raise ConfigError(f"destination is {destination!r}, must be one of {names}")
        return [
            await self._migrator.migrate(key, one.engine, destination)
            for key, one in list(self._requests.items())
            if one.external_id == request_id and one.engine != destination
        ]

    def engine_of(self, request_id: str) -> set[str]:
        """The names of the engines where answers of the request run; none once they have ended."""
        return {one.engine for one in self._requests.values() if one.external_id == request_id}

    # -- for the AsyncLLMs

    def submit(self, request_id: str, placed: PlacedRequest, payload: Frames) -> None:
        """Let a request begin. Raises NoInstance where its engine has ended."""
        if placed.engine in self._ended:
            raise NoInstance(f"engine {placed.engine} has ended: {self._ended[placed.engine]}")
        self._requests[request_id] = placed
        self.engines[placed.engine].submit(placed.client, request_id, payload)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests where they are; those that have ended are ignored."""
        for request_id in request_ids:
            self._migrator.cancel(request_id)
            if (placed := self._requests.pop(request_id, None)) is not None:
                self.engines[placed.engine].abort([request_id])

    async def call(self, name: str, method: str, payload: Frames) -> Frames:
        """The encoded answer of an engine's method. Raises RuntimeError and TimeoutError."""
        call_id = next(self._call_ids)
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            self.engines[name].call(1, call_id, method, payload)
            error, frames = await asyncio.wait_for(answer, CALL_TIMEOUT_S)
        finally:
            del self._calls[call_id]
        if error is not None:
            raise RuntimeError(error)
        return frames

    # -- from the engines

    def _made(self, name: str, engine: EmbeddedVllm, client: int) -> AsyncLLM:
        config = self._configs[name]
        config.cache_config.num_gpu_blocks = 0
        tasks = apply_described(config, [engine.describe()])
        router = OwnRouter(self, name, client)
        return RoutedLLM(config, router, self._queues[client], 1, tasks, log_stats=False)

    def _take(
        self, index: int, client: int, emitted: list[EmittedTokens], frames: list[Frame]
    ) -> None:
        if (queue := self._queues.get(client)) is None:
            return  # an engine's own
        for entry in emitted:
            if entry.finished:
                self._requests.pop(entry.request_id, None)
        outputs = decode_outputs(frames)
        queue.deliver(index, outputs.outputs, outputs)

    def _called(self, client: int, call_id: int, error: str | None, frames: list[Frame]) -> None:
        answer = self._calls.get(call_id)
        if answer is not None and not answer.done():
            answer.set_result((error, frames))

    def _assign(self, request_id: str, destination: str) -> None:
        placed = self._requests.get(request_id)
        if placed is None:
            raise MigrationRefused("finished", f"{request_id} has ended")
        self.engines[destination].assign(request_id, placed.client)
        placed.engine = destination

    def _exited(self, name: str, error: BaseException | None) -> None:
        """Fail what ran there."""
        self._ended[name] = "it was closed" if error is None else repr(error)
        for request_id, placed in list(self._requests.items()):
            if placed.engine == name:
                del self._requests[request_id]
                why = f"engine {name} has ended: {self._ended[name]}"
                self._queues[placed.client].fail([request_id], why, "retry")


async def main(llms: MovableLLMs) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    async with llms:
        reports, text = list[MigrationReport](), ""
        async for output in llms["a"].generate("Count: 0017 0018", params, "r"):
            text = output.outputs[0].text
            if len(text) > 40 and not reports:
                reports = await llms.migrate("r", "b")
        print(f"{reports[0].state}: {text[:20]} ... {text[-10:]}")


if __name__ == "__main__":
    small = [str(BUNDLED), "--enforce-eager", "--max-model-len=1216", "--dtype=float32",
             "--block-size=32", "--num-gpu-blocks-override=64", "--max-num-seqs=8"]  # fmt: skip
    asyncio.run(main(MovableLLMs({"a": small, "b": small})))
