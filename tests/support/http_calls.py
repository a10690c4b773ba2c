"""The call of which requests of the front end are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvmig.asgi.call import HttpCall, current_call


@contextmanager
def in_call(call: HttpCall) -> Iterator[HttpCall]:
    """Inside the block requests are those of this call."""
    token = current_call.set(call)
    try:
        yield call
    finally:
        current_call.reset(token)
