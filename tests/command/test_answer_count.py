"""What answers of other engines count: by their own words, else by a rule, never nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmig.asgi.route_table import find_route
from kvmig.command.answer_count import PACE_FIRST, AnswerCount, AnswerPace
from kvmig.command.call_plan import CallPlan

CHAT = "/v1/chat/completions"


def counting(path: str = CHAT, *, prompt: int = 10, sequences: int = 1, **more: Any) -> AnswerCount:
    found = find_route("POST", path)
    assert found is not None
    return AnswerCount(found.route, CallPlan(b"", prompt=prompt, **more), sequences)


def counted(count: AnswerCount) -> tuple[int, int, int]:
    return count.prompt, count.cached, count.output


def event(data: Any, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def chunk(text: str, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}], **more})


def test_a_whole_answer_counts_as_it_says() -> None:
    count = counting()
    usage = {
        "prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    count.take_whole(json.dumps({"choices": [], "usage": usage}).encode(), json=True)
    assert counted(count) == (7, 4, 9)


def test_a_stream_counts_by_its_text_until_it_says_what_it_used() -> None:
    count = counting()
    for _ in range(3):
        assert not count.take_event(chunk(" a"))
    assert counted(count) == (10, 0, 3)
    assert count.take_event(
        event({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 5}})
    )
    assert not count.take_event(b"data: [DONE]\n\n")
    assert counted(count) == (2, 0, 5)


def test_long_events_of_a_stream_count_by_their_bytes() -> None:
    count = counting()
    count.take_event(chunk("a" * 41))
    assert count.output == 11


def test_a_running_usage_of_one_choice_counts_as_it_comes() -> None:
    count = counting()
    usage = {"prompt_tokens": 2, "completion_tokens": 40}
    assert not count.take_event(chunk("a", usage=usage))
    assert counted(count) == (2, 0, 40)


def test_a_running_usage_of_one_of_several_choices_is_not_the_calls() -> None:
    count = counting(sequences=2)
    count.take_event(chunk("a", usage={"prompt_tokens": 2, "completion_tokens": 40}))
    assert counted(count) == (10, 0, 1)


def test_an_answer_without_usage_counts_by_the_bytes_of_its_text() -> None:
    count = counting()
    answer = {"choices": [{"message": {"content": "a" * 9, "reasoning_content": "b"}}]}
    count.take_whole(json.dumps(answer).encode(), json=True)
    assert counted(count) == (10, 0, 3)


def test_tool_calls_are_text_too() -> None:
    count = counting()
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    count.take_whole(
        json.dumps({"choices": [{"message": {"tool_calls": [call]}}]}).encode(), json=True
    )
    assert count.output > 5


@pytest.mark.parametrize("body", [b"[1, 2, 3, 4]", b"no JSON at all", b'{"choices": 5, "a": 123}'])
def test_an_answer_in_no_known_form_counts_by_all_its_bytes(body: bytes) -> None:
    count = counting()
    count.take_whole(body, json=True)
    assert count.output == -(-len(body) // 4)


def test_a_server_that_says_zero_says_nothing() -> None:
    count = counting("/v1/embeddings")
    count.take_whole(b'{"data": [], "usage": {"prompt_tokens": 0, "total_tokens": 0}}', json=True)
    assert counted(count) == (10, 0, 0)


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        ("/v1/embeddings", {"prompt_tokens": 6, "total_tokens": 6}),
        ("/v1/rerank", {"total_tokens": 6}),
        ("/v1/score", {"prompt_tokens": 6, "completion_tokens": 0}),
    ],
)
def test_what_has_only_prompts_counts_no_output(path: str, usage: dict[str, int]) -> None:
    count = counting(path)
    count.take_whole(json.dumps({"data": ["x" * 100], "usage": usage}).encode(), json=True)
    assert counted(count) == (6, 0, 0)


def test_a_response_counts_as_its_last_event_says() -> None:
    count = counting("/v1/responses")
    count.take_event(event({"type": "response.output_text.delta", "delta": "a"}))
    count.take_event(event({"type": "response.output_text.done", "text": "a" * 100}))
    assert counted(count) == (10, 0, 1)
    usage = {"input_tokens": 3, "output_tokens": 8, "input_tokens_details": {"cached_tokens": 1}}
    count.take_event(event({"type": "response.completed", "response": {"usage": usage}}))
    assert counted(count) == (3, 1, 8)


def test_a_message_counts_its_cached_prompt_too() -> None:
    count = counting("/v1/messages")
    first = {"input_tokens": 3, "cache_read_input_tokens": 5, "output_tokens": 1}
    count.take_event(event({"type": "message_start", "message": {"usage": first}}))
    count.take_event(event({"type": "content_block_delta", "delta": {"text": "abc"}}))
    count.take_event(event({"type": "message_delta", "usage": {"output_tokens": 12}}))
    assert counted(count) == (8, 5, 12)


def test_a_recording_without_words_has_no_tokens() -> None:
    count = counting("/v1/audio/transcriptions", prompt=0)
    count.take_whole(b'{"text": ""}', json=True)
    assert count.output == 0


def test_a_transcription_without_tokens_counts_its_text() -> None:
    count = counting("/v1/audio/transcriptions", prompt=0)
    answer = {"text": "a" * 8, "usage": {"type": "duration", "seconds": 7}}
    count.take_whole(json.dumps(answer).encode(), json=True)
    assert counted(count) == (0, 0, 2)
    assert count.seconds == 7


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        ({"text": "a", "usage": {"type": "duration", "seconds": 2.1}}, 3),
        ({"text": "a", "duration": "8.47"}, 9),
        ({"text": "a"}, 5),
        ({"text": "a", "duration": "long"}, 5),
        ({"text": "a", "usage": {"input_tokens": 3, "output_tokens": 1}}, 5),
    ],
)
def test_seconds_are_the_servers_or_else_the_recordings(
    answer: dict[str, Any], seconds: int
) -> None:
    count = counting("/v1/audio/transcriptions", prompt=0, seconds=5)
    count.take_whole(json.dumps(answer).encode(), json=True)
    assert count.seconds == seconds


def test_images_are_those_that_came() -> None:
    count = counting("/v1/images/generations", images=3)
    count.take_whole(b'{"created": 1, "data": [{"url": "a"}, {"url": "b"}]}', json=True)
    assert (count.images, *counted(count)) == (2, 10, 0, 0)


def test_speech_counts_its_characters_and_its_text_as_a_prompt() -> None:
    count = counting("/v1/audio/speech", characters=40)
    count.take_text(b"")
    assert (count.characters, *counted(count)) == (40, 10, 0, 0)


def test_a_message_that_is_cut_counts_the_text_after_its_first_usage() -> None:
    count = counting("/v1/messages")
    first = {"input_tokens": 3, "output_tokens": 1}
    count.take_event(event({"type": "message_start", "message": {"usage": first}}))
    for _ in range(50):
        count.take_event(event({"type": "content_block_delta", "delta": {"text": "abc"}}))
    assert counted(count) == (3, 0, 51)


def test_a_stream_of_which_the_first_usage_has_no_answer_yet_is_not_free() -> None:
    count = counting()
    count.take_event(chunk("", usage={"prompt_tokens": 4, "completion_tokens": 0}))
    for _ in range(5):
        count.take_event(chunk(" a"))
    assert counted(count) == (4, 0, 5)


@pytest.mark.parametrize("lie", [-1, 2**53 + 1, 10**30, 1.5, True, "7", None])
def test_a_number_that_no_ledger_takes_is_no_usage(lie: Any) -> None:
    count = counting()
    answer = {
        "choices": [{"message": {"content": "a" * 9}}],
        "usage": {"prompt_tokens": lie, "completion_tokens": lie},
    }
    count.take_whole(json.dumps(answer).encode(), json=True)
    assert counted(count) == (10, 0, 3)


@pytest.mark.parametrize("lie", [1e300, "1e300", "NaN", -4, "Infinity"])
def test_seconds_that_no_recording_has_are_not_believed(lie: Any) -> None:
    count = counting("/v1/audio/transcriptions", prompt=0, seconds=5)
    count.take_whole(json.dumps({"text": "a", "duration": lie}).encode(), json=True)
    assert count.seconds == 5


def test_the_cached_prompt_of_a_message_stays_within_what_the_ledger_takes() -> None:
    count = counting("/v1/messages")
    usage = {"input_tokens": 2**53, "cache_read_input_tokens": 2**53, "output_tokens": 1}
    count.take_event(event({"type": "message_start", "message": {"usage": usage}}))
    assert count.prompt == 2**53


def test_a_whole_answer_whose_client_has_left_counts_by_the_servers_time() -> None:
    pace = AnswerPace()
    assert pace.estimate_output(2.0, 1, 10_000) == 2 * PACE_FIRST

    pace.learn_answer(100, 1, 10.0)

    assert pace.estimate_output(2.0, 1, 10_000) == 20
    assert pace.estimate_output(2.0, 3, 10_000) == 60, "all its sequences"
    assert pace.estimate_output(2.0, 1, 7) == 7, "never more than the call's limit"
    assert pace.estimate_output(0.0, 2, 10_000) == 2, "never nothing"
    assert pace.estimate_output(5.0, 1, 0) == 0, "a call without an answer of text"


@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_an_answer_of_few_tokens_or_no_time_shows_no_pace(seconds: float) -> None:
    pace = AnswerPace()
    pace.learn_answer(3 if seconds else 300, 1, seconds)
    assert pace.estimate_output(1.0, 1, 10_000) == PACE_FIRST


@pytest.mark.parametrize(("path", "output"), [(CHAT, 9), ("/v1/embeddings", 0)])
def test_what_was_made_for_a_client_that_has_left_counts_where_answers_do(
    path: str, output: int
) -> None:
    count = counting(path)
    count.take_left(9)
    assert count.output == output
