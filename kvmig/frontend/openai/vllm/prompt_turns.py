"""A call's prompts get their parameters in several turns of the event loop, where they are many.

vLLM makes the parameters of all prompts of a call, 256 at most, in one go. For each it asks for the
headers of a trace, which takes no time, and can wait for its turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

from vllm.entrypoints.generate.base.serving import GenerateBaseServing

Asking = Callable[..., Coroutine[Any, Any, Any]]


def take_turns() -> None:
    """Let prompts wait for their turns from now on. May be called again."""
    if not hasattr(GenerateBaseServing._get_trace_headers, "__wrapped__"):
        GenerateBaseServing._get_trace_headers = _in_turns(GenerateBaseServing._get_trace_headers)


def _in_turns(ask: Asking) -> Any:
    @functools.wraps(ask)
    async def asked(self: Any, *args: Any, **options: Any) -> Any:
        await self.engine_client.slices.wait()
        return await ask(self, *args, **options)

    return asked
