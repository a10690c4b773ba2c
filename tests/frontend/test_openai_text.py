"""Text while it is made: whole characters, and no further than a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.frontend.openai.text import StopStrings, StreamDetokenizer

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def of_bytes(token_ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(token_ids).decode("utf-8", "replace")


def of_words(token_ids: Sequence[int]) -> str:
    """One that has a space before each word but the first; token 0 is special."""
    return " ".join("abc"[token - 1] for token in token_ids if token)


def pieces(detokenizer: StreamDetokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.add(token) for token in token_ids), detokenizer.rest()]


def cut(stops: Sequence[str], text: str) -> str:
    """Letter by letter, as a stream does it."""
    one, whole = StopStrings(stops), ""
    for letter in text:
        more, stopped = one.add(letter)
        whole += more
        if stopped:
            return whole
    return whole + one.rest()


@given(st.text(), st.text())
def test_the_pieces_of_a_text_are_the_text(prompt: str, text: str) -> None:
    assert "".join(pieces(StreamDetokenizer(of_bytes, prompt.encode()), text.encode())) == text


@given(st.binary())
def test_bytes_that_are_no_text_come_as_they_would_all_at_once(data: bytes) -> None:
    assert "".join(pieces(StreamDetokenizer(of_bytes), data)) == of_bytes(data)


def test_a_character_comes_with_its_last_byte() -> None:
    assert pieces(StreamDetokenizer(of_bytes), "é€𝄞".encode()) == [
        *("", "é"), *("", "", "€"), *("", "", "", "𝄞"), "",
    ]  # fmt: skip


def test_a_character_that_the_prompt_has_begun_is_ended() -> None:
    begun, rest = "x€".encode()[:-1], "€".encode()[-1:]
    assert "".join(pieces(StreamDetokenizer(of_bytes, begun), rest)) == "€"


def test_half_a_character_at_the_end_is_told() -> None:
    assert pieces(StreamDetokenizer(of_bytes), "a€".encode()[:-1]) == ["a", "", "", "�"]


def test_a_space_between_words_is_kept_over_special_tokens_and_after_the_prompt() -> None:
    assert "".join(pieces(StreamDetokenizer(of_words, [1]), [2, 0, 3])) == " b c"


@given(STOPS, st.text("abc", max_size=30))
def test_a_text_ends_at_the_stop_string_that_is_complete_first(stops: list[str], text: str) -> None:
    ends = [at + len(one) for one in stops if (at := text.find(one)) >= 0]
    if not ends:
        assert cut(stops, text) == text
        return
    seen = text[: min(ends)]
    begins = min(seen.find(one) for one in stops if one in seen)
    assert cut(stops, text) == seen[:begins]


@pytest.mark.parametrize(("text", "out"), [("xa", "x"), ("xab", "x"), ("xb", "xb"), ("xac", "xac")])
def test_only_what_may_become_a_stop_string_is_held_back(text: str, out: str) -> None:
    assert StopStrings(["abc"]).add(text) == (out, False)


@given(st.lists(st.sampled_from([b"a", b"\x80", b"\xe4\xbd", "你".encode(), b"\xff" * 40])))
def test_what_waits_for_long_comes_as_it_would_all_at_once(parts: list[bytes]) -> None:
    data = b"".join(parts)
    assert "".join(pieces(StreamDetokenizer(of_bytes), data)) == of_bytes(data)


def test_a_token_costs_as_much_however_many_wait_for_a_text() -> None:
    decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return of_bytes(token_ids)

    detokenizer = StreamDetokenizer(decode)
    for _ in range(4000):
        detokenizer.add(0x80)
    before = decoded
    detokenizer.add(0x80)
    assert decoded - before <= 64
    assert detokenizer.add(ord("a")) == "\ufffd" * 4001 + "a"
