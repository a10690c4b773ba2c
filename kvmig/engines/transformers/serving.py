"""One transformers engine as a llumlet runs it: clients' requests in, each step's outputs out."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from kvmig.engines.base import Emitted, Frame, OnCallDone, OnOutputs, StepTime
from kvmig.engines.transformers.adapter import TransformersEngine
from kvmig.engines.transformers.config import EngineConfig
from kvmig.engines.transformers.payload import MOST_LOGPROBS, Output, Submitted, decode, encode
from kvmig.engines.transformers.requests import Held, make_state
from kvmig.ground.errors import ConfigError

_WARM_UP_TIMEOUT_S = 300.0


class ServingTransformers(TransformersEngine):
    """Implements `kvmig.engines.base.ServingEngine`; payloads are msgpack of `payload`'s."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._events: asyncio.AbstractEventLoop | None = None
        self._on_outputs: OnOutputs = lambda client, emitted, frames: None
        self._on_call_done: OnCallDone = lambda client, call_id, error, frames: None
        self._warming: dict[str, asyncio.Future[None]] = {}

    def connect(
        self,
        on_outputs: OnOutputs,
        on_call_done: OnCallDone,
        on_exit: Callable[[BaseException | None], None],
    ) -> None:
        self._events = events = asyncio.get_running_loop()
        self._on_outputs, self._on_call_done = on_outputs, on_call_done

        def exited(error: BaseException | None) -> None:
            if not events.is_closed():
                events.call_soon_threadsafe(on_exit, error)

        self._loop.start(exited)

    def submit(
        self,
        client: int,
        request_id: str,
        payload: Sequence[Frame],
        output_token_ids: Sequence[int] = (),
    ) -> None:
        frame, known = b"".join(payload), list(output_token_ids)
        self._loop.call(lambda: self._enter(client, request_id, frame, known))

    def step_s(self) -> float:
        began = self._loop.step_began
        return 0.0 if began is None else time.monotonic() - began

    def abort(self, request_ids: Sequence[str]) -> None:
        ids = list(request_ids)
        self._loop.call(lambda: self._requests.drop(ids))

    def call(self, client: int, call_id: int, method: str, payload: Sequence[Frame]) -> None:
        error = f"a transformers engine has no method {method}"
        if self._events is not None:
            self._events.call_soon(self._on_call_done, client, call_id, error, [])

    def assign(self, request_id: str, client: int) -> None:
        # On the loop of the engine's thread by then: a commit comes after this.
        self._loop.call(lambda: self._destination.assign(request_id, client))

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(
            {
                "engine": "transformers",
                "model": self.config.model,
                "block_tokens": self._blocks.tokens,
                "num_blocks": self._blocks.total,
                "max_request_tokens": self.max_request_tokens,
            }
        )

    async def warm_up(self) -> None:
        events = asyncio.get_running_loop()
        for temperature in (0.0, 1.0):
            request_id = f"warm-up-{temperature}"
            self._warming[request_id] = events.create_future()
            request = Submitted(
                prompt_token_ids=[0] * (self._blocks.tokens + 1),
                max_tokens=2,
                temperature=temperature,
            )
            self.submit(0, request_id, [encode(request)])
        await asyncio.wait_for(asyncio.gather(*self._warming.values()), _WARM_UP_TIMEOUT_S)
        self._warming.clear()

    async def step_times(self, limit_s: float) -> list[StepTime]:
        """None are known."""
        return []

    async def close(self, timeout_s: float) -> None:
        events = asyncio.get_running_loop()
        if await events.run_in_executor(None, self._loop.stop, timeout_s):
            await events.run_in_executor(None, self._close_memory)
        else:
            self._copies.close()  # the rest is still in use

    # -- what clients send and get, see kvmig.testing

    def encode_request(
        self, prompt: Sequence[int], max_tokens: int, seed: int | None = None
    ) -> list[Frame]:
        """A payload for `submit`; greedy without a seed."""
        temperature = 0.0 if seed is None else 1.0
        request = Submitted(
            prompt_token_ids=list(prompt), max_tokens=max_tokens, temperature=temperature, seed=seed
        )
        return [encode(request)]

    def decode_outputs(self, frames: Sequence[Frame]) -> list[Output]:
        """What `connect`'s `on_outputs` got."""
        return decode(frames[0], list[Output])

    # -- on the engine's thread

    def _enter(self, client: int, request_id: str, frame: bytes, known: list[int]) -> None:
        try:
            submitted = self._checked(request_id, decode(frame, Submitted), known)
        except (msgspec.MsgspecError, ConfigError) as error:
            self._deliver(client, [Output(request_id, [], "error", error=str(error))])
            return
        state = make_state(request_id, submitted, known)
        self._requests.add(request_id, Held(submitted, client), state)

    def _checked(self, request_id: str, submitted: Submitted, known: list[int]) -> Submitted:
        """With a seed, if it samples. Raises ConfigError for a request that can't run."""
        most = len(submitted.prompt_token_ids) + submitted.max_tokens
        rules = (
            (request_id not in self._requests, f"request {request_id} is here already"),
            (request_id not in self._destination, f"request {request_id} is about to come"),
            (bool(submitted.prompt_token_ids), "prompt_token_ids is empty"),
            (submitted.max_tokens >= 1, f"max_tokens is {submitted.max_tokens}, must be 1 or more"),
            (
                submitted.temperature >= 0,
                f"temperature is {submitted.temperature}, must be 0 or more",
            ),
            (
                most <= self.max_request_tokens,
                f"prompt and max_tokens are {most} tokens, at most {self.max_request_tokens} fit",
            ),
            (len(known) < submitted.max_tokens, f"all {submitted.max_tokens} tokens are known"),
            (submitted.top_k >= 0, f"top_k is {submitted.top_k}, must be 0 or more"),
            (
                0 < submitted.top_p <= 1,
                f"top_p is {submitted.top_p}, must be more than 0 and at most 1",
            ),
            (0 <= submitted.min_p <= 1, f"min_p is {submitted.min_p}, must be from 0 to 1"),
            (
                0 <= (submitted.logprobs or 0) <= MOST_LOGPROBS,
                f"logprobs is {submitted.logprobs}, must be from 0 to {MOST_LOGPROBS}",
            ),
        )
        for holds, sentence in rules:
            if not holds:
                raise ConfigError(sentence)
        if submitted.temperature and submitted.seed is None:
            return replace(submitted, seed=secrets.randbits(63))
        return submitted

    def _stepped(self, batch: list[Any]) -> None:
        for client, outputs in self._requests.took(batch).items():
            self._deliver(client, outputs)

    def _deliver(self, client: int, outputs: list[Output]) -> None:
        if self._events is not None and not self._events.is_closed():
            self._events.call_soon_threadsafe(self._hand_out, client, outputs)

    # -- on the event loop

    def _hand_out(self, client: int, outputs: list[Output]) -> None:
        emitted: list[Emitted] = []
        for one in outputs:
            if one.finish_reason and one.request_id in self._warming:
                self._warming[one.request_id].set_result(None)
            emitted.append(Emitted(one.request_id, len(one.token_ids), bool(one.finish_reason)))
        self._on_outputs(client, emitted, [encode(outputs)])
