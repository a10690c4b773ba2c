"""Errors in a round of the fleet's server: the part is given up, the rest goes on.

What is ordered, stored and routed stays as it was; the next round tries the part again.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator

from kvmig.core.clock import TimeSource
from kvmig.fleet.managed_model import ManagedModel

ALL = "all models"
REPEAT_S = 60.0
"""A fault that comes at each round is logged and noted once within it."""

log = logging.getLogger(__name__)


class RoundFaults:
    """The faults of one server."""

    def __init__(self, clock: TimeSource, note: Callable[[ManagedModel, str], None]) -> None:
        """clock: steady, in seconds. note: keeps what befalls a model, for people."""
        self.count: Counter[str] = Counter()
        """Parts that were given up, by what they do."""
        self._clock = clock
        self._note = note
        self._said: dict[tuple[str, str], float] = {}

    @contextlib.contextmanager
    def guard(
        self, part: str, model: ManagedModel | None = None, name: str = ALL
    ) -> Iterator[None]:
        """Run one part of a round. A failure is counted and logged, and not raised.

        part: what it does. model: the one that it is done for; None: another thing, or all. name:
        of that thing.
        """
        try:
            yield
        except Exception as error:
            if self.take_fault(part, error, model, name):
                whose = name if model is None else model.key
                log.exception("%s of %s failed in a round, and is tried again", part, whose)

    def take_fault(
        self, part: str, error: Exception, model: ManagedModel | None = None, name: str = ALL
    ) -> bool:
        """Count a failure of a part that is tried again, see `guard`; whether it is to be logged
        now."""
        self.count[part] += 1
        is_new = self._is_new(part, name if model is None else model.key)
        if is_new and model is not None:
            self._note(model, f"{part} failed in the server: {error!r}; it tries again")
        return is_new

    def _is_new(self, part: str, name: str) -> bool:
        now = self._clock()
        if now < self._said.get((part, name), now):
            return False
        self._said = {key: until for key, until in self._said.items() if now < until}
        self._said[part, name] = now + REPEAT_S
        return True
