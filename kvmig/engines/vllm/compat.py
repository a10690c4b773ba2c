"""Differences of vLLM's supported versions: the only place that branches, by what is there."""

from __future__ import annotations

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc

try:
    from vllm.entrypoints.common import cli_args
except ImportError:  # before 0.33
    from vllm.entrypoints.launchers import cli_args

__all__ = ("cli_args", "refuse")


def refuse(core: EngineCoreProc, request: EngineCoreRequest, error: Exception) -> None:
    """vLLM's own answer to a request that can't be built: logged, and ended as an error.

    From 0.33 on the client learns why where the request is to blame.
    """
    invalid = getattr(core, "_handle_request_validation_error", None)
    if invalid is not None and isinstance(error, VLLMValidationError):
        invalid(request, error)
    else:
        core._handle_request_preproc_error(request)
