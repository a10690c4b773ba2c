"""The thread that an engine's own loop runs on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class EngineThread:
    """Runs the loop to its end. A daemon: a step that never returns keeps no process."""

    def __init__(self, loop: Callable[[], None], ended: Callable[[Exception | None], None]) -> None:
        """ended: called at the loop's end, on the thread, with what the loop raised."""
        self._loop = loop
        self._ended = ended
        self._thread = threading.Thread(target=self._run, name="kvmig-engine", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._loop()
        except Exception as failure:  # noqa: BLE001 - handed to its owner
            error = failure
        self._ended(error)
