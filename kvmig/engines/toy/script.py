"""A toy's script: gates and faults, in a file that a test writes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from kvmig.core.errors import ConfigError


class ToyScript(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The whole script, as JSON. Without a file nothing of this happens."""

    load: bool = True
    """False: an engine that is made waits."""
    counts_by: int = 1
    """Stands for the weights on disk: a model that is loaded now counts in steps of it."""
    hold: int | None = None
    """Output tokens after which a request gets no more, except one wherever it comes to."""
    prefill: int | None = None
    """Tokens of a prompt after which it isn't computed further, with the same exception."""
    crash_at: int | None = None
    """Output tokens of a request at which the process is killed."""
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
        """Write the script, for engines that read it from now on."""
        assert self._path is not None
        whole = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        whole.write_bytes(msgspec.json.encode(script))
        whole.replace(self._path)

    def fault(self, outputs: list[int]) -> float:
        """Seconds that a step hangs, by the output tokens of its requests before it.

        Returns never where it kills the process.
        """
        script = self.read()
        if script.crash_at in outputs:
            os.kill(os.getpid(), signal.SIGKILL)
        if script.hang_at not in outputs:
            return 0.0
        self.write(msgspec.structs.replace(script, hang_at=None))
        return script.hang_s


def weights_at(source: Path) -> ScriptFile:
    """The script whose `counts_by` are the weights to load. Raises ConfigError."""
    if not source.is_file():
        raise ConfigError(f"source is {str(source)!r}, must be a file")
    script = ScriptFile(str(source))
    try:
        script.read()
    except msgspec.MsgspecError as error:
        raise ConfigError(f"source is {str(source)!r}, must be a script: {error}") from error
    return script
