"""Bodies with many items are checked off the event loop.

Each item of a response's `input` may be of fifty kinds: a thousand of them take 46 ms of computing.
vLLM's check of an item calls Python, so other threads go on between two items.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi.dependencies import utils

MANY = 64
"""Items that are checked on the event loop: some 3 ms."""
THREADS = 2
T = TypeVar("T")
Check = Callable[..., Coroutine[Any, Any, T]]


def check_beside_loop() -> None:
    """Check bodies off the loop in all applications of this process. May be called again."""
    if not hasattr(utils.request_body_to_args, "__wrapped__"):
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="bodies")
        utils.request_body_to_args = beside_loop(utils.request_body_to_args, pool)


def beside_loop(check: Check[T], pool: ThreadPoolExecutor) -> Check[T]:
    """FastAPI's check, which has nothing to wait for where the body is JSON."""

    @functools.wraps(check)
    async def checked(body_fields: Any, received_body: Any, embed_body_fields: bool) -> T:
        checking = check(body_fields, received_body, embed_body_fields)
        items = received_body.get("input") if isinstance(received_body, dict) else None
        if not isinstance(items, list) or len(items) <= MANY:
            return await checking
        return await asyncio.get_running_loop().run_in_executor(pool, finish, checking)

    return checked


def finish(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine that has nothing to wait for returns."""
    try:
        work.send(None)
    except StopIteration as ended:
        done: T = ended.value
        return done
    work.close()
    raise RuntimeError("it waits for something")
