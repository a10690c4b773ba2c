"""What begins a call's requests, and finds the text of their answers, holds up no stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, FastIncrementalDetokenizer

from kvmig.engines.vllm.decode_stream import TAIL
from kvmig.engines.vllm.detokenizers import TailDetokenizer
from kvmig.engines.vllm.slices import SLICE_S, WorkSlices
from kvmig.models import BUNDLED

pytestmark = pytest.mark.engine
TOKENIZER: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(str(BUNDLED))
VOCABULARY = len(TOKENIZER)


async def test_many_beginnings_take_only_a_part_of_each_turn() -> None:
    now, begun = 0.0, 0
    slices = WorkSlices(lambda: now)
    in_turns: list[int] = []

    async def begin() -> None:
        nonlocal now, begun
        await slices.wait()
        now += SLICE_S / 2
        begun += 1

    tasks = [asyncio.create_task(begin()) for _ in range(20)]
    while not all(one.done() for one in tasks):
        before = begun
        await asyncio.sleep(0)
        in_turns.append(begun - before)
    assert begun == 20
    assert max(in_turns) <= 3


async def test_one_that_takes_more_than_its_part_keeps_others_back_for_a_turn_only() -> None:
    now = 0.0
    slices = WorkSlices(lambda: now)
    await slices.wait()
    now += 10 * SLICE_S
    waits = asyncio.create_task(slices.wait())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert waits.done()


def request(prompt: Sequence[int]) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=list(prompt), mm_features=None,
        sampling_params=SamplingParams(), pooling_params=None, arrival_time=0.0, lora_request=None,
        cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip


def text_of(made: BaseIncrementalDetokenizer, answer: Sequence[int]) -> list[str]:
    return [made.decode_next(one) for one in answer]


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_the_text_is_the_same_as_from_all_of_the_prompt(seed: int) -> None:
    draw = Random(seed)
    prompt = draw.choices(range(VOCABULARY), k=3 * TAIL + draw.randrange(9))
    prompt += TOKENIZER.encode("a")  # after half a character vLLM gives back all of the prompt
    answer = draw.choices(range(VOCABULARY), k=20)
    whole, tail = (
        kind(TOKENIZER, request(prompt)) for kind in (FastIncrementalDetokenizer, TailDetokenizer)
    )
    assert text_of(tail, answer) == text_of(whole, answer)


def test_the_first_token_after_a_long_prompt_takes_no_time() -> None:
    prompt = [token % VOCABULARY for token in range(131_000)]
    made = TailDetokenizer(TOKENIZER, request(prompt))
    began = time.thread_time()
    made.decode_next(17)
    assert time.thread_time() - began < 0.005
