"""Which tokens have given a key."""

from __future__ import annotations

import pytest

from kvmig.accounts import used_tokens
from kvmig.accounts.used_tokens import UsedTokens


def test_a_token_is_used_once() -> None:
    used = UsedTokens()
    assert used.take_token("head.body.signature", 10.0, 0.0)
    assert not used.take_token("head.body.signature", 10.0, 9.0)
    assert used.take_token("head.other.signature", 10.0, 9.0)


def test_a_token_with_its_signature_written_otherwise_is_the_same() -> None:
    used = UsedTokens()
    assert used.take_token("head.body.signature", 10.0, 0.0)
    assert not used.take_token("head.body.another", 10.0, 0.0)


def test_a_token_that_gave_no_key_may_be_used_again() -> None:
    used = UsedTokens()
    used.take_token("a.b.c", 10.0, 0.0)
    used.give_back("a.b.c")
    assert used.take_token("a.b.c", 10.0, 0.0)


def test_tokens_that_have_expired_are_forgotten() -> None:
    used = UsedTokens()
    for number in range(100):
        used.take_token(f"a.{number}.c", number + 5.0, float(number))
    assert len(used) <= 5


def test_more_tokens_than_are_remembered_take_no_more_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(used_tokens, "MOST_TOKENS", 3)
    used = UsedTokens()
    for number in range(10):
        used.take_token(f"a.{number}.c", 100.0, 0.0)
    assert len(used) == 3
    assert not used.take_token("a.9.c", 100.0, 0.0)
