"""The sequences of a call, counted on its body, are those that the front end then runs."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from python_multipart.multipart import MultipartParser
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.renderers.inputs.preprocess import prompt_to_seq

from kvmig.asgi.call_work import CallWork, sequences_of, work_of
from kvmig.asgi.route_table import CLIENT_ROUTES, ClientRoute, find_route

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
IDS = st.lists(st.integers(0, 2**31), min_size=1, max_size=4)
PROMPTS = st.one_of(
    TEXTS, IDS, st.lists(TEXTS, min_size=1, max_size=9), st.lists(IDS, min_size=1, max_size=9)
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}), min_size=1, max_size=3
)
NUMBERS = st.integers(1, 40).flatmap(lambda n: st.sampled_from((n, float(n), str(n))))


def route_of(path: str) -> ClientRoute:
    found = find_route("POST", path)
    assert found is not None
    return found.route


def counted(path: str, body: dict[str, Any], **spelling: Any) -> int:
    return sequences_of(route_of(path), json.dumps(body, **spelling).encode())


@given(PROMPTS, NUMBERS, st.booleans(), st.booleans(), st.sampled_from((None, 1)))
def test_of_a_completion_as_vllm_reads_it(
    prompt: Any, n: Any, beams: bool, ascii_only: bool, indent: int | None
) -> None:
    body = {"model": "m", "prompt": prompt, "n": n, "use_beam_search": beams}
    request = CompletionRequest.model_validate(body)
    assert request.prompt is not None
    expected = request.n * len(prompt_to_seq(request.prompt))
    assert counted("/v1/completions", body, ensure_ascii=ascii_only, indent=indent) == expected


@given(MESSAGES, NUMBERS)
def test_of_a_chat_as_vllm_reads_it(messages: Any, n: Any) -> None:
    body = {"messages": messages, "n": n}
    expected = ChatCompletionRequest.model_validate(body).n
    assert counted("/v1/chat/completions", body) == expected


@given(st.lists(MESSAGES, min_size=1, max_size=6))
def test_of_a_batch_as_vllm_reads_it(messages: Any) -> None:
    body = {"messages": messages}
    expected = len(BatchChatCompletionRequest.model_validate(body).messages)
    assert counted("/v1/chat/completions/batch", body) == expected


CONTENT = {"content": [{"type": "text", "text": "a"}]}
BODIES: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/embeddings", {"input": "a"}, 1),
    ("/v1/embeddings", {"input": [1, 2, 3]}, 1),
    ("/v1/embeddings", {"input": ["a", "b"]}, 2),
    ("/v1/embeddings", {"input": [[1], [2], [3]]}, 3),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}, 1),
    ("/v1/embeddings", {"messages": [[{"role": "user", "content": "a"}]] * 4}, 4),
    ("/v1/embeddings", {"input": [[{"role": "user", "content": "a"}]] * 4}, 4),
    ("/v1/embeddings", {"input": ["a", "b"], "n": 9}, 2),
    ("/v2/embed", {"texts": ["a", "b"]}, 2),
    ("/v2/embed", {"inputs": [CONTENT] * 3}, 3),
    ("/v2/embed", {"images": ["data:", "data:"]}, 2),
    ("/pooling", {"input": ["a", "b"]}, 2),
    ("/classify", {"input": ["a", "b"]}, 2),
    ("/score", {"text_1": "a", "text_2": ["b", "c", "d"]}, 3),
    ("/v1/score", {"queries": ["a", "b"], "documents": ["c", "d"]}, 2),
    ("/score", {"data_1": "a", "data_2": [CONTENT, CONTENT]}, 2),
    ("/score", {"data_1": "a", "data_2": CONTENT}, 1),
    ("/rerank", {"query": "a", "documents": ["b", "c"]}, 2),
    ("/v2/rerank", {"query": "a", "documents": [CONTENT] * 5}, 5),
    ("/generative_scoring", {"query": "a", "items": ["b", "c"], "label_token_ids": [1]}, 2),
    ("/generative_scoring", {"query": [1], "items": [[1], [2]], "label_token_ids": [1]}, 2),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 7}}, 7),
    ("/inference/v1/generate", {"token_ids": [1], "n": 7}, 1),
    ("/v1/systemone", {"state": "a", "questions": {"x": {"type": "a"}, "y": {"type": "b"}}}, 2),
    ("/invocations", {"prompt": ["a", "b"], "n": 3}, 6),
    ("/invocations", {"messages": [{"role": "user", "content": "a"}], "n": 3}, 3),
    ("/invocations", {"query": "a", "documents": ["b", "c"]}, 2),
    ("/cohere/v2/chat", {"messages": [{"role": "user", "content": "a"}], "n": 3}, 1),
    ("/v1/responses", {"input": "a", "n": 9}, 1),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "n": 9}, 1),
    ("/v1/images/generations", {"prompt": "a", "n": 3}, 3),
    ("/v1/audio/speech", {"input": "a", "voice": "b", "n": 9}, 1),
]


@pytest.mark.parametrize(("path", "body", "expected"), BODIES)
def test_of_each_other_api(path: str, body: dict[str, Any], expected: int) -> None:
    assert counted(path, body) == expected


def test_each_route_that_works_is_counted() -> None:
    named = {path for path, *_ in BODIES} | {
        "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch",
        "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/rerank", "/v1/images/edits",
        "/v1/images/variations",
    }  # fmt: skip
    assert {one.path for one in CLIENT_ROUTES if one.works} <= named


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"prompt": "a", "n": 2, "n": 500}', 500),
        (b'{"prompt": "a", "n": 500, "n": 2}', 2),
        (b'{"prompt": "a", "\\u006e": 500}', 500),
        (b'{"prompt" : [ "a" , "[\\"b\\",\\"c\\"]" ] }', 2),
        (b'{"prompt": [ [1, 2],\n[3] ]}', 2),
        (b'{"prompt": "a", "n": null}', 1),
        (b'{"prompt": null, "prompt_embeds": ["a", "b"]}', 2),
        (b'{"prompt": ["a", "b"], "prompt_embeds": ["c", "d", "e"]}', 5),
        (b'{"prompt": "a", "n": -4}', 1),
        (b'{"prompt": "a", "n": 1e400}', 1),
        (b'{"prompt": "a", "n": [5]}', 1),
        (b'{"prompt": []}', 1),
        (b'{"prompt": "a", "n": 500, "top_p": NaN}', 500),
        (b'{"prompt": ["\\ud800", "b"], "n": 3}', 6),
        ('{"prompt": [[1], [2]], "n": 500}'.encode("utf-16"), 1000),
        (b"no JSON", 1),
        (b'["a"]', 1),
        (b"[" * 100_000, 1),
    ],
)
def test_of_bodies_that_are_spelt_oddly(body: bytes, expected: int) -> None:
    assert sequences_of(route_of("/v1/completions"), body) == expected


def test_the_field_with_the_prompts_is_named() -> None:
    body = b'{"prompt": ["a", "b"], "n": 3}'
    assert work_of(route_of("/v1/completions"), body) == CallWork(3, 2, "prompt")
    assert work_of(route_of("/v1/completions"), b'{"prompt": "a"}') == CallWork()


def test_a_form_names_its_beams() -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="n"\r\n\r\n500\r\n--x--\r\n'
    assert sequences_of(route_of("/v1/audio/transcriptions"), form) == 500


def form_of(head: str, value: str, before: str = "", boundary: str = "x") -> bytes:
    first = 'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\nRIFF'
    form = f"{before}--{boundary}\r\n{first}\r\n--{boundary}\r\n{head}\r\n\r\n{value}\r\n"
    return f"{form}--{boundary}--\r\n".encode()


FIELD = 'Content-Disposition: form-data; name="n"'


@pytest.mark.parametrize(
    "form",
    [
        form_of(FIELD, "8"),
        form_of("content-disposition:form-data;NAME = n ;a=b\r\nContent-Type: text/plain", "8"),
        form_of(f"Content-Type: text/plain\r\nX-Y: z\r\n{FIELD}", "8"),
        form_of(FIELD, "\r\n\t 8 "),
        form_of(FIELD, "+8"),
        form_of(FIELD, "0" * 60 + "8"),
        form_of(FIELD, "8.0"),
        form_of(FIELD, "8", before="\r\nnothing "),
        form_of(FIELD, "8").replace(b"RIFF\r\n--x\r\n", b"RI\r\n--xFF\r\n--x \t\r\n"),
        form_of(FIELD, "8", boundary="y" * 70),
    ],
)
def test_no_spelling_of_a_forms_n_hides_sequences_from_a_limit(form: bytes) -> None:
    boundary = form[form.index(b"--") + 2 :].split(b"\r\n")[0]
    found: list[bytes] = []
    parser = MultipartParser(boundary, {"on_part_data": lambda d, a, b: found.append(d[a:b])})
    parser.write(form)
    parser.finalize()
    assert int(float(found[-1])) == 8, "so does its parser read it"
    assert sequences_of(route_of("/v1/audio/transcriptions"), form) == 8


def test_a_form_without_an_n_asks_for_one_sequence() -> None:
    form = form_of('Content-Disposition: form-data; name="language"', "8")
    assert sequences_of(route_of("/v1/audio/transcriptions"), form) == 1


@pytest.mark.parametrize(
    "unit",
    [
        b"name=n\r\n",
        b"name=n;",
        b"name=n;\r\n\r\n",
        b"\r\n--x\r\nname=n\r\n\r\n1",
        b"\r\n--x ",
        b"\r",
    ],
)
def test_a_form_takes_time_in_proportion_to_its_size(unit: bytes) -> None:
    form = b"--x\r\n" + unit * (1_000_000 // len(unit))
    began = time.process_time()
    sequences_of(route_of("/v1/audio/transcriptions"), form)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("prompt", [b'["",', b"[[],", b'["\\"\\"\\"\\"",'])
def test_a_list_without_end_is_counted_without_a_copy_of_its_items(prompt: bytes) -> None:
    item = prompt[1:]
    body = b'{"prompt": [' + item * 1_000_000 + item[:-1] + b"]}"
    assert sequences_of(route_of("/v1/completions"), body) >= 100_000


@pytest.mark.parametrize(
    "spelt",
    [
        '"\\u0038"', '"8\\n"', '"\\t 8"', '" 8 "', '"+8"', '"8.0"', '"0_8"', "8.0", "8e0", "0.8e1",
        '"%s8"' % ("0" * 60), '"8.%s"' % ("0" * 60), "8.%s" % ("0" * 60), '"\\u00a08\\u2003"',
        '"%s8"' % ("\\u0030" * 60),
    ],
)  # fmt: skip
def test_no_spelling_of_n_hides_sequences_from_a_limit(spelt: str) -> None:
    body = f'{{"model": "m", "prompt": "a", "n": {spelt}}}'
    assert CompletionRequest.model_validate(json.loads(body)).n == 8
    assert sequences_of(route_of("/v1/completions"), body.encode()) == 8
    ids = f'{{"token_ids": [1], "sampling_params": {{"n": {spelt}}}}}'
    assert sequences_of(route_of("/inference/v1/generate"), ids.encode()) == 8


@pytest.mark.parametrize(
    "spelt", ["null", "true", '"x"', '"nan"', '"inf"', "{}", "[2]", "-3", '""']
)
def test_an_n_that_is_none_counts_as_one(spelt: str) -> None:
    assert sequences_of(route_of("/v1/completions"), b'{"n": %s}' % spelt.encode()) == 1


def test_an_n_of_more_text_than_any_number_has_counts_as_more_than_is_allowed() -> None:
    body = '{"prompt": "a", "n": "%s8"}' % ("0" * 10_000)
    assert sequences_of(route_of("/v1/completions"), body.encode()) > 1000
