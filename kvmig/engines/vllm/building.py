"""Requests on their way into the engine, built on threads beside it.

To build one its prompt is hashed and its grammar made; one that ran elsewhere already is also fed
its tokens. New requests are built in the order in which they came, which takes milliseconds; what
takes longer holds up nobody else: grammars compile in vLLM's own pool, and requests that were
elsewhere are built several at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.draws import generator_after
from kvmig.ground.errors import MigrationRefused

T = TypeVar("T")

THREADS = 4
GRAMMAR_TIMEOUT_S = 30.0
_LOOK_S = 0.005
"""How often a grammar that compiles is looked at."""


class Builder:
    """Of one engine. A request with a grammar is begun on a thread for those alone: vLLM makes
    what they share, which may take seconds, with the first of them, and isn't made for two threads.
    """

    def __init__(self, core: StepCore) -> None:
        self._core = core
        self._new = ThreadPoolExecutor(1, "kvmig-new")
        self._guided = ThreadPoolExecutor(1, "kvmig-guided")
        self._known = ThreadPoolExecutor(THREADS, "kvmig-known")

    def add(self, request: EngineCoreRequest, work: Callable[[], None]) -> Future[None]:
        """Run `work`, which puts a new request into the engine, after those that came before."""
        params = request.sampling_params
        guided = params is not None and params.structured_outputs is not None
        return (self._guided if guided else self._new).submit(work)

    async def build(
        self, submitted: EngineCoreRequest, output_token_ids: Sequence[int], *, waits: bool
    ) -> Request:
        """The request with all its output tokens in it and in its grammar.

        waits: it has none, and will be in the engine's queue: so its grammar may come later.
        Raises MigrationRefused where the grammar doesn't compile, or not in time.
        """
        params = submitted.sampling_params
        guided = params is not None and params.structured_outputs is not None
        request = await self._on(
            self._guided if guided else self._known,
            lambda: self._core.preprocess_add_request(submitted)[0],
        )
        if waits:
            return request
        if request.use_structured_output:
            await self._compiled(request)
        await self._on(self._known, lambda: self._feed(request, output_token_ids))
        return request

    async def generator_after(self, params: SamplingParams | None, tokens: int) -> bytes | None:
        """See `draws.generator_after`."""
        return await self._on(self._known, lambda: generator_after(self._core, params, tokens))

    async def flush(self) -> None:
        """Wait until the new requests of now are in the engine."""
        for pool in (self._new, self._guided):
            await self._on(pool, lambda: None)

    def close(self) -> None:
        """End the threads, after what they do."""
        for pool in (self._new, self._guided, self._known):
            pool.shutdown(wait=True, cancel_futures=True)

    async def _on(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def _compiled(self, request: Request) -> None:
        guided = request.structured_output_request
        assert guided is not None
        try:
            async with asyncio.timeout(GRAMMAR_TIMEOUT_S):
                while not guided.is_grammar_ready:  # noqa: ASYNC110 - vLLM tells nobody
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise MigrationRefused("timeout", "the grammar is still compiling") from None
        if isinstance(guided.grammar, Exception):
            raise MigrationRefused("error", "the grammar does not compile here")

    def _feed(self, request: Request, output_token_ids: Sequence[int]) -> None:
        if not request.use_structured_output:
            request.append_output_token_ids(list(output_token_ids))
            return
        manager = self._core.structured_output_manager
        for token in output_token_ids:
            request.append_output_token_ids(token)
            if not manager.accept_tokens(request, [token]):
                raise MigrationRefused("error", f"the grammar refuses token {token}")
