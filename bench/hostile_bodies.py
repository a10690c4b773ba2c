"""Bodies of calls that are made to hurt, each as large as it may come, and as large as it may be.

`huge`: as somebody sends it who wants to hurt. `fits`: the largest that a front end lets through.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bench.hostile_grammars import SCHEMAS, structured

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
MILLION = 10**6
ASKS = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
PNG_SIDE = 8000


class HostileCall(NamedTuple):
    """One call. kind: of what there is too much."""

    kind: str
    size: str
    path: str
    body: bytes


def _repeat(before: str, item: str, count: int, after: str) -> bytes:
    """A list of the same item again and again, without a Python object for each."""
    return (before + f"{item}," * (count - 1) + item + after).encode()


def _numbered(before: str, item: str, count: int, after: str) -> bytes:
    """An object, or a list, of numbered items."""
    return (before + ",".join(item.replace("#", str(one)) for one in range(count)) + after).encode()


Maker = Callable[[int], bytes]


Kind = tuple[str, str, Maker, int, int]
"""Its name, path, maker, huge count and the largest that fits (0: as many as the context)."""


def _kinds(model: str) -> Iterator[Kind]:
    yield from _bodies(model)
    yield from _grammars(model)
    yield from _answers(model)
    yield from _texts(model)


def _bodies(model: str) -> Iterator[Kind]:
    name = f'"model": {json.dumps(model)}, "max_tokens": 4'
    prompt = f'{{{name}, "prompt": "a", '
    chat = f'{{{name}, "messages": [{json.dumps(ASKS)}], '
    asks, tool, calls = json.dumps(ASKS), json.dumps(TOOL), json.dumps(CALLS)

    def lists(before: str, item: str, after: str = "]}") -> Maker:
        return lambda count: _repeat(before, item, count, after)

    def names(before: str, item: str, after: str = "}}") -> Maker:
        return lambda count: _numbered(before, item, count, after)

    yield (
        "messages", CHAT, lists(f'{{{name}, "messages": [', asks), MILLION, 1024,
    )  # fmt: skip
    yield "messages that are none", CHAT, lists(f'{{{name}, "messages": [', "1"), MILLION, 1024
    yield (
        "parts of a message", CHAT,
        lists(f'{{{name}, "messages": [{{"role": "user", "content": [',
              '{"type": "text", "text": "a"}', "]}]}"), MILLION, 3200,
    )  # fmt: skip
    yield "calls of tools", CHAT, lists(f'{{{name}, "messages": [', calls), MILLION // 4, 900
    yield "tools", CHAT, lists(f'{chat}"tools": [', tool), MILLION // 2, 1400
    yield (
        "names for the template", CHAT,
        names(f'{chat}"chat_template_kwargs": {{', '"k#": 1'), MILLION, 8000,
    )  # fmt: skip
    yield "token ids", COMPLETIONS, lists(f'{{{name}, "prompt": [', "1"), 30 * MILLION, 0
    yield "prompts", COMPLETIONS, lists(f'{{{name}, "prompt": [', '"a"'), MILLION, 256
    yield "prompts of token ids", COMPLETIONS, lists(f'{{{name}, "prompt": [', "[1]"), MILLION, 256
    yield (
        "allowed_token_ids", COMPLETIONS,
        lists(f'{prompt}"allowed_token_ids": [', "1"), 20 * MILLION, 16000,
    )  # fmt: skip
    yield (
        "stop_token_ids", COMPLETIONS,
        lists(f'{prompt}"stop_token_ids": [', "1"), 20 * MILLION, 16000,
    )  # fmt: skip
    yield "stop strings", COMPLETIONS, lists(f'{prompt}"stop": [', '"a"'), MILLION, 16000
    yield "bad words", COMPLETIONS, lists(f'{prompt}"bad_words": [', '"a"'), MILLION, 16000
    yield (
        "logit_bias", COMPLETIONS, names(f'{prompt}"logit_bias": {{', '"#": 1'), 3 * MILLION, 8000,
    )  # fmt: skip
    yield (
        "logit_bias that is none", COMPLETIONS,
        names(f'{prompt}"logit_bias": {{', '"k#": "x"'), MILLION, 8000,
    )  # fmt: skip
    yield (
        "vllm_xargs that are none", COMPLETIONS,
        names(f'{prompt}"vllm_xargs": {{', '"k#": {}'), MILLION, 340,
    )  # fmt: skip
    yield (
        "vllm_xargs, a list", COMPLETIONS,
        lists(f'{prompt}"vllm_xargs": {{"a": [', "1", "]}}"), 20 * MILLION, 1000,
    )  # fmt: skip
    yield (
        "vllm_xargs, names", COMPLETIONS,
        names(f'{prompt}"vllm_xargs": {{', '"k#": 1'), MILLION, 500,
    )  # fmt: skip
    yield "unknown field", COMPLETIONS, lists(f'{prompt}"unknown": [', "{}"), MILLION, 8000
    yield (
        "schema, wide", CHAT,
        names(f'{chat}"response_format": {{"type": "json_schema", "json_schema": {{"name": "s",'
              ' "schema": {"type": "object", "properties": {', '"p#": {"type": "string"}',
              "}}}}}"), 100_000, 4000,
    )  # fmt: skip
    yield (
        "schema, deep", CHAT,
        lambda count: (
            f'{chat}"response_format": {{"type": "json_schema", "json_schema": {{"name": "s",'
            ' "schema": ' + '{"type": "array", "items": ' * count + "{}" + "}" * count + "}}}"
        ).encode(), 100_000, 58,
    )  # fmt: skip
    yield (
        "choice", COMPLETIONS,
        names(f'{prompt}"structured_outputs": {{"choice": [', '"w#"', "]}}"), 200_000, 16000,
    )  # fmt: skip
    yield (
        "long regex", COMPLETIONS,
        lambda count: (
            f'{prompt}"structured_outputs": {{"regex": "' + "(a|b)" * (count // 5) + '"}}'
        ).encode(), MILLION, 20_000,
    )  # fmt: skip
    yield (
        "deep JSON", CHAT,
        lambda count: (f'{{{name}, "messages": ' + "[" * count + "]" * count + "}").encode(),
        100_000, 62,
    )  # fmt: skip
    yield "n", COMPLETIONS, lambda count: f'{prompt}"n": {count}}}'.encode(), 500, 16
    yield (
        "long text", COMPLETIONS,
        lambda count: (f'{{{name}, "prompt": "' + "a " * count + '"}').encode(), 30 * MILLION, 0,
    )  # fmt: skip
    yield (
        "/tokenize", "/tokenize",
        lambda count: (f'{{{name}, "prompt": "' + "a " * count + '"}').encode(),
        30 * MILLION, 0,
    )  # fmt: skip
    yield (
        "/tokenize, messages", "/tokenize",
        lists(f'{{"model": {json.dumps(model)}, "messages": [', asks), MILLION, 1024,
    )  # fmt: skip
    yield (
        "/detokenize", "/detokenize",
        lists(f'{{"model": {json.dumps(model)}, "tokens": [', "1"), 20 * MILLION, 0,
    )  # fmt: skip
    yield (
        "count_tokens", "/v1/messages/count_tokens", lists(f'{{{name}, "messages": [', asks),
        MILLION, 1024,
    )  # fmt: skip
    anthropic = f'{{{name}, "messages": ['
    yield "messages of Anthropic's", MESSAGES, lists(anthropic, asks), MILLION, 1024
    yield (
        "blocks of Anthropic's", MESSAGES,
        lists(f'{{{name}, "messages": [{{"role": "user", "content": [',
              '{"type": "text", "text": "a"}', "]}]}"), MILLION, 3200,
    )  # fmt: skip
    response = f'{{"model": {json.dumps(model)}, "max_output_tokens": 4, "input": ['
    yield "input of responses", RESPONSES, lists(response, asks), MILLION // 2, 1024
    yield "input that is none", RESPONSES, lists(response, '{"type": "x"}'), MILLION // 2, 1024
    yield "numbers as input", RESPONSES, lists(response, "1"), MILLION, 1024
    yield (
        "name of an adapter", COMPLETIONS,
        lambda count: (
            '{"model": "' + "x" * count + '", "prompt": "a", "max_tokens": 4}'
        ).encode(), 30 * MILLION, 500_000,
    )  # fmt: skip
    yield (
        "image", CHAT,
        lambda side: (
            f'{{{name}, "messages": [{{"role": "user", "content": [{{"type": "image_url",'
            f' "image_url": {{"url": "data:image/png;base64,{png(side).decode()}"}}}}]}}]}}'
        ).encode(), PNG_SIDE, 500,
    )  # fmt: skip


def _grammars(model: str) -> Iterator[Kind]:
    """Grammars of all forms, in each API that takes them."""
    name = f'"model": {json.dumps(model)}, "max_tokens": 4'
    for prompts in (1, 256):
        for kind, fits, make in structured(name, prompts):
            yield kind, COMPLETIONS, make, 20 * fits, fits
    schema = SCHEMAS[0]
    tool = f'{{"type": "function", "name": "f", "parameters": {schema.of(8)}}}'
    response = f'{{"model": {json.dumps(model)}, "max_output_tokens": 4, "input": "a", '
    yield (
        "tools of responses", RESPONSES,
        lambda count: _repeat(f'{response}"tools": [', tool, count, "]}"), MILLION // 20, 180,
    )  # fmt: skip
    yield (
        "text.format of responses", RESPONSES,
        lambda count: (
            f'{response}"text": {{"format": {{"type": "json_schema", "name": "s", "schema": '
            f"{schema.of(count)}}}}}}}"
        ).encode(), 100_000, schema.fits,
    )  # fmt: skip
    anthropic = f'{{{name}, "messages": [{json.dumps(ASKS)}], "tools": ['
    yield (
        "tools of Anthropic's", MESSAGES,
        lambda count: _repeat(
            anthropic, f'{{"name": "f", "input_schema": {schema.of(8)}}}', count, "]}"
        ), MILLION // 20, 180,
    )  # fmt: skip
    wants = f'{{{name}, "prompt": "a", "structured_outputs": '
    yield (
        "rules of a grammar", COMPLETIONS,
        lambda count: (
            f'{wants}{{"grammar": "root ::= r0' + "".join(
                f'\\nr{one} ::= [a-z] r{one + 1} | \\"x\\"' for one in range(count)
            ) + f'\\nr{count} ::= \\"y\\""}}}}'
        ).encode(), 100_000, 1800,
    )  # fmt: skip
    tags = ", ".join(
        f'{{"begin": "<f{one}>", "schema": {SCHEMAS[0].of(4)}, "end": "</f>"}}' for one in range(9)
    )
    yield (
        "structural tag", COMPLETIONS,
        lambda count: (
            f"{wants}" + json.dumps({"structural_tag": (
                f'{{"type": "structural_tag", "structures": [{", ".join([tags] * count)}],'
                ' "triggers": ["<f"]}'
            )}) + "}"
        ).encode(), 2000, 20,
    )  # fmt: skip


def _answers(model: str) -> Iterator[Kind]:
    """Small calls with large answers, or answers that take an engine's step long."""
    named = f'{{"model": {json.dumps(model)}, '
    completion = named + '"temperature": 1.0, "prompt": "a", '
    chat = f'{named}"temperature": 1.0, "messages": [{json.dumps(ASKS)}], '

    def ids(before: str) -> Maker:
        return lambda count: _repeat(named + before + ' "prompt": [', "1", count, "]}")

    def number(before: str) -> Maker:
        return lambda count: f"{before}{count}}}".encode()

    yield "prompt_logprobs", COMPLETIONS, ids('"max_tokens": 1, "prompt_logprobs": 20,'), 0, 1500
    yield "echo", COMPLETIONS, ids('"max_tokens": 1, "echo": true, "logprobs": 20,'), 0, 1500
    yield (
        "logprobs of a completion", COMPLETIONS,
        number(f'{completion}"logprobs": 20, "n": 16, "max_tokens": '), 100_000, 90,
    )  # fmt: skip
    yield (
        "logprobs of a chat", CHAT,
        number(f'{chat}"logprobs": true, "top_logprobs": 20, "n": 16, "max_tokens": '),
        100_000, 90,
    )  # fmt: skip
    yield (
        "logprobs of a stream", CHAT,
        number(f'{chat}"logprobs": true, "top_logprobs": 20, "stream": true, "max_tokens": '),
        100_000, 90,
    )  # fmt: skip
    yield (
        "echo of a stream", COMPLETIONS,
        ids('"max_tokens": 1, "echo": true, "logprobs": 20, "stream": true,'), 0, 1500,
    )  # fmt: skip
    yield (
        "logprobs of a batch", "/v1/chat/completions/batch",
        number(f'{named}"messages": {json.dumps([[ASKS]] * 16)}, "logprobs": true,'
               ' "top_logprobs": 20, "max_tokens": '), 100_000, 90,
    )  # fmt: skip
    response = f'{named}"input": "a", "include": ["message.output_text.logprobs"], '
    for stream in ("", ' "stream": true,'):
        yield (
            f"logprobs of a response{' as a stream' if stream else ''}", RESPONSES,
            number(f'{response}"top_logprobs": 20,{stream} "max_output_tokens": '), 100_000, 1500,
        )  # fmt: skip
    yield (
        "logprobs of token ids", "/inference/v1/generate",
        lambda count: (
            f'{named}"token_ids": [1, 2], "sampling_params": {{"temperature": 1.0,'
            f' "logprobs": 20, "n": 16, "max_tokens": {count}}}}}'
        ).encode(), 100_000, 90,
    )  # fmt: skip
    yield (
        "logprob_token_ids", COMPLETIONS,
        lambda count: _numbered(
            completion + '"max_tokens": 90, "logprob_token_ids": [', "#", count, "]}"
        ), MILLION, 128,
    )  # fmt: skip
    yield (
        "long prompt, many answers", COMPLETIONS,
        ids('"max_tokens": 1, "temperature": 1.0, "n": 16,'), 30 * MILLION, 0,
    )  # fmt: skip
    yield (
        "beams", COMPLETIONS,
        number(f'{named}"prompt": "a", "use_beam_search": true, "n": 10, "max_tokens": '),
        100_000, 50,
    )  # fmt: skip
    yield (
        "beams of a long prompt", COMPLETIONS,
        ids('"max_tokens": 8, "use_beam_search": true, "n": 10,'), 30 * MILLION, 0,
    )  # fmt: skip
    yield (
        "bad words, each another", COMPLETIONS,
        lambda count: _numbered(
            completion + '"max_tokens": 4, "bad_words": [', '"w#"', count, "]}"
        ),
        MILLION, 16_000,
    )  # fmt: skip
    yield (
        "long bad word", COMPLETIONS,
        lambda count: f'{completion}"max_tokens": 4, "bad_words": ["{"a " * count}"]}}'.encode(),
        30 * MILLION, 0,
    )  # fmt: skip
    yield (
        "long stop strings", COMPLETIONS,
        lambda count: (
            f'{completion}"max_tokens": 90, "stop": ["{"a" * count}", "{"b" * count}"]}}'
        ).encode(), 30 * MILLION, 0,
    )  # fmt: skip


def _texts(model: str) -> Iterator[Kind]:
    """Texts of which each is a prompt: for models that embed, score or classify."""
    named = f'{{"model": {json.dumps(model)}, '

    def lists(before: str) -> Maker:
        return lambda count: _repeat(before, '"a"', count, "]}")

    for path in ("/v1/embeddings", "/pooling", "/classify"):
        yield f"texts of {path}", path, lists(named + '"input": ['), MILLION, 256
    yield (
        "texts of token ids", "/v1/embeddings",
        lambda count: _repeat(named + '"input": [[', "1", count, "]]}"), 30 * MILLION, 0,
    )  # fmt: skip
    yield "texts of /v2/embed", "/v2/embed", lists(named + '"texts": ['), MILLION, 256
    scored = f'{named}"text_1": "a", "text_2": ['
    ranked = f'{named}"query": "a", "documents": ['
    for path, before in (("/score", scored), ("/rerank", ranked)):
        yield f"documents of {path}", path, lists(before), MILLION, 256


def png(side: int) -> bytes:
    """A square of one colour, as base64: small however large it is."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    squeeze = zlib.compressobj(9)
    row = b"\0" + b"\x40" * (3 * side)
    pixels = b"".join(squeeze.compress(row) for _ in range(side)) + squeeze.flush()
    whole = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels)
    return base64.b64encode(whole + chunk(b"IEND", b""))


def hostile_calls(
    model: str, context: int, only: Callable[[str], bool] = lambda kind: True
) -> Iterator[HostileCall]:
    """All of them, made one after the other. context: of the model, in tokens."""
    for kind, path, make, huge, fits in _kinds(model):
        if only(kind):
            yield HostileCall(kind, "huge", path, make(huge))
            yield HostileCall(kind, "fits", path, make(fits or context - 8))


def ordinary_call(model: str) -> HostileCall:
    """One as anybody sends it."""
    fields: dict[str, Any] = {"model": model, "prompt": "hello", "max_tokens": 4}
    return HostileCall("an ordinary call", "fits", COMPLETIONS, json.dumps(fields).encode())
