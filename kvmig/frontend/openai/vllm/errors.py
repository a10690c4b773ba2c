"""Why a stream of vLLM's application failed, for the stage that writes what its client reads.

vLLM makes Messages and Cohere's chats out of a chat's stream. There a failure is one more chunk,
which its converters take for a chunk of a chat. Of a failed response it makes an event that its own
types refuse.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.generate.base.serving import GenerateBaseServing

from kvmig.asgi.call import current_call
from kvmig.asgi.error_forms import read_error

_as_vllm_has_it = GenerateBaseServing.create_streaming_error_response


def _note_failure(self: GenerateBaseServing, *args: Any, **options: Any) -> str:
    said: str = _as_vllm_has_it(self, *args, **options)
    if (call := current_call.get()) is not None:
        call.failure = read_error(0, said.encode())
    return said


def note_failures() -> None:
    """Record in a call why its stream failed."""
    GenerateBaseServing.create_streaming_error_response = _note_failure
