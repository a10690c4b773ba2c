"""What a call asks for, as its path and body say; what it is told when it can't be served. Pure.

The rest of a body is the engine's to understand. The fields that are read here have one meaning for
the check of the key and for the engine: of a field that is there twice the last one counts, as for
every JSON decoder, and a rewritten body has it once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from itertools import pairwise
from typing import NamedTuple
from urllib.parse import quote

import msgspec
from msgspec import Raw

from kvmig.gateway import error_forms
from kvmig.gateway.access import OPENAI
from kvmig.gateway.error_forms import ApiError
from kvmig.gateway.problems import shorten_value
from kvmig.gateway.route_table import WORK_PATHS, Api
from kvmig.proxy.hold import Refused

NAMED = re.compile(r"/models/(?P<model>.+?)(?P<rest>/v1/.*)")
"""A path that names its model."""
PREFIXES = tuple(f"{one}/" for one in OPENAI)
OTHERS = WORK_PATHS | {"/tokenize", "/detokenize"}
"""Paths of engines besides those under PREFIXES."""
WITHHELD = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Paths of engines that are not for clients."""
SAFE = "/:@!$&'()*+,;=~-._"


def bad(message: str, code: str = "invalid_request") -> Refused:
    """400."""
    return Refused(HTTPStatus.BAD_REQUEST, message, code)


# -- paths


class Asked(NamedTuple):
    """A path as the deployment shall see it, and the model that it names, if it does."""

    path: str
    model: str | None


def asked(path: str) -> Asked:
    """path: decoded. Raises Refused for one that is no engine's to answer."""
    named = NAMED.fullmatch(path)
    inner, model = (named["rest"], named["model"]) if named else (path, None)
    known = inner.startswith(PREFIXES) or inner in OTHERS
    odd = {"", ".", ".."}.intersection(inner.removesuffix("/").split("/")[1:])
    if not known or odd or inner.rstrip("/") in WITHHELD:
        raise Refused(HTTPStatus.NOT_FOUND, f"no path {shorten_value(path)}", "not_found")
    return Asked(inner, model)


def target(path: str, query: bytes) -> bytes:
    """The request line's: exactly what was checked, whatever the client's spelling was."""
    plain = quote(path, safe=SAFE).encode()
    return b"%s?%s" % (plain, query) if query else plain


# -- bodies


class Body(NamedTuple):
    """A call's body, and what it says."""

    content: bytes
    model: str | None = None
    stream: bool = False
    priority: int | None = None
    boundary: bytes | None = None
    """Of a form."""

    def naming(self, served: str) -> bytes:
        """With another model; nothing else in it changes."""
        if self.model is None or self.model == served:
            return self.content
        if self.boundary is not None:
            at = _form_fields(self.content, self.boundary)["model"]
            return b"".join((self.content[: at.start], served.encode(), self.content[at.stop :]))
        fields = msgspec.json.decode(self.content, type=dict[str, Raw])
        return msgspec.json.encode({**fields, "model": served})


class _Fields(msgspec.Struct):
    model: Raw = Raw(b"null")
    stream: Raw = Raw(b"null")
    priority: Raw = Raw(b"null")


def body_of(content: bytes, headers: Mapping[str, str]) -> Body:
    """Raises Refused, 400 or 415. headers: names in lower case."""
    if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        encoding = shorten_value(headers["content-encoding"])
        sentence = f"content-encoding is {encoding}, bodies must be sent as they are"
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, sentence, "unsupported_encoding")
    if not content:
        return Body(content)
    kind = headers.get("content-type", "")
    if kind.lower().startswith("multipart/form-data"):
        return _form(content, kind)
    try:
        fields = msgspec.json.decode(content, type=_Fields)
        model, stream, priority = map(
            msgspec.json.decode, (fields.model, fields.stream, fields.priority)
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the body is no JSON object: {str(error)[:200]}") from error
    if model is not None and not isinstance(model, str):
        raise bad(f"model is {shorten_value(model)}, must be a model's name")
    number = priority if type(priority) is int else None
    return Body(content, model, stream is True, number)


def _form(content: bytes, kind: str) -> Body:
    boundary = re.search(r'boundary="?([^";,]{1,70})"?', kind, re.IGNORECASE)
    if boundary is None:
        raise bad(f"content-type is {shorten_value(kind)}, must have a boundary")
    word = boundary[1].encode("latin-1")
    fields = _form_fields(content, word)
    if "model" not in fields:
        return Body(content, boundary=word)
    try:
        model = content[fields["model"]].decode()
    except UnicodeDecodeError as error:
        raise bad("model is no UTF-8") from error
    stream = content[fields["stream"]] if "stream" in fields else b""
    return Body(content, model, stream.lower() in (b"true", b"1"), boundary=word)


_NAME = re.compile(rb'^content-disposition:[^\r\n]*?;\s*name="?([^";\r\n]*)', re.I | re.M)


def _form_fields(content: bytes, boundary: bytes) -> dict[str, slice]:
    """Where the fields `model` and `stream` stand. Raises Refused for one that is there twice."""
    found: dict[str, slice] = {}
    marks = re.finditer(rb"(?:\A|\r\n)--" + re.escape(boundary), content)
    for mark, following in pairwise(marks):
        end = following.start()
        head = content.find(b"\r\n\r\n", mark.end(), end)
        if head < 0:
            continue
        name = _NAME.search(content, mark.end(), head)
        if b"*=" in content[mark.end() : head]:
            raise bad("the form has a name with `*=`, names must be plain")
        if name is None or (field := name[1].decode("latin-1")) not in ("model", "stream"):
            continue
        if field in found:
            raise bad(f"the form has {field} twice")
        found[field] = slice(head + 4, end)
    return found


# -- what a client is told


def error_body(api: Api, status: int, message: str, code: str) -> bytes:
    """An error as the API's clients read it: in OpenAI's form, or in Anthropic's."""
    return error_forms.error_body(api, ApiError(status, message, code=code))


def error_event(api: Api, status: int, message: str, code: str, number: int = 0) -> bytes:
    """An error at the end of a stream. number: of the event, where the API's have some."""
    error = ApiError(status, message, code=code)
    return error_forms.error_event(api, error, number) + error_forms.stream_end(api)


def heartbeat(api: Api, sentence: str) -> bytes:
    """A sign of life, which clients of the API drop.

    OpenAI sends `keepalive` events in the midst of responses; before `response.created` its own
    Python client takes no other event. A comment leaves the numbers of the events to the engine.
    """
    if api == "messages":
        return b'event: ping\ndata: {"type":"ping"}\n\n'
    return b": %s\n\n" % " ".join(sentence.split()).encode()
