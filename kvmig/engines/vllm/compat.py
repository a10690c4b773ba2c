"""Where vLLM's supported versions differ: the only place that branches, by what is there."""

from __future__ import annotations

try:
    from vllm.entrypoints.common import cli_args
except ImportError:  # before 0.33
    from vllm.entrypoints.launchers import cli_args

__all__ = ("cli_args",)
