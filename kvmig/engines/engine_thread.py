"""The thread that an engine's own loop runs on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvmig.engines.base import OnExit


class EngineThread:
    """Runs the loop to its end. A daemon: a step that never returns keeps no process."""

    def __init__(self, fail_calls: Callable[[], None]) -> None:
        """fail_calls: called on the thread once `failed` is set: no call is answered any more."""
        self.failed: BaseException | None = None
        """Why the loop has ended; None before that."""
        self._fail_calls = fail_calls
        self._thread: threading.Thread | None = None

    def start(self, loop: Callable[[], None], on_exit: OnExit) -> None:
        """Run the loop; `on_exit` is called at its end, on the thread, with what it raised."""
        self._thread = threading.Thread(
            target=self._run, args=(loop, on_exit), name="kvmig-engine", daemon=True
        )
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came in time, or the loop never began."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, loop: Callable[[], None], on_exit: OnExit) -> None:
        error: Exception | None = None
        try:
            loop()
        except Exception as failure:  # noqa: BLE001 - handed to its owner
            error = failure
        self.failed = error or RuntimeError("the engine has stopped")
        self._fail_calls()
        on_exit(error)
