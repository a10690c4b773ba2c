"""vLLM's check of a call's grammar, off the front end's event loop and once for all its prompts.

vLLM reads each grammar on the event loop, once for each prompt of a call: a schema of 120 kB, all
of it numbers within limits, takes most of a second, and all streams with it. Small ones are read at
once, so that they wait for no large ones. What was found out is kept for a while, each user's
apart: no user learns from the time of an answer which grammars others use.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from http import HTTPStatus
from typing import TypeAlias

import msgspec
from vllm.config import ModelConfig, StructuredOutputsConfig
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import TokenizerLike

from kvmig.engines.grammar_bounds import GrammarTooLarge, check_sequences
from kvmig.engines.vllm.grammars import check_params

log = logging.getLogger(__name__)

SMALL = 1024
"""Bytes of a grammar that is checked on the event loop: xgrammar takes at most some 7 ms for it."""
THREADS = 2
"""Threads that check the larger ones."""
WAIT_S = 30.0
"""Longest time until a grammar is checked."""
REMEMBERED = 16
"""Grammars of which it is known what the check said."""

Said: TypeAlias = StructuredOutputsParams | VLLMValidationError
"""What the check made of a grammar, or why it is none."""


def backend_check(
    model: ModelConfig, config: StructuredOutputsConfig | None, tokenizer: TokenizerLike | None
) -> Callable[[StructuredOutputsParams], StructuredOutputsParams]:
    """The bounds of a grammar, then vLLM's own check, which chooses its backend."""

    def check(wanted: StructuredOutputsParams) -> StructuredOutputsParams:
        params = SamplingParams(structured_outputs=copy.copy(wanted))
        check_params(params)
        params._validate_structured_outputs(model, config, tokenizer)
        assert params.structured_outputs is not None
        return params.structured_outputs

    return check


def refusal(error: Exception) -> VLLMValidationError:
    """vLLM's error for what a check raised. What reads a grammar may raise anything, and would be
    answered with 500: yet it is the client's text that can't be read."""
    if type(error) is VLLMValidationError:
        return error
    log.warning("the check of a grammar failed", exc_info=error)
    return VLLMValidationError(
        f"the grammar can't be used: {str(error)[:200]}", parameter="structured_outputs"
    )


class GrammarChecks:
    """Checks the grammars of a front end's calls: `check` each call's parameters."""

    def __init__(
        self,
        check: Callable[[StructuredOutputsParams], StructuredOutputsParams],
        sequences_of_call: Callable[[], int] = lambda: 1,
    ) -> None:
        self._check = check
        self._sequences_of_call = sequences_of_call
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars")
        self._said: OrderedDict[bytes, asyncio.Future[Said]] = OrderedDict()

    async def check(self, params: object, salt: str) -> None:
        """Put the checked grammar in the place of the call's. salt: of the call's user.

        Raises what vLLM's check does, and GracefulHTTPError, 503, if that takes too long.
        """
        wanted = params.structured_outputs if isinstance(params, SamplingParams) else None
        if wanted is None:
            return
        assert isinstance(params, SamplingParams)
        try:
            async with asyncio.timeout(WAIT_S):
                said = await asyncio.shield(self._ask(wanted, salt))
        except TimeoutError:
            sentence = f"grammars of other calls are checked for over {WAIT_S:g} s, try again"
            raise GracefulHTTPError(sentence, HTTPStatus.SERVICE_UNAVAILABLE) from None
        if isinstance(said, VLLMValidationError):
            raise copy.copy(said)  # what is remembered would hold this call's frames, and its body
        params.structured_outputs = copy.copy(said)

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, wanted: StructuredOutputsParams, salt: str) -> asyncio.Future[Said]:
        loop = asyncio.get_running_loop()
        try:
            text = msgspec.json.encode(wanted)
        except (UnicodeEncodeError, TypeError, RecursionError):  # half a surrogate pair
            return loop.run_in_executor(self._pool, self._say, wanted)
        try:
            check_sequences(len(text), self._sequences_of_call())
        except GrammarTooLarge as error:
            raise VLLMValidationError(str(error), parameter=error.field) from error
        key = blake2b(text, key=salt.encode()[:64]).digest()
        known = self._said.pop(key, None)
        if known is None and len(text) <= SMALL:
            known = loop.create_future()
            known.set_result(self._say(wanted))
        elif known is None:
            known = loop.run_in_executor(self._pool, self._say, wanted)
        self._said[key] = known
        if len(self._said) > REMEMBERED:
            self._said.popitem(last=False)
        return known

    def _say(self, wanted: StructuredOutputsParams) -> Said:
        try:
            return self._check(wanted)
        except Exception as error:  # noqa: BLE001 - each call that asked raises it
            refused = refusal(error)
            refused.__cause__ = refused.__context__ = None  # their frames hold a call's body, too
            return refused.with_traceback(None)
