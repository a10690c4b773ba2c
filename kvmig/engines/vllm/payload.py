"""What the adapter puts into an Export and a Tail: its own encoding of a request."""

from __future__ import annotations

import msgspec
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder


class Progress(msgspec.Struct, frozen=True):
    """How far a request is; with the submitted request, all that its next step depends on."""

    output_token_ids: list[int]
    """All output tokens in an Export; in a Tail those after the exported ones."""
    num_computed_tokens: int
    """Tokens whose KV is in the blocks. 0: not started, or preempted."""
    prefilled: bool
    """Whether the first output token was sent (prefill statistics with it)."""
    cached_tokens: int = 0
    """Prompt tokens that the first prefix cache held, for the usage statistics."""
    generator: bytes | None = None
    """State of the seeded torch.Generator (model runner V1; V2 seeds are stateless)."""
    adapter: str = ""
    """Identity of its LoRA adapter; empty without one."""
    draft_token_ids: list[int] = []
    """What the speculative method proposes for the next step."""
    events: list[tuple[int, float]] = []
    """What its first output will tell of its queue (`EngineCoreEventType`, seconds ago); empty
    once that was sent. Ages, since each machine has a clock of its own."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Progress).decode


def encode_request(request: EngineCoreRequest) -> list[bytes]:
    """The request as vLLM puts it on its own sockets."""
    return [bytes(frame) for frame in MsgpackEncoder().encode(request)]


def decode_request(frames: list[bytes]) -> EngineCoreRequest:
    """Inverse of `encode_request`; a new object each time."""
    request = MsgpackDecoder(EngineCoreRequest).decode(frames)
    assert isinstance(request, EngineCoreRequest)
    return request


def encode_progress(progress: Progress) -> bytes:
    """msgpack."""
    return _encode(progress)


def decode_progress(data: bytes) -> Progress:
    """Inverse of `encode_progress`; raises msgspec.DecodeError."""
    return _decode(data)
