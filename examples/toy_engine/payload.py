"""What the toy's clients and other toys exchange with it."""

from __future__ import annotations

import msgspec


class Asked(msgspec.Struct, frozen=True):
    """A request as a client puts it."""

    prompt: list[int]
    max_tokens: int
    seed: int | None = None


class Given(msgspec.Struct, frozen=True):
    """What one step gave one request."""

    request_id: str
    token_ids: list[int]
    finish_reason: str = ""


class Moving(msgspec.Struct, frozen=True):
    """A request on its way: all that its next step depends on, but for the KV."""

    tokens: list[int]
    num_prompt: int
    max_tokens: int
    seed: int | None
    computed: int
