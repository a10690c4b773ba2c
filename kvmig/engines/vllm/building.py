"""Requests on their way into the engine, built on threads of their own.

To build one its prompt is hashed and its grammar made; one that ran elsewhere already is also fed
its tokens. New requests are built in the order in which they came, which takes milliseconds; what
takes longer holds up no other: grammars compile in vLLM's own pool, and requests that were
elsewhere are built several at a time.

A request that ran on a lost engine runs again from the tokens that its client has
(`requeue_request`). For this engine it is a request that was preempted: its prompt and outputs are
computed again, and the next step samples what would have come next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from kvmig.core.errors import MigrationRefused
from kvmig.engines.vllm import runner
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.lora import replaced_since

T = TypeVar("T")

THREADS = 4
GRAMMAR_TIMEOUT_S = 30.0
_LOOK_S = 0.005
"""How often a grammar that compiles is looked at."""


_AT_ONCE = 1 << 20
"""Numbers that are skipped by one call."""


class RequestBuilder:
    """Builds one engine's requests. One with a grammar is begun on a thread for those alone: vLLM
    makes what they share, which may take seconds, with the first, and isn't made for two threads.
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
        await self.compiled(request)
        await self._on(self._known, lambda: self._feed(request, output_token_ids))
        return request

    async def hash_request(self, submitted: EngineCoreRequest) -> Request:
        """See `StepCore.hash_request`."""
        return await self._on(self._known, lambda: self._core.hash_request(submitted))

    async def generator_after(self, params: SamplingParams | None, tokens: int) -> bytes | None:
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

    async def compiled(self, request: Request) -> None:
        """Wait for the request's grammar, if it has one: a step that samples without would end the
        engine. Raises MigrationRefused where it doesn't compile, or not in time."""
        guided = request.structured_output_request
        if guided is None:
            return
        try:
            async with asyncio.timeout(GRAMMAR_TIMEOUT_S):
                while not guided.is_grammar_ready:  # noqa: ASYNC110 - vLLM tells nobody
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise MigrationRefused(
                "timeout", f"its grammar is still compiled after {GRAMMAR_TIMEOUT_S:g} s"
            ) from None
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


def not_again(request: EngineCoreRequest, config: VllmConfig) -> str:
    """Why the tokens alone don't determine how the request goes on; empty if they do."""
    params = request.sampling_params
    if request.resumable:
        return "streaming input"
    if params is None:
        return ""  # pooling: one output, at the end
    if params.thinking_token_budget is not None:
        # vLLM counts along while the request is in the batch, and miscounts when it returns.
        return "thinking token budget"
    if replaced_since(request.lora_request, request.arrival_time):
        return "LoRA adapter that was replaced after the request had begun"
    if config.aux_output_config.enabled:
        return "routed experts, which are gathered until the end"
    if config.speculative_config is not None and params.sampling_type == SamplingType.RANDOM_SEED:
        return "seeded sampling with speculative decoding"  # draws depend on what was proposed
    return ""


def without_what_was_sent(request: EngineCoreRequest) -> None:
    """Don't compute again what clients got with the first token."""
    if request.sampling_params is not None:
        request.sampling_params.prompt_logprobs = None
        request.sampling_params.prompt_logprob_token_ids = None


def requeue_request(core: StepCore, request: Request, generator: bytes | None) -> None:
    """Put the request, with its output tokens, where preempted ones wait.

    On the engine's thread between two steps. generator: its state, see `generator_after`. Where it
    raises, the caller ends the request: the scheduler has it then, and workers may.
    """
    scheduler, request_id = core.scheduler, request.request_id
    request.status = RequestStatus.PREEMPTED
    request.num_preemptions = 1  # else it is a new one, once blocks came from the host
    request.prefill_stats = None  # reported with the first token
    scheduler.requests[request_id] = request
    scheduler.waiting.prepend_request(request)
    if not runner.uses_v2(core):
        runner.register(core, request, ([],), generator)


def generator_after(core: StepCore, params: SamplingParams | None, tokens: int) -> bytes | None:
    """State of the seeded generator of a request that has sampled `tokens` tokens.

    Model runner V1 draws from it once a token, in a way that depends on the platform's sampler. So
    that sampler draws once, to see how far that takes a generator; the rest is skipped. None where
    nothing is drawn from it: greedy, unseeded, or on model runner V2, whose seeds are stateless.
    Milliseconds where vLLM's sampler takes one number a token from a CPU's generator (its
    default), 3 ns a number where it takes two for each entry of the vocabulary; on a GPU the same
    however many tokens.
    """
    if runner.uses_v2(core) or params is None or params.sampling_type != SamplingType.RANDOM_SEED:
        return None
    config: VllmConfig = core.vllm_config
    model = config.model_config
    device = torch.device(config.device_config.device_type)
    generator = torch.Generator(device=device)
    generator.manual_seed(params.seed)
    if tokens:
        sampler = TopKTopPSampler(model.logprobs_mode, model.use_fp64_gumbel)
        logits = torch.zeros(1, model.get_vocab_size(), device=device)
        draw_times(
            generator,
            lambda one: sampler.forward(logits, {0: one}, None, None),
            tokens,
            logits.numel(),
        )
    return bytes(generator.get_state().numpy().tobytes())


def draw_times(
    generator: torch.Generator,
    draw: Callable[[torch.Generator], object],
    times: int,
    entries: int,
) -> None:
    """Leave `generator` where `times` (1 or more) calls of `draw` would.

    draw: takes equally many numbers each time: one, or one or two for each of `entries`.
    """
    if generator.device.type != "cpu":
        began = generator.get_offset()
        draw(generator)
        a_draw = generator.get_offset() - began
        generator.set_offset(began + times * a_draw)
        return
    before = generator.clone_state()
    draw(generator)
    for numbers in (1, 2, entries, 2 * entries):
        if torch.equal(_skipped(before.clone_state(), numbers), generator.get_state()):
            _skipped(generator, numbers * (times - 1))
            return
    for _ in range(times - 1):
        draw(generator)


def _skipped(generator: torch.Generator, numbers: int) -> torch.Tensor:
    """The state of a CPU's generator (mt19937) after that many 32-bit numbers were drawn from
    it."""
    while numbers:
        some = min(numbers, _AT_ONCE)
        torch.empty(some, dtype=torch.uint8).random_(generator=generator)
        numbers -= some
    return generator.get_state()
