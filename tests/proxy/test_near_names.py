"""Names near one that nobody knows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.proxy.near_names import near_names

KNOWN = ["qwen3:0.6b", "qwen3:8b", "llama3.1:8b", "gpt-oss:20b", "Org/Small-1B", "canary"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("qwen3-0.6b", "qwen3:0.6b"),
        ("Qwen/Qwen3-8B", "qwen3:8b"),
        ("lama3.1", "llama3.1:8b"),
        ("gpt-oss", "gpt-oss:20b"),
        ("small-1b", "Org/Small-1B"),
        ("canari", "canary"),
    ],
)
def test_what_was_meant_comes_first(name: str, nearest: str) -> None:
    assert near_names(name, KNOWN)[0] == nearest


@pytest.mark.parametrize("name", ["", "/", "mistral", "x", "日本"])
def test_what_is_like_nothing_has_no_near_names(name: str) -> None:
    assert near_names(name, KNOWN) == []


@given(st.text(max_size=300), st.lists(st.text(max_size=200), max_size=20))
def test_whatever_is_asked_the_answer_is_some_known_names(name: str, known: list[str]) -> None:
    found = near_names(name, known)
    assert len(found) <= 3
    assert set(found) <= set(known)
