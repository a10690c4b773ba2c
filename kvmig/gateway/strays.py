"""Copies of requests that nobody wants any more: whoever runs one is told to stop, once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvmig.controlplane.messages import Discard, Span
from kvmig.kvtransfer.messages import Message

REMEMBERED = 4096
"""Of those that were told."""


class Strays:
    """tell: (instance, message) -> whether it could be sent."""

    def __init__(self, tell: Callable[[str, Message], bool]) -> None:
        self._tell = tell
        self._told: OrderedDict[tuple[str, str, int], None] = OrderedDict()

    def stop(self, instance: str, span: Span, last: bool) -> None:
        """An output of a request that is over came from there; last: no more will come."""
        key = (instance, span.request_id, span.epoch)
        if last or key in self._told:
            return
        if self._tell(instance, Discard(span.request_id, span.epoch)):
            self._told[key] = None
            if len(self._told) > REMEMBERED:
                self._told.popitem(last=False)
