"""What a call asks for, by its path and body; its answer when it can't be served. Pure.

The rest of a body is the engine's to understand. The fields that are read here have one meaning for
the check of the key and for the engine: of a field that is there twice the last one counts, as for
every JSON decoder, and a rewritten body has it once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from msgspec import Raw

from kvmig.asgi import error_forms
from kvmig.asgi.error_forms import ApiError
from kvmig.asgi.problems import shorten_value
from kvmig.asgi.route_table import CLIENT_ROUTES, Api, ClientRoute, find_route
from kvmig.proxy.forms import MultipartForm, form_of
from kvmig.proxy.refusals import ProxyRefusal, bad

NAMING = "/models/"
"""Begins a path that names its model."""
LISTING = re.compile(r"(?:/models/(?P<model>.+?))?/v1/models(?:/(?P<listed>.*))?", re.DOTALL)
"""A path of the list of models. Its first match is the whole path, whose characters may be any."""
METHODS = tuple(dict.fromkeys(one.method for one in CLIENT_ROUTES))
LONGEST = max(one.path.count("/") for one in CLIENT_ROUTES)
"""Segments of a route's path, at most."""
SAFE = "/:@!$&'()*+,;=~-._"


# -- paths


class CallTarget(NamedTuple):
    """What a call is for, as its method and path say."""

    route: ClientRoute | None
    """The route; None: the list of models, which the proxy answers."""
    path: str
    """Path for the deployment."""
    model: str | None = None
    """Model that the path names, if any."""
    answer_id: str = ""
    """Id of an earlier call's answer, where the path has it."""
    listed: str = ""
    """The model of the list that is asked for; empty: all."""


def asked(method: str, path: str) -> CallTarget:
    """path: decoded. Raises ProxyRefusal for a call that is none of the table's: 404, or 405."""
    found = _route(method, path)
    if found is None and method in ("GET", "HEAD"):
        listing = LISTING.fullmatch(path)
        if listing is not None:
            return CallTarget(None, "/v1/models", listing["model"], listed=listing["listed"] or "")
    if found is not None:
        return found
    others = [one for one in METHODS if _route(one, path) is not None]
    if LISTING.fullmatch(path) is not None:
        others = ["GET"]
    if not others:
        raise ProxyRefusal(HTTPStatus.NOT_FOUND, f"no path {shorten_value(path)}", "not_found")
    allowed = ", ".join(others)
    sentence = f"{shorten_value(path)} takes {allowed}, not {method[:20]}"
    headers = ((b"allow", allowed.encode()),)
    status = HTTPStatus.METHOD_NOT_ALLOWED
    raise ProxyRefusal(status, sentence, "method_not_allowed", headers=headers)


def unnamed(path: str) -> str:
    """A path without the model that it names, as far as that is known without a method."""
    found = next((where for one in METHODS if (where := _route(one, path)) is not None), None)
    return path if found is None else found.path


def _route(method: str, path: str) -> CallTarget | None:
    if (match := find_route(method, path)) is not None:
        return CallTarget(match.route, path, None, match.answer_id)
    if not path.startswith(NAMING):
        return None
    segments = path.removeprefix(NAMING).split("/")
    for cut in range(max(1, len(segments) - LONGEST), len(segments)):
        inner = "/" + "/".join(segments[cut:])
        if (match := find_route(method, inner)) is not None:
            return CallTarget(match.route, inner, "/".join(segments[:cut]), match.answer_id)
    return None


def target(path: str, query: bytes) -> bytes:
    """The request line's target: exactly what was checked, with any spelling of the client's."""
    plain = quote(path, safe=SAFE).encode()
    return b"%s?%s" % (plain, query) if query else plain


# -- bodies


class CallBody(NamedTuple):
    """A call's body, and what it says."""

    content: bytes
    model: str | None = None
    stream: bool = False
    priority: Any = None
    """Number or name of the priority class; None: the body names none."""
    form: MultipartForm | None = None
    previous: str | None = None
    """Id of the response that it goes on from."""
    background: bool = False
    """Whether the engine goes on once it has answered."""

    def naming(self, served: str, **more: str) -> bytes:
        """The body with this model, and with these fields added; nothing else in it changes."""
        if self.form is not None:
            return self.form.encode(served)
        if not self.content or (self.model == served and not more):
            return self.content
        fields = msgspec.json.decode(self.content, type=dict[str, Raw])
        return msgspec.json.encode({**fields, "model": served, **more})


class _Fields(msgspec.Struct):
    model: Raw = Raw(b"null")
    stream: Raw = Raw(b"null")
    priority: Raw = Raw(b"null")
    previous_response_id: Raw = Raw(b"null")
    background: Raw = Raw(b"null")


def check_encoding(headers: Mapping[str, str]) -> None:
    """Raises ProxyRefusal, 415, for an encoded body. headers: names in lower case."""
    if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        encoding = shorten_value(headers["content-encoding"])
        sentence = f"content-encoding is {encoding}, bodies must be sent as they are"
        raise ProxyRefusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, sentence, "unsupported_encoding")


def body_of(content: bytes, headers: Mapping[str, str], *, is_form: bool = False) -> CallBody:
    """Raises ProxyRefusal, 400. headers: names in lower case. is_form: of the route."""
    if not content:
        return CallBody(content)
    kind = headers.get("content-type", "")
    if is_form:
        return _form_body(content, kind)
    try:
        fields = msgspec.json.decode(content, type=_Fields)
        model, stream, priority, previous, background = map(
            msgspec.json.decode,
            (
                fields.model,
                fields.stream,
                fields.priority,
                fields.previous_response_id,
                fields.background,
            ),
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the body is no JSON object: {str(error)[:200]}") from error
    if model is not None and not isinstance(model, str):
        raise bad(f"model is {shorten_value(model)}, must be a model's name")
    known = previous if isinstance(previous, str) else None
    return CallBody(
        content, model, stream is True, priority, previous=known, background=bool(background)
    )


def _form_body(content: bytes, kind: str) -> CallBody:
    form = form_of(content, kind)
    stream = form.text("stream") or ""
    return CallBody(content, form.text("model"), stream.lower() in ("true", "1"), form=form)


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
