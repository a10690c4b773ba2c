"""`python -m kvmig.sources.fetcher`: fetches one source's files, for a fleet's server.

Its launch is the first line of its stdin, its reports are lines on its stdout. It may die at any
moment: the next one goes on. It ends with its stdin.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import httpx2
import msgspec

from kvmig.core.clock import monotonic
from kvmig.core.errors import ConfigError, StartupError
from kvmig.core.shown_urls import shown_url
from kvmig.process.child import leave, quiet, read_launch, say
from kvmig.sources.fetch import SourceFetch
from kvmig.sources.file_list import SourceFailure
from kvmig.sources.files_folder import FilesFolder
from kvmig.sources.heads import HeadsFetch
from kvmig.sources.messages import (
    FetchFailed,
    FetchHeads,
    FetchLaunch,
    FetchListed,
    FetchProgress,
    FetchReport,
    FetchWhole,
)
from kvmig.sources.origins import FilesOrigin, origin_of
from kvmig.sources.source import parse_source
from kvmig.sources.speed_floor import LISTING_S, SpeedFloor

log = logging.getLogger(__name__)

LastReport = FetchWhole | FetchHeads | FetchFailed
PROGRESS_S = 0.5
MOST_WHY = 2000
"""Most characters of a reason."""
HIDDEN = "***"
SECRETS = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "MODELSCOPE_API_TOKEN",
)  # fmt: skip
"""Environment variables whose values no report has."""
MOST_MEMORY = 2 << 30
"""Bytes that this process may take, however long an answer is."""


class FetcherProcess:
    """The fetcher's process: its server's orders, and its reports."""

    def __init__(self, stdin: BinaryIO, reports: BinaryIO) -> None:
        self._stdin = stdin
        self._reports = reports
        self._writing = threading.Lock()
        self._room = threading.Event()

    def run(self, launch: FetchLaunch) -> LastReport:
        """Return the last report, which is not sent yet."""
        threading.Thread(target=self._follow_stdin, daemon=True, name="stdin").start()
        try:
            source = parse_source(launch.source)
            origin = origin_of(source, launch.endpoint)
        except ConfigError as error:
            return FetchFailed(str(error), lasting=True)
        folder = FilesFolder(Path(launch.root))
        fetch = SourceFetch(source, origin, folder)
        threading.Thread(
            target=self._beat, args=(str(source), fetch), daemon=True, name="progress"
        ).start()
        if launch.heads:
            last = reported(launch.source, HeadsFetch(source, origin, folder).run)
        else:
            last = reported(launch.source, lambda: fetch.run(self._wait_for_room))
        if isinstance(last, FetchFailed):
            why = plain(hide(shown_url(last.why), secrets_of(origin)))
            return msgspec.structs.replace(last, why=why)
        return last

    def report(self, report: FetchReport) -> None:
        """Send a report; if the server has gone, this process ends."""
        with self._writing:
            try:
                self._reports.write(msgspec.json.encode(report) + b"\n")
                self._reports.flush()
            except OSError:
                os._exit(1)

    def _follow_stdin(self) -> None:
        while self._stdin.readline():
            self._room.set()
        os._exit(1)  # the server has gone, or wants no more of it

    def _wait_for_room(self, listed: FetchListed) -> None:
        self.report(listed)
        self._room.wait()  # or this process ends with its stdin

    def _beat(self, source: str, fetch: SourceFetch) -> None:
        """Report the progress; end this process once there is too little of it."""
        pause, floor = threading.Event(), SpeedFloor()
        listing_ends = monotonic() + LISTING_S
        while not pause.wait(PROGRESS_S):
            self.report(FetchProgress(fetch.count.done))
            if slow := too_slow(fetch, floor, listing_ends, monotonic()):
                # The thread that downloads waits for its place; nothing else would end it.
                self.report(FetchFailed(f"{source}: {slow}"))
                os._exit(1)


def too_slow(fetch: SourceFetch, floor: SpeedFloor, listing_ends: float, now: float) -> str:
    """Why a fetch ends; empty: it goes on. floor: of this fetch."""
    match fetch.stage:
        case "listing":
            if now > listing_ends:
                return f"its files are not listed within {LISTING_S:g} s"
        case "waiting":
            floor.rest()
        case "downloading":
            return floor.check_speed(now, fetch.count.moved)
    return ""


def reported(source: str, run: Callable[[], FetchWhole | FetchHeads]) -> LastReport:
    """What a run returns, or why that doesn't work."""
    try:
        return run()
    except SourceFailure as error:
        return FetchFailed(str(error), error.lasting)
    except (httpx2.HTTPError, OSError, ValueError) as error:
        said = " ".join(str(error).split()) or "no reason given"
        return FetchFailed(f"{source}: {said[:500]} ({type(error).__name__})")
    except MemoryError:
        said = f"what it answers takes more than {MOST_MEMORY} bytes of memory"
        return FetchFailed(f"{source}: {said}", lasting=True)
    except (LookupError, TypeError, AttributeError) as error:  # libraries take an answer as it is
        log.exception("an answer for %s", source)
        kind = type(error).__name__
        return FetchFailed(f"{source}: what it answers can't be understood ({kind})")


def secrets_of(origin: FilesOrigin, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What no report may have."""
    return [one for one in (origin.secret, *map(environment.get, SECRETS)) if one]


def hide(text: str, secrets: Iterable[str]) -> str:
    """The same text without secrets."""
    for one in secrets:
        text = text.replace(one, HIDDEN)
    return text


def plain(text: str) -> str:
    """One line of bounded length that a terminal can show: places' own words may be in it."""
    return "".join(one if one.isprintable() else " " for one in text[:MOST_WHY])


def bound_memory() -> None:
    """Let this process have MOST_MEMORY bytes, unless it may only have fewer."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > MOST_MEMORY:
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, hard))


def main() -> int:
    """Fetch; the exit code."""
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no report
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    quiet("files")
    try:
        launch = read_launch(FetchLaunch)
    except StartupError as error:
        say(str(error))
        return 2
    bound_memory()
    process = FetcherProcess(sys.stdin.buffer, reports)
    last = process.run(launch)
    process.report(last)
    return int(isinstance(last, FetchFailed))


if __name__ == "__main__":
    leave(main())
