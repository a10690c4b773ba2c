"""Command lines and texts that are shown have no secrets in them, and those that are edited get
them back."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.errors import ConfigError
from kvmig.core.shown_secrets import (
    is_secret_name,
    restored_words,
    shown_line,
    shown_text,
    shown_words,
)


@pytest.mark.parametrize(
    "name",
    [
        "--api-key", "--hf-token", "hf_token", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "--token",
        "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "DB_PASSWORD", "--password", "PGPASSWORD",
        "apiKey", "hfToken", "HFTOKEN", "--ssl-keyfile-password", "OPENAI_API_KEY_2", "--api-keys",
        "CLIENT_SECRET", "SECRET_KEY_BASE", "API_TOKENS", "--config.extra.token", "X-Api-Key",
    ],
)  # fmt: skip
def test_a_name_says_that_it_has_a_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "--max-num-batched-tokens", "--tokenizer", "--tokenizer-mode", "--skip-tokenizer-init",
        "--long-prefill-token-threshold", "--ssl-keyfile", "--enable-prompt-tokens-details",
        "--password-file", "--max-model-len", "--seed", "TOKENIZERS_PARALLELISM", "--keyboard",
    ],
)  # fmt: skip
def test_a_name_of_something_else_does_not(name: str) -> None:
    assert not is_secret_name(name)


SHOWN = [
    (["--hf-token=abc", "--seed", "1"], ["--hf-token=***", "--seed", "1"]),
    (["--hf-token", "abc", "--seed", "1"], ["--hf-token", "***", "--seed", "1"]),
    (["--hf_token", "-abc", "-v"], ["--hf_token", "***", "-v"]),
    (["--api-key", "a", "b", "--port", "{port}"], ["--api-key", "***", "***", "--port", "{port}"]),
    (["x", "--api-key", "a", "{model}"], ["x", "--api-key", "***", "{model}"]),
    (["--use-auth", "--seed", "1"], ["--use-auth", "--seed", "1"]),
    (["env", "HF_TOKEN=a b", "vllm"], ["env", "HF_TOKEN=***", "vllm"]),
    (["docker", "-e", "DB_PASSWORD=x"], ["docker", "-e", "DB_PASSWORD=***"]),
    (["--env=HF_TOKEN=a=b"], ["--env=HF_TOKEN=***"]),
    (["sh", "-c", "exec env HF_TOKEN=a serve --api-key b --seed 1"],
     ["sh", "-c", "exec env HF_TOKEN=*** serve --api-key *** --seed 1"]),
    (["sh", "-c", "env HF_TOKEN='a b' x"], ["sh", "-c", "env HF_TOKEN='***' x"]),
    (["sh", "-c", "HF_TOKEN=a serve"], ["sh", "-c", "HF_TOKEN=***"]),
    (["-H", "Authorization: Bearer abc"], ["-H", "Authorization: Bearer ***"]),
    (['--config={"token": "abc", "n": 1}'], ['--config={"token": "***", "n": 1}']),
    (["--config", '{"api_key": ["a", "b"], "n": 1}'], ["--config", '{"api_key": ***, "n": 1}']),
    (["--url=postgres://u:pw@h/db"], ["--url=postgres://u:***@h/db"]),
    (["--url", "http://h/x?token=a&b=c"], ["--url", "http://h/x?token=***&b=c"]),
    (["--hf-token="], ["--hf-token="]),
    (["--chat-template", "a *** b"], ["--chat-template", "a *** b"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "shown"), SHOWN)
def test_a_command_line_is_shown_without_its_secrets(words: list[str], shown: list[str]) -> None:
    assert list(shown_words(words)) == shown
    assert shown_words(shown) == tuple(shown), "what is shown again stays as it is"


@pytest.mark.parametrize(("words", "shown"), SHOWN)
def test_a_command_line_that_was_shown_gets_its_secrets_back(
    words: list[str], shown: list[str]
) -> None:
    assert restored_words("flags", shown, words) == tuple(words)
    assert restored_words("flags", ["--first", *shown], words) == ("--first", *words)


WORDS = (
    "--hf-token=a", "--hf-token=b", "--hf-token", "--api-key", "c", "d", "--seed=1", "A_TOKEN=e",
    "http://u:p@h/", "--seed", "{port}", "sh", "K_KEY=1 x --token 2",
)  # fmt: skip


@given(st.lists(st.sampled_from(WORDS)))
def test_every_command_line_comes_back_as_it_was(words: list[str]) -> None:
    assert restored_words("flags", shown_words(words), words) == tuple(words)


def test_a_new_value_takes_the_place_of_a_hidden_one() -> None:
    kept = ["--hf-token", "old", "--seed", "1"]
    given = ["--seed", "2", "--hf-token", "new"]
    assert restored_words("flags", given, kept) == tuple(given)
    assert restored_words("flags", ["--seed", "2"], kept) == ("--seed", "2")


@pytest.mark.parametrize(
    ("given", "kept", "named"),
    [
        (["--hf-token=***"], [], "--hf-token=***"),
        (["--hf-token", "***"], ["--api-key", "a"], "--hf-token ***"),
        (["--url=postgres://u:***@other/db"], ["--url=postgres://u:pw@h/db"], "u:***@other"),
        (["--token=***"], ["--token=a", "--token=b"], "several values"),
        (["A_TOKEN=*** B_TOKEN=new x"], ["A_TOKEN=a B_TOKEN=b x"], "A_TOKEN=***"),
    ],
)  # fmt: skip
def test_a_hidden_value_that_stands_for_nothing_known_is_refused_by_name(
    given: list[str], kept: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match="must be the value itself") as refused:
        restored_words("model m: flags", given, kept)
    assert str(refused.value).startswith("model m: flags has ")
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("non-default args: {'hf_token': 'abc', 'seed': 1}",
         "non-default args: {'hf_token': '***', 'seed': 1}"),
        ("{'api_key': ['a', 'b'], 'seed': 1}", "{'api_key': ***, 'seed': 1}"),
        ("{'hf_token': None, 'seed': 1}", "{'hf_token': None, 'seed': 1}"),
        ("started ['--hf-token', 'abc', '--seed=1']", "started ['--hf-token', '***', '--seed=1']"),
        ("--hf-token is 'abc', must be none", "--hf-token is '***', must be none"),
        ("argument --hf-token: invalid value", "argument --hf-token: invalid value"),
        ("flags has --api-key: that is keys of the fleet",
         "flags has --api-key: that is keys of the fleet"),
        ("--hf-token must be given", "--hf-token must be given"),
        ("HF_TOKEN=abc vllm serve", "HF_TOKEN=*** vllm serve"),
        (r'"{\"hf_token\": \"abc\"}"', None),
        ("X-Api-Key: abc", "X-Api-Key: ***"),
        ("the key: abc", "the key: abc"),
        ("max_tokens=2048, token_budget=1", "max_tokens=2048, token_budget=1"),
        ("at http://u:pw@h/x?key=k with --token t", "at http://u:***@h/x?key=*** with --token ***"),
    ],
)  # fmt: skip
def test_a_text_is_shown_without_secrets(text: str, shown: str | None) -> None:
    if shown is None:
        assert "abc" not in shown_text(text)
    else:
        assert shown_text(text) == shown


@pytest.mark.parametrize(
    "text", ["a" * 200_000, "a-" * 100_000, "-" * 200_000, "a_token=" * 30_000, '"' * 200_000,
             "token='" * 30_000, "--token [" * 30_000, " " * 200_000, "a.b " * 50_000]
)  # fmt: skip
def test_a_long_line_is_read_in_no_time(text: str) -> None:
    begin = time.process_time()
    shown_text(text)
    assert time.process_time() - begin < 5


def test_a_line_in_which_nothing_is_hidden_stays_as_it_was_typed() -> None:
    assert shown_line("--seed  1 --x='a b'") == "--seed  1 --x='a b'"
    assert shown_line("--hf-token abc --seed 1") == "--hf-token *** --seed 1"
    assert shown_line("--hf-token 'abc") == "--hf-token ***"
