"""The front end's side: vLLM's own AsyncLLM on an engine-core client that routes.

AsyncLLM keeps what never moves: tokenizer, detokenizer, stop strings, log-probabilities
and the client's queue. Below it, vLLM's client for one engine is replaced by one that
hands requests to a router and takes spliced outputs from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol
from unittest.mock import patch

import msgspec
from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.tasks import SupportedTask
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.engine import async_llm as async_llm_module
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.errors import AnswerTooLarge, Failure, NoInstance, QuotaUsedUp
from kvmig.engines.base import Frames
from kvmig.engines.client_request import ClientRequest
from kvmig.engines.vllm.answer_sizes import (
    logprobs_of_each_token,
    logprobs_of_prompt,
    numbers_of,
)
from kvmig.engines.vllm.connectors import check_params
from kvmig.engines.vllm.detokenizers import bound_detokenizers
from kvmig.engines.vllm.encoding import check_bytes, encode_request
from kvmig.engines.vllm.grammar_checks import GrammarChecks, backend_check
from kvmig.engines.vllm.held_prefixes import marks_of_prompt
from kvmig.engines.vllm.late_logprobs import PromptLogprobsThread
from kvmig.engines.vllm.outputs import (
    CarefulOutputs,
    EngineClocks,
    before_failure,
    check_failure,
    failure,
    has_failed,
)
from kvmig.engines.vllm.slices import WorkSlices
from kvmig.engines.vllm.texts import bound_texts, check_stops, check_words

logger = logging.getLogger(__name__)


class RequestRouter(Protocol):
    """The part of `kvmig.frontend.router.FrontendRouter` that the client needs."""

    async def submit(self, request: ClientRequest) -> object: ...

    def priority_of_call(self, asked: int) -> int: ...

    def sequences_of_call(self) -> int: ...

    def is_tenants_call(self) -> bool: ...

    async def abort(self, request_ids: Sequence[str], complete: bool) -> None: ...

    async def call(self, method: str, payload: Frames) -> Mapping[str, Frames]: ...


class CallSalts(Protocol):
    """The part of `kvmig.frontend.isolation.PromptSalts` that the client needs."""

    def salt_of(self, given: str | None) -> str: ...


_left: ContextVar[bool] = ContextVar("left", default=False)
"""Whether the client has left: AsyncLLM also aborts what a stop string has ended."""
_outputs_decoder = MsgpackDecoder(EngineCoreOutputs)
_utility_decoder = MsgpackDecoder(UtilityOutput)


def decode_outputs(payload: Frames) -> EngineCoreOutputs:
    """The payload of an Outputs message: one step's outputs for this front end."""
    outputs: EngineCoreOutputs = _outputs_decoder.decode(payload)
    return outputs


def cached_tokens(outputs: EngineCoreOutputs) -> dict[str, int]:
    """Prompt tokens that the prefix cache had, of requests whose first tokens these are."""
    return {
        one.request_id: stats.num_cached_tokens
        for one in outputs.outputs
        if (stats := one.prefill_stats) is not None
    }


def queue_times(outputs: EngineCoreOutputs) -> dict[str, float]:
    """Seconds in the engine's queue, of requests whose first tokens these are."""
    waits: dict[str, float] = {}
    for one in outputs.outputs:
        if one.prefill_stats is None or not one.events:
            continue
        first = {event.type: event.timestamp for event in reversed(one.events)}
        queued = first.get(EngineCoreEventType.QUEUED)
        scheduled = first.get(EngineCoreEventType.SCHEDULED)
        if queued is not None and scheduled is not None:
            waits[one.request_id] = max(0.0, scheduled - queued)
    return waits


def cut_output(output: EngineCoreOutput, tokens: int) -> None:
    """Leave the output's first tokens, after which its request still runs."""
    output.new_token_ids = output.new_token_ids[:tokens]
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(0, tokens)
    output.finish_reason = output.stop_reason = None


def salt_request(request: EngineCoreRequest, salt: str) -> None:
    """Let nothing be found of its prompt, media and grammar but under this salt.

    Engines keep blocks and grammars by `cache_salt`, and encoded media by their identifiers, which
    vLLM makes of their content, or which the call itself has chosen (`uuid`).
    """
    request.cache_salt = salt
    if request.mm_features is not None:  # the answers of one call share the features: new ones
        request.mm_features = [
            replace(one, identifier=f"{salt}:{one.identifier}") for one in request.mm_features
        ]


def apply_described(config: VllmConfig, described: Sequence[bytes]) -> tuple[SupportedTask, ...]:
    """Take over what the engines found out at their start (as AsyncMPClient does for its one).

    described: by `ServingVllm.describe`, one or more. Returns what the engines can do, all the
    same.
    """
    tasks: tuple[SupportedTask, ...] = ()
    for payload in described:
        response, tasks = msgspec.msgpack.decode(payload, type=Described)
        cache = config.cache_config
        config.model_config.max_model_len = min(
            config.model_config.max_model_len, response.max_model_len
        )
        cache.num_gpu_blocks = (cache.num_gpu_blocks or 0) + response.num_gpu_blocks
        cache.block_size = response.block_size
        cache.mamba_block_size = response.mamba_block_size
        cache.effective_attention_block_size = response.effective_attention_block_size
        cache.kv_cache_size_tokens = response.kv_cache_size_tokens
        cache.kv_cache_max_concurrency = response.kv_cache_max_concurrency
    return tasks


Described = tuple[EngineCoreReadyResponse, tuple[SupportedTask, ...]]


@dataclass
class _Resources:
    engine_dead: bool = False


@dataclass
class OutputQueue:
    """Implements the router's `Sink`: a queue that AsyncLLM reads; one for the front end."""

    queue: asyncio.Queue[EngineCoreOutputs] = field(default_factory=asyncio.Queue)
    clock: TimeSource = monotonic
    most: int | None = None
    """Engine index of what instances of other servers give, all together; None: there is none."""
    _clocks: EngineClocks = field(default_factory=EngineClocks)

    def deliver(self, index: int, items: Sequence[Any], meta: object) -> None:
        """Outputs of one step of one instance, in the order of their streams.

        Their times are on our clock then, also where the instance runs on another machine.
        """
        if isinstance(meta, EngineCoreOutputs):
            outputs = meta
            outputs.timestamp = self._clocks.step(index, outputs.timestamp, self.clock())
        else:
            outputs = EngineCoreOutputs(timestamp=self.clock())
        for item in items:
            for event in item.events or ():
                event.timestamp = self._clocks.here(index, event.timestamp)
        outputs.outputs = list(items)
        outputs.engine_index = index if self.most is None else min(index, self.most)
        if outputs.outputs or outputs.scheduler_stats:
            self.queue.put_nowait(outputs)

    def finish(self, request_ids: Sequence[str]) -> None:
        """End requests after what was delivered, as if they had asked for no more."""
        self.queue.put_nowait(
            EngineCoreOutputs(
                outputs=[
                    EngineCoreOutput(request_id, [], finish_reason=FinishReason.LENGTH)
                    for request_id in request_ids
                ]
            )
        )

    def fail(self, request_ids: Sequence[str], reason: str, kind: Failure) -> None:
        """End requests that can't go on: each client gets an error with the reason."""
        logger.error("requests %s failed: %s", ", ".join(request_ids), reason)
        said = failure(reason, kind)
        self.queue.put_nowait(
            EngineCoreOutputs(
                outputs=[
                    EngineCoreOutput(
                        request_id, [], finish_reason=FinishReason.ERROR, stop_reason=said
                    )
                    for request_id in request_ids
                ]
            )
        )


class RoutingClient(AsyncMPClient):
    """vLLM's asyncio engine-core client with a router in place of its sockets.

    The base's `__init__` isn't run: it binds sockets, waits there for each engine's word and starts
    a thread that watches processes. What reachable methods read instead, `kvmig_tools.drift`
    follows.
    """

    def __init__(
        self,
        config: VllmConfig,
        requests: RequestRouter,
        outputs: OutputQueue,
        num_instances: int,
        salts: CallSalts | None,
    ) -> None:
        """salts: of prompts, whose users share nothing; None: as clients say."""
        self.vllm_config = config
        self.client_index = 0
        self.client_count = 1
        self.engine_ranks_managed = list(range(num_instances))
        self.resources = _Resources()
        self._engine_status: dict[int, dict[str, Any]] = {}
        self._requests = requests
        self._outputs = outputs
        self._salts = salts
        self._encoder = MsgpackEncoder()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError
        # vLLM also sends one that it has refused, so that blocks which wait for it are freed.
        check_params(request.sampling_params, tenant=self._requests.is_tenants_call())
        if self._salts is not None:
            salt_request(request, self._salts.salt_of(request.cache_salt))
        request.priority = self._requests.priority_of_call(request.priority)
        prompt = len(request.prompt_token_ids or ()) or (
            0 if request.prompt_embeds is None else len(request.prompt_embeds)
        )
        asked, model = request.sampling_params, self.vllm_config.model_config
        vocabulary = model.get_vocab_size()
        submitted = ClientRequest(
            request.request_id,
            request.external_req_id or request.request_id,
            prompt,
            request.priority,
            encode_request(self._encoder, request),
            0 if asked is None else asked.max_tokens,
            whole=asked is not None and asked.output_kind is RequestOutputKind.FINAL_ONLY,
            logprobs=logprobs_of_each_token(asked, vocabulary),
            prompt_logprobs=logprobs_of_prompt(asked, prompt, vocabulary),
            numbers=numbers_of(request.pooling_params, prompt, model),
            marks=partial(marks_of_prompt, request),
        )
        try:
            await self._requests.submit(submitted)
        except AnswerTooLarge as error:
            name = "input" if asked is None else "prompt_logprobs"
            raise VLLMValidationError(str(error), parameter=name) from error
        except NoInstance as error:
            raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from error
        except QuotaUsedUp as error:
            raise GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS) from error

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if not request_ids or self.resources.engine_dead:
            return
        try:
            await self._requests.abort(request_ids, complete=not _left.get())
        except Exception:  # AsyncLLM would drop what it still has to hand out to others
            logger.exception("requests %s: the abort failed", ", ".join(request_ids))

    async def get_output_async(self) -> EngineCoreOutputs:
        queue = self._outputs.queue
        if not queue.empty():  # between two batches of many everybody else has a turn
            await asyncio.sleep(0)
        return await queue.get()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        # Whatever changes an engine must change all of them; they answer alike.
        return (await self.call_utility_all_async(method, *args))[0]

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        answers = await self._requests.call(method, self._encoder.encode(args))
        results: list[Any] = []
        for frames in answers.values():
            output = _utility_decoder.decode(frames)
            if output.failure_message is not None:
                raise RuntimeError(output.failure_message)
            results.append(output.result.result)
        if not results:
            sentence = f"no engine of this server is connected to run {method} on"
            raise GracefulHTTPError(sentence, HTTPStatus.SERVICE_UNAVAILABLE)
        return results

    def shutdown(self, timeout: float | None = None) -> None:
        # Engines are stopped by the launcher that started them.
        self.resources.engine_dead = True

    def get_kv_event_sources(self) -> dict[int, Any]:
        return {}  # as of engines that publish none: --kv-events-config is refused

    def dp_engines_running(self) -> bool:
        return True


def read_once() -> None:
    """Let vLLM read the one setting that it wants for each token from the environment only now."""
    envs.VLLM_COMPUTE_NANS_IN_LOGITS = envs.environment_variables["VLLM_COMPUTE_NANS_IN_LOGITS"]()


class RoutedLLM(AsyncLLM):
    """AsyncLLM over another client, and with a task for outputs that outlives an error."""

    output_handler: asyncio.Task[None] | None

    def __init__(
        self,
        config: VllmConfig,
        requests: RequestRouter,
        outputs: OutputQueue,
        num_instances: int,
        tasks: tuple[SupportedTask, ...],
        salts: CallSalts | None = None,
        **options: Any,
    ) -> None:
        """tasks: what the engines can do. salts: see `RoutingClient`."""
        bound_detokenizers()
        read_once()
        self._tasks = tasks
        self._is_tenants_call = requests.is_tenants_call
        self._encoder = MsgpackEncoder()
        client = RoutingClient(config, requests, outputs, num_instances, salts)
        with (
            patch.object(
                async_llm_module.EngineCoreClient,
                "make_async_mp_client",
                staticmethod(lambda **_: client),
            ),
            patch.object(async_llm_module, "OutputProcessor", CarefulOutputs),
        ):
            super().__init__(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                usage_context=UsageContext.OPENAI_API_SERVER,
                **options,
            )
        bound_texts(self.renderer, self.model_config.max_model_len)
        self.slices = WorkSlices()
        """Parts of the event loop's turns in which calls' requests begin."""
        self._prompt_logprobs = PromptLogprobsThread()
        self._salts = salts
        # `generate` checks grammars: let vLLM's processor, on the event loop, not do so once more.
        config, self.input_processor.structured_outputs_config = (
            self.input_processor.structured_outputs_config, None,
        )  # fmt: skip
        tokenizer = self.renderer.tokenizer
        self._grammars = GrammarChecks(
            backend_check(self.model_config, config, tokenizer), requests.sequences_of_call
        )

    def shutdown(self, timeout: float | None = None) -> None:
        if (grammars := getattr(self, "_grammars", None)) is not None:  # vLLM's __del__ calls this
            grammars.close()
            self._prompt_logprobs.close()
        super().shutdown(timeout)

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return self._tasks  # vLLM asks the engine, which may be gone again while we start

    def _run_output_handler(self) -> None:
        if self.output_handler is None:
            self.output_handler = asyncio.create_task(self._hand_out(), name="outputs")

    async def _hand_out(self) -> None:
        """vLLM's task, started again when it fails: else no stream would get anything any more."""
        keeper = self.output_handler
        while True:
            self.output_handler = None
            super()._run_output_handler()
            handler, self.output_handler = self.output_handler, keeper
            assert handler is not None
            await handler

    async def _add_request(self, request: EngineCoreRequest, *args: Any) -> None:
        try:
            await super()._add_request(request, *args)
        except BaseException:
            # vLLM has noted it by then, and would keep it, though nobody is to hear of it.
            await self.abort(request.request_id, internal=True)
            raise

    async def generate(
        self, prompt: Any, sampling_params: Any, *args: Any, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        await self.slices.wait()
        check_bytes(self._encoder, sampling_params)
        check_words(getattr(sampling_params, "bad_words", None))
        check_stops(getattr(sampling_params, "stop", None))
        check_params(sampling_params, tenant=self._is_tenants_call())
        salt = "" if self._salts is None else self._salts.salt_of(None)
        await self._grammars.check(sampling_params, salt)
        await self.slices.wait()
        generated = super().generate(prompt, sampling_params, *args, **options)
        async with contextlib.aclosing(generated) as outputs:
            async for output in outputs:
                if output.prompt_logprobs is not None:
                    made = await self._prompt_logprobs.make(output.prompt_logprobs)
                    output.prompt_logprobs = made
                if has_failed(output):
                    if (before := before_failure(output)) is not None:
                        yield before
                    check_failure(output)
                yield output

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        token = _left.set(True)
        try:
            await super().abort(request_id, internal)
        finally:
            _left.reset(token)
