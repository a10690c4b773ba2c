"""A request for an engine as bytes. What has no bytes is its client's mistake, and is named."""

from __future__ import annotations

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from kvmig.engines.base import Frames


def check_bytes(encoder: MsgpackEncoder, params: object) -> None:
    """Raises VLLMValidationError for what a client has set that can't become bytes."""
    for name in getattr(params, "__struct_fields__", ()):
        _encode(encoder, name.lstrip("_"), getattr(params, name))


def encode_request(encoder: MsgpackEncoder, request: EngineCoreRequest) -> Frames:
    """Raises VLLMValidationError: of an integer beyond 64 bits, or half of a surrogate pair."""
    for name in ("session_id", "cache_salt"):
        _encode(encoder, name, getattr(request, name, None))
    return _encode(encoder, "request_id", request)


def _encode(encoder: MsgpackEncoder, name: str, value: object) -> Frames:
    try:
        frames: Frames = encoder.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise VLLMValidationError(
            f"{name} can't be sent to the model: {_reason(error)}", parameter=name
        ) from error
    return frames


def _reason(error: Exception) -> str:
    if isinstance(error, OverflowError):
        return "an integer must fit into 64 bits"
    if isinstance(error, UnicodeEncodeError):
        return "a text must not have half a surrogate pair (\\ud800 to \\udfff) in it"
    return "it is nested too deeply"
