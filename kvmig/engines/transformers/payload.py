"""Messages that clients and other engines exchange with this one, in msgpack."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

T = TypeVar("T")


MOST_LOGPROBS = 20
"""Most of the likeliest tokens that a request may ask for, as vLLM has it."""


class SubmittedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request as a client puts it."""

    prompt_token_ids: list[int]
    max_tokens: int
    stop_token_ids: list[int] = []
    """The request ends with the first of these, which is put out."""
    temperature: float = 0.0
    """0: greedy."""
    seed: int | None = None
    """Seed of sampling; drawn at submission when there is none."""
    top_k: int = 0
    """How many of the likeliest tokens are sampled from; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that have this share of the probability together."""
    min_p: float = 0.0
    """Only tokens with this share of the likeliest one's probability."""
    logprobs: int | None = None
    """Likeliest tokens whose log-probabilities come with each output token's; None: none come."""
    priority: int = 0
    """The priority of a class; a transformers engine has one."""


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """Natural log-probability of one token; of the likeliest by their ids, the likeliest first."""

    value: float
    top_ids: list[int] = []
    top: list[float] = []


class StepOutput(msgspec.Struct):
    """The output of one step for one request; an `Item` of `kvmig.frontend.ports`."""

    request_id: str
    token_ids: list[int]
    finish_reason: Literal["", "stop", "length", "error"] = ""
    """Empty while it runs."""
    logprobs: list[TokenLogprob] = []
    error: str = ""

    @property
    def new_token_ids(self) -> list[int]:
        """Output tokens, in order."""
        return self.token_ids

    @property
    def finished(self) -> bool:
        """Whether these are its last."""
        return bool(self.finish_reason)


class RequestProgress(msgspec.Struct, frozen=True):
    """How far a request is; with `SubmittedRequest`, all that its next step depends on."""

    output_token_ids: list[int]
    """Output tokens: all in a `RequestExport`; in a `RequestTail` those after the exported ones."""
    num_computed_tokens: int
    """Tokens whose KV is in the blocks. 0: not started, or preempted."""


def encode(value: msgspec.Struct | list[StepOutput]) -> bytes:
    """msgpack."""
    return msgspec.msgpack.encode(value)


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Inverse of `encode`. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(data, type=kind)
