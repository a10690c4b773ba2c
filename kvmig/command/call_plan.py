"""What of a call changes before a server gets it, and what it may cost. Pure.

The server's own numbers count (`answer_count`). To have them of a stream, it is asked for them,
also where the client has not asked. Before there are any, a call is estimated by the bytes of its
body: every token of a prompt has a byte of it at least, and four on the average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Raw

from kvmig.asgi.route_table import ClientRoute
from kvmig.command.recordings import seconds_of
from kvmig.proxy.forms import form_of
from kvmig.proxy.refusals import ProxyRefusal

TOKEN_BYTES = 4
"""Bytes of text that count as a token where the server gives no number of tokens."""
MEDIA_TOKENS = 4096
"""Tokens that one of a call's images, videos and recordings takes at most, as it is assumed."""
OUTPUT_MOST = 16_384
"""Tokens of an answer under a quota, where its call has no limit of its own."""
TEMPLATE_TOKENS, TURN_TOKENS = 512, 32
"""Tokens that a chat template adds to a conversation, and to each of its messages, at most."""
_TURN = b'"role"'
_INLINE, _INLINE_LEAST = b'"data:', 64
"""How a medium begins that a body brings with it, and its least bytes."""
_TURNS = ("messages", "input")
_SCORED = ("query", "queries", "documents", "items", "data_1", "data_2", "text_1", "text_2")
_WITH_PARTS: Mapping[str, tuple[str, ...]] = {
    "/v2/embed": ("inputs",),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), _SCORED),
}
"""Fields whose objects may have media among the parts of their content, by path; elsewhere those of
conversations. What looks like a medium in any other place (a prompt, a tool's schema, a call's
arguments, a chat's documents) is text to a server."""
_WITH_MEDIA = {"/v2/embed": "images"}
"""The field that is a list of media, by path."""
SPEECH, IMAGES = "/v1/audio/speech", "/v1/images/generations"
_WITH_USAGE = ("/v1/completions", "/v1/chat/completions")
_CHAT = ("max_completion_tokens", "max_tokens")
_LIMITS: Mapping[str, tuple[str, ...]] = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": _CHAT,
    "/v1/chat/completions/batch": _CHAT,
    "/cohere/v2/chat": ("max_tokens",),
    "/invocations": _CHAT,
    "/inference/v1/generate": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
"""Fields that limit an answer, by path; the last one is set where there is none."""
_OTHER_LIMITS = ("n_predict", "max_new_tokens")
"""Fields that limit an answer for some servers, which prefer them."""
_WITHIN: Mapping[str, str] = {"/inference/v1/generate": "sampling_params"}
"""The object in which these fields are, by path; elsewhere they are the body's."""
LIMIT_MOST = 2**31
"""Tokens of an answer that a call may name; a larger number counts as this one."""
_LONGEST = 4096
"""Characters of a number that is read; a longer one counts as the largest."""
_USUAL_MOST = {"/v1/completions": 16, SPEECH: 0, IMAGES: MEDIA_TOKENS}
"""Tokens of an answer whose call has no limit: for completions as OpenAI's API has it."""

_Read = TypeVar("_Read")


class CallPlan(NamedTuple):
    """A call as a server gets it."""

    body: bytes
    streams: bool = False
    """Whether its client wants a stream."""
    hides_usage: bool = False
    """Whether the stream's usage was asked for here, and isn't for the client."""
    prompt: int = 0
    """Tokens of its prompts, estimated."""
    prompt_most: int = 0
    """Tokens that they are at most."""
    output_most: int = 0
    """Tokens of all its answers at most; 0: it gets none that count."""
    output_least: int = 0
    """Tokens of answers without which it is not worth a start: all, where nothing limits them."""
    limits: tuple[str, ...] = ()
    """Fields that limit its answers."""
    limits_in: str = ""
    """The field of the body that holds those; empty: the body itself."""
    characters: int = 0
    """Characters of text that it wants as speech."""
    seconds: int = 0
    """Seconds of its recording, estimated."""
    images: int = 0
    """Images that it wants."""


def plan_call(
    route: ClientRoute,
    body: bytes,
    kind: str = "",
    *,
    sequences: int,
    prompts: int,
    asks_usage: bool,
) -> CallPlan:
    """kind: the body's content type. sequences, prompts: as `call_work` counts them. asks_usage:
    whether the server takes `stream_options.include_usage`."""
    if route.model == "form":
        return _plan_form(route, body, kind, sequences)
    fields = fields_of(body)
    media = list(_media_in(route.path, fields)) if fields is not None and _INLINE in body else []
    text = len(body) - sum(media)
    added = MEDIA_TOKENS * len(media) + TEMPLATE_TOKENS * prompts + TURN_TOKENS * body.count(_TURN)
    plan = CallPlan(body, prompt=-(-text // TOKEN_BYTES), prompt_most=text + added)
    if fields is None:  # the server says what is wrong
        return plan
    limits = _LIMITS.get(route.path, ())
    within = _WITHIN.get(route.path, "")
    holder = _object(fields.get(within)) if within else fields
    each = min((n for one in limits if (n := _number(holder.get(one))) is not None), default=None)
    most = 0
    if route.charge == "tokens":
        usual = _USUAL_MOST.get(route.path, OUTPUT_MOST)
        most = (usual if each is None else each) * max(1, sequences)
    streams = _decoded(fields.get("stream")) is True
    changed = dict(fields)
    if route.path == "/v1/responses":
        changed.pop("request_id", None)  # the proxy's, for deployments that keep responses
    hides = False
    if streams and asks_usage and route.path in _WITH_USAGE:
        options = _decoded(fields.get("stream_options"))
        options = options if isinstance(options, dict) else {}
        if options.get("include_usage") is not True:
            hides = True
            changed["stream_options"] = _raw({**options, "include_usage": True})
    sent = body if changed == fields else msgspec.json.encode(changed)
    return plan._replace(
        body=sent,
        streams=streams,
        hides_usage=hides,
        output_most=most,
        output_least=most if _unlimited(route) else min(most, sequences),
        limits=limits,
        limits_in=within,
        characters=_characters(fields) if route.path == SPEECH else 0,
        images=sequences if route.path == IMAGES else 0,
    )


def limited(plan: CallPlan, tokens: int, sequences: int) -> CallPlan:
    """The same plan, whose answers together have at most this number of tokens."""
    fields = fields_of(plan.body)
    if fields is None or not plan.limits:
        return plan
    each = max(1, tokens // max(1, sequences))
    holder = _object(fields.get(plan.limits_in)) if plan.limits_in else fields
    named = [one for one in plan.limits if _is_given(holder.get(one))] or plan.limits[-1:]
    for one in (*named, *(other for other in _OTHER_LIMITS if _is_given(holder.get(other)))):
        given = _number(holder.get(one))
        holder[one] = _raw(each if given is None else min(given, each))
    if plan.limits_in:
        fields[plan.limits_in] = _raw(holder)
    return plan._replace(body=msgspec.json.encode(fields), output_most=each * max(1, sequences))


def fields_of(body: bytes) -> dict[str, Raw] | None:
    """A JSON object's fields; None: it is none."""
    try:
        return msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class _Turn(msgspec.Struct):
    content: Raw = Raw()


_Turns: Any = _Turn | str | list[_Turn | str | list[_Turn | str]]


class _ContentPart(msgspec.Struct):
    """Part of a message in OpenAI's APIs; its type names the field that it has."""

    type: str = ""
    image_url: Raw = Raw()
    video_url: Raw = Raw()
    audio_url: Raw = Raw()


class _MediaUrl(msgspec.Struct):
    url: Raw = Raw()


def _media_in(path: str, fields: Mapping[str, Raw]) -> Iterator[int]:
    """The bytes of each medium that a call brings with it."""
    for name in _WITH_PARTS.get(path, _TURNS):
        yield from _media_of(_read(fields.get(name, Raw()), _Turns))
    for url in _read(fields.get(_WITH_MEDIA.get(path, ""), Raw()), list[Raw]) or ():
        yield from _inline(url)


def _media_of(turns: Any) -> Iterator[int]:
    """turns: one, or a list of turns, or of the conversations of a batch."""
    if isinstance(turns, list):
        for one in turns:
            yield from _media_of(one)
    elif isinstance(turns, _Turn):
        for part in _read(turns.content, list[_ContentPart | str]) or ():
            if isinstance(part, _ContentPart):
                yield from _inline(_url_of(part))


def _url_of(part: _ContentPart) -> Raw:
    field = "image_url" if part.type == "input_image" else part.type
    url = getattr(part, field) if field in ("image_url", "video_url", "audio_url") else Raw()
    within = _read(url, _MediaUrl)
    return url if within is None else within.url


def _inline(url: Raw) -> Iterator[int]:
    raw = bytes(url)
    if raw.startswith(_INLINE) and len(raw) >= _INLINE_LEAST:
        yield len(raw)


def _read(raw: Raw, kind: type[_Read]) -> _Read | None:
    """Decode a value, or return None if it is of another kind."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _plan_form(route: ClientRoute, body: bytes, kind: str, sequences: int) -> CallPlan:
    """A call with a recording or with images, which go on as they are."""
    most = MEDIA_TOKENS * sequences
    plan = CallPlan(body, prompt_most=1, output_most=most, output_least=min(most, sequences))
    if route.content == "image":
        return plan._replace(images=sequences)
    try:
        files = form_of(body, kind).files()
    except ProxyRefusal:  # the server says what is wrong
        return plan
    return plan._replace(seconds=sum(map(seconds_of, files)))


def _characters(fields: Mapping[str, Raw]) -> int:
    found = _decoded(fields.get("input"))
    return len(found) if isinstance(found, str) else 0


def _decoded(value: Raw | None) -> Any:
    if value is None:
        return None
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _object(value: Raw | None) -> dict[str, Raw]:
    return (None if value is None else fields_of(bytes(value))) or {}


def _is_given(value: Raw | None) -> bool:
    return value is not None and bytes(value).strip() != b"null"


def _unlimited(route: ClientRoute) -> bool:
    """Whether its answers are text that no field limits."""
    return route.path not in (*_LIMITS, SPEECH, IMAGES)


def _number(value: Raw | None) -> int | None:
    """A count as servers take it: also as text, or with a point. None: it is none."""
    found = _decoded(value)
    if isinstance(found, str):
        try:
            found = float(found) if len(found) <= _LONGEST else LIMIT_MOST
        except ValueError:
            return None
    if not isinstance(found, int | float) or not 0 <= found < math.inf:
        return None
    return min(LIMIT_MOST, int(found))


def _raw(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))
