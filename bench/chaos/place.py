"""Where the cluster runs: a folder for orders, a clock, and, for root, a /dev/shm and a disk for
its log that are its own and small, so that they can be full without anybody else noticing."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import struct
import subprocess
import tempfile
from io import FileIO
from pathlib import Path

from bench.chaos.hooks import ARMED, FIRED, FOLDER, NOW

CLOCK = "KVMIG_CHAOS_CLOCK"
SHM_BYTES = 256 << 20
LOG_BYTES = 16 << 20
FILLER = "filler"
TIMEOUT_S = 20.0
HOLD = f"""mount -t tmpfs -o size={SHM_BYTES} tmpfs /dev/shm &&
mount -t tmpfs -o size={LOG_BYTES} tmpfs "$0" && echo ready && read _"""
SHIM = Path(__file__).with_name("wall_clock.c")


def _to_the_end(file: FileIO, size: int) -> None:
    """Write pieces of that size until there is no room for another."""
    try:
        while file.write(b"\n" * size) == size:
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


class Place:
    """Use it as a context; everything is gone at its end.

    private: whether /dev/shm and the log's disk are its own. shm: the cluster's /dev/shm,
    as seen from here. faked: whether the clock can be set.
    """

    def __init__(self, private: bool | None = None) -> None:
        """private: None: if this user may. Raises OSError or CalledProcessError."""
        self.private = os.geteuid() == 0 if private is None else private
        self.folder = Path(tempfile.mkdtemp(prefix="kvmig-chaos-"))
        self.shm = Path("/dev/shm")
        self.enter: list[str] = []
        self._holder: subprocess.Popen[str] | None = None
        self._logs = self.folder / "logs"
        for name in (ARMED, FIRED, NOW, "logs"):
            (self.folder / name).mkdir()
        try:
            self._clock = self.folder / "clock"
            self.jump(0.0)
            self.faked = self._build_shim()
            if self.private:
                self._hold()
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """For the server."""
        one = {FOLDER: str(self.folder), "OMP_NUM_THREADS": "1"}
        if self.faked:
            one |= {CLOCK: str(self._clock), "LD_PRELOAD": str(self._shim)}
        return one

    @property
    def log(self) -> Path:
        """What the server prints."""
        return self._logs / "server.log"

    def jump(self, seconds: float) -> None:
        """Let every process's wall clock be wrong by so much."""
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:
            file.write(struct.pack("d", seconds))

    def fill(self, what: str, full: bool) -> None:
        """Leave no byte in /dev/shm (`shm`) or on the log's disk (`log`); or free it again."""
        filler = (self.shm if what == "shm" else self._logs) / FILLER
        if not full:
            filler.unlink(missing_ok=True)
            return
        with filler.open("wb", buffering=0) as file:
            _to_the_end(file, 1 << 20)
            _to_the_end(file, 4096)
        if what == "log":  # there is room still in its last page
            with self.log.open("ab", buffering=0) as file:
                _to_the_end(file, 1)

    def left_in_shm(self) -> list[str]:
        """kvmig's and vLLM's files there; other users' too, where it isn't private."""
        return sorted(path.name for path in self.shm.iterdir() if path.name != FILLER)

    def processes(self) -> list[int]:
        """All that were started here and still run, by their environment."""
        mark = f"{FOLDER}={self.folder}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has ended, or is another user's
        return found

    def close(self) -> None:
        """Undo everything."""
        if self._holder is not None:
            self._holder.communicate(timeout=TIMEOUT_S)
        shutil.rmtree(self.folder)

    def _hold(self) -> None:
        command = ["unshare", "--mount", "sh", "-c", HOLD, str(self._logs)]
        self._holder = holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C isn't for it
        )
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            raise subprocess.CalledProcessError(holder.wait(TIMEOUT_S), command)
        # Back to where we are: entering alone would leave the server in /, where bench isn't.
        self.enter = ["nsenter", f"--target={holder.pid}", "--mount", f"--wd={Path.cwd()}"]
        root = Path(f"/proc/{holder.pid}/root")
        self.shm = root / "dev/shm"
        self._logs = root / self._logs.relative_to("/")

    def _build_shim(self) -> bool:
        """Whether there is a compiler for it."""
        compiler = shutil.which("cc")
        if compiler is None:
            return False
        self._shim = self.folder / "wall_clock.so"
        shim, source = str(self._shim), str(SHIM)
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", shim, source, "-ldl"]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        return True

    def __enter__(self) -> Place:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as Ctrl-C does
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for pid in self.processes():  # none, unless something went wrong before
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            self.close()
