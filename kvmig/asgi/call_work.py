"""How many sequences a call asks for: its answers to each prompt, times its prompts. Pure.

Counted on the raw body, before anything else of it is decoded: limits of keys and of queues hold
for sequences, and a call may have only a number of them. Where the engine would refuse a body, any
number will do. A recording of any length counts as one.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from kvmig.asgi.route_table import ClientRoute
from kvmig.asgi.session_id import LONGEST_SESSION

COUNTED = 100_000
"""Items that are counted one by one; of a list that may have more, the most that it may have."""
LONGEST_N_JSON = 4096
"""Bytes of a number that is read; a longer one counts as more than any call may have."""
LONGEST_HEAD = 1 << 16
"""Bytes of the head of a form's part, at most; parsers take half of that."""
LONGEST_SESSION_JSON = 12 * LONGEST_SESSION + 2
"""Bytes of a session's id as JSON, each character as two escapes."""
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for a body that is no JSON of the kind."""


class CallWork(NamedTuple):
    """What a call asks for. field: the one that names the prompts; empty: there is only one."""

    n: int = 1
    prompts: int = 1
    field: str = ""
    session: str = ""
    """The session that its body names: `prompt_cache_key`, or else `user`."""

    @property
    def sequences(self) -> int:
        """Sequences that engines run for it, beams included."""
        return self.n * self.prompts


class _Fields(msgspec.Struct):
    n: Raw = Raw(b"1")
    sampling_params: Raw = Raw(b"{}")
    prompt: Raw = Raw(b"")
    prompt_embeds: Raw = Raw(b"")
    messages: Raw = Raw(b"")
    input: Raw = Raw(b"")
    inputs: Raw = Raw(b"")
    texts: Raw = Raw(b"")
    images: Raw = Raw(b"")
    text_1: Raw = Raw(b"")
    text_2: Raw = Raw(b"")
    data_1: Raw = Raw(b"")
    data_2: Raw = Raw(b"")
    queries: Raw = Raw(b"")
    documents: Raw = Raw(b"")
    items: Raw = Raw(b"")
    questions: Raw = Raw(b"")
    prompt_cache_key: Raw = Raw(b"")
    user: Raw = Raw(b"")


_PAIRS = ("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items")
_PROMPTS: dict[str, tuple[str, ...]] = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions/batch": ("messages",),
    "/generative_scoring": ("items",),
    "/v1/systemone": ("questions",),
    "/v1/embeddings": ("input", "messages"),
    "/v2/embed": ("texts", "inputs", "images"),
    "/pooling": ("input", "messages"),
    "/classify": ("input", "messages"),
    "/score": _PAIRS,
    "/v1/score": _PAIRS,
    "/rerank": ("documents",),
    "/v1/rerank": ("documents",),
    "/v2/rerank": ("documents",),
    "/invocations": ("prompt", "input", "messages", *_PAIRS),
}
"""Fields that hold prompts, by path: the one with the most counts."""
_WITH_N = frozenset(
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/invocations",
        "/v1/images/generations",
    )
)
_CONVERSATIONS = frozenset(("messages", "input"))
"""Fields in which a list of objects is one conversation, and no list of prompts."""


def work_of(route: ClientRoute, body: bytes) -> CallWork:
    """What a call of this route asks for. A body that is no JSON object asks for one sequence."""
    if route.content in ("audio", "image"):
        return CallWork(_form_n(body))
    try:
        fields = msgspec.json.decode(body, type=_Fields)
    except UNREADABLE:
        fields = _fields_of_odd(body)
    n = 1
    if route.path in _WITH_N:
        n = _number(fields.n)
    elif route.path == "/inference/v1/generate":
        n = _number(_member(fields.sampling_params))
    most, prompts = "", 1
    for name in _PROMPTS.get(route.path, ()):
        count = _count(getattr(fields, name), name)
        if name == "prompt":  # vLLM runs both
            count += _count(fields.prompt_embeds, "prompt_embeds")
        if count > prompts:
            most, prompts = name, count
    return CallWork(n, prompts, most, _session(fields.prompt_cache_key) or _session(fields.user))


def sequences_of(route: ClientRoute, body: bytes) -> int:
    """Sequences that engines run for the call."""
    return work_of(route, body).sequences


def _fields_of_odd(body: bytes) -> _Fields:
    """Fields of JSON that engines read, and msgspec doesn't: NaN, UTF-16, half surrogates."""
    try:
        known = json.loads(body)
    except (ValueError, RecursionError):
        return _Fields()
    if not isinstance(known, dict):
        return _Fields()
    names = [one for one in _Fields.__struct_fields__ if one in known]
    return _Fields(**{one: Raw(json.dumps(known[one]).encode()) for one in names})


def _session(value: Raw) -> str:
    """A session's id; empty where it is none, or too long for one."""
    if len(value) > LONGEST_SESSION_JSON:
        return ""
    try:
        session = msgspec.json.decode(value, type=str)
    except UNREADABLE:
        return ""
    return session if len(session) <= LONGEST_SESSION else ""


# -- prompts


def _count(value: Raw, name: str) -> int:
    """Prompts in a field's value."""
    text = bytes(value).lstrip()
    if name == "questions":
        return _items(text, b":", dict[str, Raw])
    if not text.startswith(b"["):
        return int(text not in (b"", b"null"))
    match text[1:].lstrip()[:1]:
        case b'"':
            return _strings(text)
        case b"[":
            return _items(text, b"[", list[Raw])
        case b"{" if name not in _CONVERSATIONS:
            return _items(text, b"{", list[Raw])
    return 1  # token ids, or a conversation


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def _strings(text: bytes) -> int:
    """Number of items of a list of strings, without a copy of any."""
    count = 0
    for _ in _STRING.finditer(text):
        count += 1
        if count == COUNTED:
            break
    return count


def _items(text: bytes, opening: bytes, kind: type[list[Raw]] | type[dict[str, Raw]]) -> int:
    """Number of items of a list or an object of which each item has an `opening`."""
    most = text.count(opening)
    if most > COUNTED:
        return most
    try:
        return len(msgspec.json.decode(text, type=kind))
    except UNREADABLE:
        return most


# -- n


class _Sampling(msgspec.Struct):
    n: Raw = Raw(b"1")


def _member(sampling: Raw) -> Raw:
    try:
        return msgspec.json.decode(sampling, type=_Sampling).n
    except UNREADABLE:
        return Raw(b"1")


def _number(value: Raw) -> int:
    """An integer as pydantic takes it: also as text, however that is spelt, or with a point."""
    if len(value) > LONGEST_N_JSON:
        return COUNTED
    try:
        return _whole(msgspec.json.decode(value))
    except UNREADABLE:
        return 1


def _whole(found: Any) -> int:
    try:
        if isinstance(found, str):
            found = float(found)
        return max(1, int(found)) if isinstance(found, int | float) else 1
    except (ValueError, OverflowError):
        return 1


_FIRST_LINE = re.compile(rb"(--[^\r\n]+)\r\n")
_PADDING = re.compile(rb"[ \t]*\r\n")
_NAMED_N = re.compile(rb'name[ \t]*=[ \t]*(?:"n"|n)[ \t]*[;\r]')
"""A part's name, in a head in small letters."""
_VALUE = re.compile(rb"\s*([^\r\n]*)")


def _form_n(body: bytes) -> int:
    """The largest `n` in a form. Its parts are found as python-multipart finds them, and each byte
    is looked at a few times.

    The boundary is that of the first line: with another one the form can't be read.
    """
    begin = max(0, body.find(b"-")) if body[:1] in (b"\r", b"\n") else 0
    line = _FIRST_LINE.match(body, begin)
    if line is None:
        return 1
    delimiter, at, begins, most = b"\r\n" + line[1], line.end(), True, 1
    for _ in range(COUNTED):
        if begins:
            end = body.find(b"\r\n\r\n", at - 2)
            if end < 0:
                return most
            head = body[max(at, end - LONGEST_HEAD) : end + 1].lower()
            if _NAMED_N.search(head) is not None:
                most = max(most, _text_number(body, end + 4))
            at = end + 2
        at = body.find(delimiter, at)
        if at < 0:
            return most
        at += len(delimiter)
        padding = _PADDING.match(body, at)
        begins = padding is not None
        at = at if padding is None else padding.end()
    return COUNTED


def _text_number(body: bytes, at: int) -> int:
    """The number that stands there as text."""
    found = _VALUE.match(body, at)
    start, end = (at, at) if found is None else found.span(1)
    if end - start > LONGEST_N_JSON:
        return COUNTED
    return _whole(body[start:end].decode(errors="replace"))
