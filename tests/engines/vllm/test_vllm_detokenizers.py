"""The text of an answer is vLLM's, whatever its tokens are, and no token costs more than others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.detokenizer import (
    BaseIncrementalDetokenizer,
    FastIncrementalDetokenizer,
    SlowIncrementalDetokenizer,
)
from vllm.v1.engine.output_processor import RequestOutputCollector

from kvmig.engines.vllm.detokenizers import (
    TailDetokenizer,
    WindowDetokenizer,
    bound_detokenizers,
)
from kvmig.engines.vllm.outputs import CarefulOutputs
from kvmig.models import BUNDLED
from tests.support.examples import examples

pytestmark = pytest.mark.engine
BYTES: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(str(BUNDLED))
STREAMS = 64
HOLD_S = 0.02
Ids = Callable[[bytes], list[int]]
"""The tokens that are these bytes."""


def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2's, whose bytes are tokens of their own."""
    names = ["<unk>", *(f"<0x{one:02X}>" for one in range(256)), *"▁ab.é\ufffd", "▁a", "▁▁"]
    vocabulary = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made)


class InPython:
    """A tokenizer that vLLM takes for a slow one."""

    is_fast = False

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        self._fast = fast

    def __len__(self) -> int:
        return len(self._fast)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)


def of_bytes(data: bytes) -> list[int]:
    """With the bundled model's tokenizer."""
    return [BYTES.convert_tokens_to_ids(BYTE_NAMES[one]) for one in data]


def of_fallback(data: bytes) -> list[int]:
    return [1 + one for one in data]


def _byte_names() -> list[str]:
    """How byte-level tokenizers spell bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [one for one in range(256) if one not in plain]
    spelled = {one: chr(one) for one in plain}
    spelled |= {one: chr(256 + number) for number, one in enumerate(rest)}
    return [spelled[one] for one in range(256)]


BYTE_NAMES = _byte_names()
FALLBACK = byte_fallback()


def request(prompt: Sequence[int], **params: Any) -> EngineCoreRequest:
    made = EngineCoreRequest(
        request_id="r", prompt_token_ids=list(prompt), mm_features=None,
        sampling_params=SamplingParams(**params), pooling_params=None, arrival_time=0.0,
        lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    made.external_req_id = "r"
    return made


def texts(made: BaseIncrementalDetokenizer, answer: Sequence[int]) -> list[str]:
    """What each token adds."""
    found = []
    for one in answer:
        made.token_ids.append(one)
        found.append(made.decode_next(one))
    return found


def answer_of(draw: Random, vocabulary: int, ids: Ids) -> list[int]:
    """Words, broken characters, unknown and special tokens, in runs of any length."""
    answer: list[int] = []
    for _ in range(draw.randrange(2, 9)):
        many = draw.choice([1, 3, 30, 40, 80])
        character = draw.choice(["你", "é", "\ufffd", "😀"]).encode()
        answer += draw.choice([
            [vocabulary + 500] * many,
            ids(bytes(draw.randrange(0x80, 0x100) for _ in range(many))),
            ids(character) * draw.randrange(1, 20),
            ids(b"\x80") * many,
            [vocabulary - 1 - draw.randrange(2) for _ in range(many)],
            [draw.randrange(vocabulary) for _ in range(draw.randrange(8))],
            ids(character[: draw.randrange(1, 3)]),
            [draw.randrange(vocabulary + 3) for _ in range(many)],
        ])  # fmt: skip
    return answer


@examples(60, deadline=None)
@given(st.integers(0, 2**32))
@pytest.mark.parametrize("tokenizer", ["bytes", "fallback"])
@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
def test_each_token_adds_the_text_that_it_adds_with_vllm(
    tokenizer: str, slow: bool, seed: int
) -> None:
    draw = Random(seed)
    known, ids = {"bytes": (BYTES, of_bytes), "fallback": (FALLBACK, of_fallback)}[tokenizer]
    prompt = [draw.randrange(len(known) + 2) for _ in range(draw.randrange(6))]
    prompt += draw.choice([[], ids(b"a"), ids("你".encode()[:2]), [len(known) + 9]])
    answer = answer_of(draw, len(known), ids)
    made = request(
        prompt,
        skip_special_tokens=draw.random() < 0.5,
        spaces_between_special_tokens=draw.random() < 0.5,
    )
    theirs, ours = (
        (SlowIncrementalDetokenizer, WindowDetokenizer)
        if slow
        else (FastIncrementalDetokenizer, TailDetokenizer)
    )
    given_to: Any = InPython(known) if slow else known
    assert texts(ours(given_to, made), answer) == texts(theirs(given_to, made), answer)


ENDLESS = {
    "unknown": (BYTES, [100_000]),
    "special": (BYTES, [len(BYTES) - 1]),
    "broken": (BYTES, of_bytes(b"\x80")),
    "a mistake before characters": (FALLBACK, of_fallback("你".encode())),
}
"""Tokens of which no number gives a text."""


CASES = [(kind, slow) for kind in ENDLESS for slow in (False, True)]
CASES.remove(("special", True))  # vLLM writes them all the same


@pytest.mark.parametrize(("kind", "slow"), CASES)
def test_a_token_costs_as_much_however_many_have_given_no_text(kind: str, slow: bool) -> None:
    known, unit = ENDLESS[kind]
    tokenizer: Any = InPython(known) if slow else known
    made = (WindowDetokenizer if slow else TailDetokenizer)(tokenizer, request([1, 2]))
    mistake = of_fallback(b"\x80") if known is FALLBACK else []
    texts(made, [*mistake, *unit * (4000 // len(unit))])
    began = time.thread_time()
    assert "".join(texts(made, unit * (1000 // len(unit)))) == ""
    assert time.thread_time() - began < 0.1


def test_a_step_of_64_streams_without_texts_holds_the_loop_for_less_than_20_ms() -> None:
    bound_detokenizers()
    processor = CarefulOutputs(BYTES, log_stats=True)
    for number in range(STREAMS):
        made = request([1, 2], output_kind=RequestOutputKind.DELTA, max_tokens=9000)
        made.request_id = made.external_req_id = f"r{number}"
        queue = RequestOutputCollector(RequestOutputKind.DELTA, made.request_id)
        processor.add_request(made, None, queue=queue)

    def step(tokens: int) -> float:
        outputs = [
            EngineCoreOutput(f"r{number}", of_bytes(b"\x80") * tokens) for number in range(STREAMS)
        ]
        began = time.thread_time()
        processor.process_outputs(outputs)
        return time.thread_time() - began

    step(5000)
    assert sorted(step(1) for _ in range(9))[4] < HOLD_S
