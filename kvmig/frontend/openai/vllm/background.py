"""Responses that vLLM makes in the background: each ends with a word for who asks for it.

vLLM keeps a task for each. One that fails, or is cancelled before it begins, leaves its response
as it was, `queued`, and a reader of its events waits without end. Here its end is seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

from kvmig.asgi.call import current_call
from kvmig.frontend.isolation import OwnEntries

logger = logging.getLogger(__name__)

LAST = ("response.completed", "response.failed")
"""Types of a response's last event."""


class ResponseFailed(BaseModel):
    """The last event of a response that was cancelled or has failed."""

    type: Literal["response.failed"] = "response.failed"
    sequence_number: int
    response: ResponsesResponse


class ResponseWork:
    """A response that is being made. It is cancelled as by its client."""

    def __init__(self, task: asyncio.Task[Any], response: ResponsesResponse | None) -> None:
        self._task = task
        self._response = response

    def done(self) -> bool:
        """Whether the work has ended."""
        return self._task.done()

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback` once the work has ended."""
        self._task.add_done_callback(callback)

    def cancel(self) -> bool:
        """End the work, unless it has ended."""
        if self._response is not None and not self._task.done():
            self._response.status = "cancelled"  # or vLLM says that it has failed
        return self._task.cancel()


class ResponseTasks(OwnEntries["asyncio.Task[Any]"]):
    """vLLM's tasks by the ids of their responses, in place of its own dictionary."""

    def __init__(self, responses: OpenAIServingResponses) -> None:
        super().__init__()
        self._responses = responses

    def __setitem__(self, response_id: str, task: asyncio.Task[Any]) -> None:
        super().__setitem__(response_id, task)
        if (call := current_call.get()) is not None:
            call.background = ResponseWork(task, self._responses.response_store.get(response_id))
        task.add_done_callback(partial(self._ended, response_id))

    def _ended(self, response_id: str, task: asyncio.Task[Any]) -> None:
        """Take a response's end, in the context of the call that began it."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.warning("response %s failed in the background: %s", response_id, error)
        response = self._responses.response_store.get(response_id)
        if response is None:
            return
        if response.status in ("queued", "in_progress"):
            response.status = "cancelled" if task.cancelled() else "failed"
        if (events := self._responses.event_store.get(response_id)) is not None:
            kept, news = events
            if not kept or kept[-1].type not in LAST:
                kept.append(ResponseFailed(sequence_number=len(kept), response=response))
            news.set()


def end_background_responses(responses: OpenAIServingResponses) -> None:
    """Give each background response an end, and the streams of its events, too."""
    responses.background_tasks = ResponseTasks(responses)
    follow = responses.responses_background_stream_generator

    async def follow_to_end(
        response_id: str, starting_after: int | None = None
    ) -> AsyncGenerator[Any, None]:
        async with aclosing(follow(response_id, starting_after)) as events:
            async for event in events:
                yield event
                if event.type in LAST:
                    return

    responses.responses_background_stream_generator = follow_to_end
