"""How large a call's body may be: as large as what the model can use of it. Pure.

All bounds are counted on the raw bytes, before anything is decoded: bytes and nesting while they
come, and what single fields hold once they are there. They bound the memory that a body takes, and
the time for which a front end's event loop works on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec import Raw

from kvmig.asgi.json_count import JsonCounter, count_values
from kvmig.asgi.route_table import CLIENT_ROUTES, ClientRoute

ROOM = 1_000_000
"""Bytes of a body for all but its prompt: tools, schemas, biases, further short prompts."""
TOKEN_BYTES = 32
"""Bytes of a body for one token of its prompt, on the average and at most, with any escapes."""
ESCAPED = 6
"""Bytes of a character of one byte in JSON, at most."""
MANY = 4_000_000
"""Bytes of many short prompts in one call."""
MANY_IDS = 262_144
"""Token ids of many short prompts in one call."""
PROMPTS = 2048
"""Prompts of one call."""
MEDIA = 20_000_000
"""Bytes of images, audio and video in one call."""
RECORDING = 26_000_000
"""Bytes of a recording, or of images to change, with its form: vLLM takes 25 MB."""
TURNS = 1024
"""Messages of a conversation, or items of a response's input."""
VALUES = 16_384
"""Values of a body that are no token ids of its prompts."""
ARGUMENTS = 1024
"""Values of what a call says to plug-ins of an engine."""
DEPTH = 64
"""Lists and objects in each other."""
FEW = 1024
"""A body with no more values holds nothing that is too much."""

_IDS = frozenset(("prompt", "prompt_token_ids", "token_ids", "tokens"))
_MANY_IDS = frozenset(("input", "items", "prompt"))
_ARGUMENTS = frozenset(("vllm_xargs", "kv_transfer_params", "ec_transfer_params"))
_MESSAGES = frozenset(("messages",))
_INPUT = frozenset(("input",))


class ModelReach(NamedTuple):
    """What a model can use of one prompt."""

    tokens: int
    """Tokens of a prompt and its answer."""
    longest: int = TOKEN_BYTES
    """Bytes of its tokenizer's longest token."""
    media: bool = False
    """Whether it takes images, audio or video."""


def widest(reaches: Iterable[ModelReach | None]) -> ModelReach | None:
    """What is of use to one of several models at least; None: it isn't known of all of them, or
    there are none."""
    found = list(reaches)
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    tokens, longest, media = zip(*known, strict=True)
    return ModelReach(max(tokens), max(longest), any(media))


class BodyBound(NamedTuple):
    """What a body may have. ids: token ids of all its prompts."""

    size: int
    ids: int
    values: int = VALUES
    depth: int = DEPTH
    id_fields: frozenset[str] = _IDS
    """Fields that may hold token ids, or lists of them."""
    turn_fields: frozenset[str] = _MESSAGES
    """Fields that hold a conversation, or several."""

    @property
    def all_values(self) -> int:
        """Values of a whole body. A list of ids may stand in a list of prompts."""
        return self.values + self.ids + PROMPTS


class TooMuch(ValueError):
    """The error names what is too much, and what is allowed."""


def bound_of(reach: ModelReach, route: ClientRoute | None) -> BodyBound:
    """The bound of a route's bodies. None: of calls that aren't in the table of routes."""
    if route is None or route.content == "none":
        return BodyBound(ROOM, FEW)
    content = route.content
    if content in ("audio", "image"):
        return BodyBound(RECORDING, FEW)
    # A prompt that is a little too long hears so from the engine, in the words that clients know.
    ids = reach.tokens + reach.tokens // 4 + FEW
    text = reach.tokens * min(TOKEN_BYTES, ESCAPED * reach.longest)
    if content in ("batch", "texts"):
        text = max(text, min(MANY, PROMPTS * text))
        ids = max(ids, min(MANY_IDS, PROMPTS * ids))
    media = MEDIA if reach.media and content != "counting" else 0
    return BodyBound(
        ROOM + text + media,
        ids,
        id_fields=_MANY_IDS if content == "texts" else _IDS,
        turn_fields=_INPUT if route.api == "responses" else _MESSAGES,
    )


def largest_size(reach: ModelReach) -> int:
    """Bytes of the largest body of any route that the model can use."""
    routes = [one for one in CLIENT_ROUTES if reach.media or one.content not in ("audio", "image")]
    return max(bound_of(reach, one).size for one in routes)


class BodyCheck:
    """Looks at one body as it comes: `feed` each part, then `check` the whole."""

    def __init__(self, bound: BodyBound, *, json: bool) -> None:
        """json: whether it is JSON; of anything else only the size is bounded."""
        self._bound = bound
        self._counter = JsonCounter() if json else None

    def feed(self, part: bytes) -> None:
        """Raises TooMuch."""
        if self._counter is None:
            return
        self._counter.feed(part)
        if self._counter.values > self._bound.all_values:
            raise _too_many("the body has", "values", self._bound.all_values)
        if self._counter.deepest > self._bound.depth:
            most = self._bound.depth
            raise TooMuch(f"the body is nested too deeply, allowed are {most} levels")

    def check(self, body: bytes) -> None:
        """Raises TooMuch. What is no JSON object is the engine's to refuse."""
        if self._counter is None or self._counter.values <= FEW:
            return
        try:
            fields = msgspec.json.decode(body, type=dict[str, Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        check_fields(self._bound, fields)


def check_fields(bound: BodyBound, fields: dict[str, Raw]) -> None:
    """Raises TooMuch for an object of which one field, or all together, hold too much."""
    ids, values = 0, len(fields)
    for name, value in fields.items():
        text = bytes(value).lstrip()
        count = count_values(text)
        if name in bound.turn_fields and count > TURNS and text.startswith(b"["):
            _check_turns(name, text)
        if name in _ARGUMENTS and count > ARGUMENTS:
            raise _too_many(f"{name} has", "values", ARGUMENTS)
        if name in bound.id_fields and b"{" not in text:
            ids += count
        else:
            values += count
    if ids > bound.ids + PROMPTS:
        raise _too_many("the prompts have", "token ids", bound.ids)
    if values > bound.values:
        raise _too_many("the body has", "values besides its prompts", bound.values)


def _check_turns(name: str, text: bytes) -> None:
    try:
        turns = len(msgspec.json.decode(text, type=list[Raw]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if turns > TURNS:
        raise _too_many(f"{name} has", "items", TURNS)


def _too_many(has: str, what: str, most: int) -> TooMuch:
    return TooMuch(f"{has} too many {what}, allowed are {most}")
