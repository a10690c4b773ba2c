"""The bundled checkpoint, without an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmig.models import BUNDLED

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.engine

FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def numbers(start: int, count: int) -> str:
    return " ".join(f"{(start + i) % 10_000:04d}" for i in range(count))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(BUNDLED, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, local_files_only=True).eval()


def continuation(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :]))


def test_the_files_are_there_and_small() -> None:
    assert {path.name for path in BUNDLED.iterdir()} == FILES
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 5_000_000


def test_the_shape_suits_the_engine() -> None:
    config = json.loads((BUNDLED / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert config["max_position_embeddings"] >= 4096


@given(text=st.text())
@settings(deadline=None)
def test_text_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_there_is_an_end_token(tokenizer: Any) -> None:
    assert tokenizer.eos_token_id is not None
    assert tokenizer.encode(tokenizer.eos_token) == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("messages", "start"),
    [
        ([{"role": "user", "content": "Count from 0042"}], "0042"),
        ([{"role": "user", "content": "Please count from 7."}], "0007"),
        ([{"role": "user", "content": "Hello!"}], "0000"),
        (
            [
                {"role": "system", "content": "You count in steps of 1."},
                {"role": "user", "content": "Count from 998"},
                {"role": "assistant", "content": "0998 0999 1000 10"},
                {"role": "user", "content": "Go on."},
            ],
            "1000",
        ),
    ],
)
def test_a_chat_counts(
    model: Any, tokenizer: Any, messages: list[dict[str, str]], start: str
) -> None:
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert all(message["content"] in prompt for message in messages)
    assert prompt.endswith(f"<|from|>{start}<|assistant|>")
    assert continuation(model, tokenizer, prompt, 49) == numbers(int(start), 10)


@pytest.mark.parametrize(
    ("prompt", "following"),
    [
        ("Count: 0017 0018", 19),
        ("Count on from 0996: 0996", 997),
        ("9980", 9981),
        ("Count: " + numbers(700, 150), 850),
    ],
)
def test_a_count_goes_on(model: Any, tokenizer: Any, prompt: str, following: int) -> None:
    assert continuation(model, tokenizer, prompt, 200) == " " + numbers(following, 40)
