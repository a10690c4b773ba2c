"""How many sequences a call asks for: its answers to each prompt, times its prompts. Pure.

Counted on the raw body, before anything else of it is decoded: limits of keys and of queues hold
for sequences, and a call may have only a number of them. Where the engine would refuse a body, any
number will do. A recording of any length counts as one.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import msgspec
from msgspec import Raw

from kvmig.asgi.route_table import ClientRoute
from kvmig.asgi.session_id import LONGEST_SESSION

COUNTED = 100_000
"""Items that are counted one by one; of a list that may have more, the most that it may have."""
LONGEST_N_JSON = 4096
"""Bytes of a number that is read; a longer one counts as more than any call may have."""
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
        found = msgspec.json.decode(value)
        if isinstance(found, str):
            found = float(found)
        return max(1, int(found)) if isinstance(found, int | float) else 1
    except (*UNREADABLE, ValueError, OverflowError):
        return 1


_FORM_N = re.compile(rb'name="?n"?[ \t]*(?:;[^\r\n]*)?\r\n(?:[^\r\n]+\r\n)*\r\n[ \t]*(\d{1,20})')


def _form_n(body: bytes) -> int:
    return max((int(one[1]) for one in _FORM_N.finditer(body)), default=1) or 1
