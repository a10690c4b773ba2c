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

from kvmig.accounts.keys import QUOTA_CODE
from kvmig.gateway.access import OPENAI
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
EDGE_BYTES = 50
"""Longer than an event's number with its name."""
_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')


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


def api_of(path: str) -> Api:
    """How the path's clients are spoken to."""
    if path.startswith("/v1/messages"):
        return "messages"
    return "responses" if path.startswith("/v1/responses") else "openai"


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

_TYPES: dict[int, str] = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


def error_body(api: Api, status: int, message: str, code: str) -> bytes:
    """An error as the API's clients read it: in OpenAI's form, or in Anthropic's."""
    if api == "messages":
        error: dict[str, object] = {"type": _type_of(status), "message": message}
        return msgspec.json.encode({"type": "error", "error": error})
    return msgspec.json.encode({"error": _error(status, message, code)})


def _type_of(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def _error(status: int, message: str, code: str) -> dict[str, object]:
    kind = QUOTA_CODE if code == QUOTA_CODE else _type_of(status)
    return {"message": message, "type": kind, "param": None, "code": code}


def error_event(api: Api, status: int, message: str, code: str, number: int = 0) -> bytes:
    """An error at the end of a stream. number: of the event, where the API's have some."""
    if api == "messages":
        return b"event: error\ndata: %s\n\n" % error_body(api, status, message, code)
    if api == "responses":
        error = _error(status, message, code)  # OpenAI documents it flat, and sends it nested
        event = {**error, "type": "error", "sequence_number": number, "error": error}
        return b"event: error\ndata: %s\n\n" % msgspec.json.encode(event)
    return b"data: %s\n\ndata: [DONE]\n\n" % error_body(api, status, message, code)


def heartbeat(api: Api, sentence: str) -> bytes:
    """A sign of life, which clients of the API drop.

    OpenAI sends `keepalive` events in the midst of responses; before `response.created` its own
    Python client takes no other event. A comment leaves the numbers of the events to the engine.
    """
    if api == "messages":
        return b'event: ping\ndata: {"type":"ping"}\n\n'
    return b": %s\n\n" % " ".join(sentence.split()).encode()


class EventNumbers:
    """Of the events of a response that goes by, however they come apart."""

    def __init__(self) -> None:
        self.next = 0
        self._edge = b""

    def feed(self, data: bytes) -> None:
        """What has come."""
        text = self._edge + data
        if numbers := _NUMBER.findall(text):
            self.next = int(numbers[-1]) + 1
        self._edge = text[-EDGE_BYTES:]
