"""A toy's script: gates and faults, in a file that a test writes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec


class ToyScript(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """All of it, as JSON. Without a file nothing of this happens."""

    load: bool = True
    """False: an engine that is made waits."""
    counts_by: int = 1
    """The weights on disk: a model that is loaded now counts by so many."""
    hold: int | None = None
    """A request that has put out so many tokens gets no more, but for one wherever it comes to."""
    prefill: int | None = None
    """A prompt of which so many tokens are computed isn't computed further, but for the same."""
    crash_at: int | None = None
    """The process is killed when a request has put out so many tokens."""
    hang_at: int | None = None
    """The step after which a request would have one more takes `hang_s`; the first engine that
    comes to it takes this out of the file."""
    hang_s: float = 0.0

    @property
    def weights(self) -> str:
        """The identity of these weights."""
        return f"counts-by-{self.counts_by}"


class ScriptFile:
    """path: of the file; None: there is none."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._stamp: tuple[int, int] | None = None
        self._script = ToyScript()

    def read(self) -> ToyScript:
        """The script as it is now. Raises msgspec.MsgspecError."""
        if self._path is None:
            return self._script
        try:
            status = self._path.stat()
            stamp = (status.st_ino, status.st_mtime_ns)
            if stamp != self._stamp:
                self._script = msgspec.json.decode(self._path.read_bytes(), type=ToyScript)
                self._stamp = stamp
        except FileNotFoundError:
            self._script, self._stamp = ToyScript(), None
        return self._script

    def write(self, script: ToyScript) -> None:
        """Let it be so, for whoever reads it from now on."""
        assert self._path is not None
        whole = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        whole.write_bytes(msgspec.json.encode(script))
        whole.replace(self._path)

    def fault(self, outputs: list[int]) -> float:
        """Seconds that the step before which requests have put out so many tokens hangs.

        Returns never where it kills the process.
        """
        script = self.read()
        if script.crash_at in outputs:
            os.kill(os.getpid(), signal.SIGKILL)
        if script.hang_at not in outputs:
            return 0.0
        self.write(msgspec.structs.replace(script, hang_at=None))
        return script.hang_s
