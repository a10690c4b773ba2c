"""A child process of the launcher: how it gets its orders, and when it ends.

The launcher writes one JSON line to its stdin and keeps the pipe open; its end, however
it ends, closes the pipe. The child announces itself with one JSON line on a file
descriptor of its own, so that nothing that a library prints can be taken for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec

from kvmig.core.errors import StartupError
from kvmig.process.hung_process import print_stacks_when_asked
from kvmig.process.shown_logs import log_to_stderr

Launch = TypeVar("Launch", bound=msgspec.Struct)


def lead_group() -> None:
    """Become a process group: Ctrl-C reaches only the launcher, and all of us can be ended at once.

    Not a session: Linux schedules sessions as groups (autogroup, see sched(7)), and on a few cores
    busy instances then kept each other, the front end and the scheduler off them for seconds.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


def read_launch(kind: type[Launch]) -> Launch:
    """The launch document, from stdin. Raises StartupError if there is none or a wrong one."""
    lead_group()
    try:
        return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
    except msgspec.DecodeError as error:
        raise StartupError(f"no {kind.__name__} on stdin: {error}") from error


def announce(descriptor: int, ready: msgspec.Struct) -> None:
    """Send the launcher the announcement. Raises StartupError if the launcher doesn't listen."""
    try:
        with os.fdopen(descriptor, "wb") as pipe:
            pipe.write(msgspec.json.encode(ready) + b"\n")
    except OSError as error:
        raise StartupError(f"can't announce on descriptor {descriptor}: {error}") from error


def call_at_stdin_end(act: Callable[[], None]) -> None:
    """Have `act` called once when stdin ends, by the running event loop; what comes is dropped."""
    loop = asyncio.get_running_loop()
    stdin = sys.stdin.fileno()

    def read() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            act()

    loop.add_reader(stdin, read)


async def until_stopped() -> None:
    """Wait for SIGTERM or for the end of the launcher.

    SIGINT is ignored: a terminal sends it to every process at once, and it is the
    launcher that decides what a Ctrl-C means.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    call_at_stdin_end(stop.set)
    try:
        await stop.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
        loop.remove_signal_handler(signal.SIGTERM)


class StopSignals:
    """The launcher's wishes: `stop` at SIGTERM, `at_once` at a second one or at its own end."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.at_once = asyncio.Event()

    def listen(self) -> None:
        """Listen to SIGTERM and stdin. SIGINT is for the launcher: a terminal sends it to all."""
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        loop.add_signal_handler(signal.SIGTERM, self._signalled)
        call_at_stdin_end(self._ended)

    def _signalled(self) -> None:
        (self.at_once if self.stop.is_set() else self.stop).set()

    def _ended(self) -> None:
        self.stop.set()
        self.at_once.set()


HEARTBEAT_S = 1.0


def say(text: str, who: str = "kvmig") -> None:
    """Print one line of progress for the caller; the line is lost where no process reads it.

    A full disk, or a reader that has gone, is no reason not to serve.
    """
    with contextlib.suppress(OSError):
        # In one write: several processes say their lines at the same place.
        print(f"{who}: {text}\n", end="", file=sys.stderr, flush=True)


def quiet(name: str) -> None:
    """Log kvmig's warnings, and of libraries only errors; to be called before vLLM is imported.

    name: of this process, in each line. vLLM has a logger of its own: VLLM_LOGGING_LEVEL.
    """
    log_to_stderr(f"%(asctime)s {name} %(levelname)s %(message)s", logging.ERROR)
    logging.getLogger("kvmig").setLevel(logging.WARNING)
    # torch's C++ side, which warns of every NUMA binding.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Libraries tell each other of coming changes; `python -W` and PYTHONWARNINGS still show them.
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)


def begin_loading() -> None:
    """Collect no garbage until `end_loading`.

    What an engine's libraries make while they are imported stays, and to walk it again and again
    is a fifth of the time that they take.
    """
    gc.disable()


def end_loading() -> None:
    """Collect garbage again, but never walk what is there by now: that would stop this process,
    or copy the pages that its forks share, for tens of ms each time.

    Of what imports leave behind 3 % is garbage, and stays.
    """
    gc.freeze()
    gc.enable()


def end_collecting() -> None:
    """Collect no garbage any more: this process ends.

    vLLM's engines call the collector twice when they close, so that another engine of the process
    finds the memory free. It walks all that was ever made, and copies the pages that forks share:
    a second and a half of a core, which the instances that go on have a use for.
    """
    gc.disable()
    vars(gc)["collect"] = lambda generation=2: 0


def leave(status: int) -> NoReturn:
    """End the process, once everything of ours is closed.

    The interpreter's own end would only tear down torch and Triton, which takes seconds and
    prints pages about objects that are not freed.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # see `say`
            stream.flush()
    os._exit(status)


class StartAnnouncement(msgspec.Struct, frozen=True):
    """A child's one answer: its endpoint, or the reason why it can't start."""

    endpoint: str = ""
    failed: str = ""
    refused: bool = False
    """Whether it failed by what it was given to use, so that another try is in vain."""
    kv_bytes: int = 0
    """Bytes that each worker of an instance's engine has found for its KV cache."""


async def send_heartbeats(descriptor: int) -> None:
    """Run in the child until it is cancelled; if it hangs, its parent asks where."""
    print_stacks_when_asked()
    while True:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # nobody listens any more
            os.write(descriptor, b".")
        await asyncio.sleep(HEARTBEAT_S)
