"""Why the front end has failed a request, from there to vLLM's HTTP handlers.

vLLM passes an output's finish and stop reasons on, and answers any `error` with "Internal
server error"; so the sentence travels as the stop reason of an output that is in error.
"""

from __future__ import annotations

from vllm.exceptions import GenerationError, RetryableRequestError
from vllm.outputs import RequestError, RequestOutput

_KINDS = {"retry": RetryableRequestError, "final": GenerationError}
"""Answered with 503 and 500, in a stream as OpenAI's error object."""


def encode(reason: str, retry: bool) -> str:
    """The stop reason that says so."""
    return f"{'retry' if retry else 'final'}: {reason}"


def check(output: RequestOutput) -> None:
    """Raise vLLM's error with the sentence if one of the sequences has failed for one."""
    for one in output.outputs:
        if one.finish_reason == "error" and isinstance(one.stop_reason, str):
            kind, _, reason = one.stop_reason.partition(": ")
            raise _KINDS[kind](reason)


def of_pooling(stop_reason: int | str | None) -> RequestError:
    """The same for a request that has no sequences; without a sentence the engine refused it."""
    if not isinstance(stop_reason, str):
        return RequestError("failed", "Internal server error")
    kind, _, reason = stop_reason.partition(": ")
    return RequestError("failed", reason, retryable=kind == "retry")
