"""The download of one model's files, from what was wanted to the whole folder. Pure.

    wanted -fetcher starts-> listing -listed, room is there-> downloading -verified-> whole
       ^                        '--------- failed, with a reason ---------'
       '---- the pause is over, or an order asks again ----'

The server calls these functions with what a fetcher reports. A fetcher that dies is one that has
failed: the next one goes on with what is on the disk.
"""

from __future__ import annotations

from math import ceil
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from kvmig.core.quantities import size_text

State = Literal["wanted", "listing", "downloading", "whole", "failed"]

FIRST_RETRY_S = 10.0
LAST_RETRY_S = 300.0
WINDOW_S = 20.0
"""The rate is that of this time."""
STEP_S = 1.0
"""Time between two samples of it."""


class DownloadStatus(Struct, frozen=True):
    """The state of a download. Sizes are bytes, times those of any steady clock."""

    state: State = "wanted"
    since: float = 0.0
    size: int = 0
    """Size of the whole; 0: not known yet."""
    done: int = 0
    """What is on the disk of them."""
    revision: str = ""
    """What the source's revision stands for."""
    failures: int = 0
    """Failures in a row without a byte in between."""
    retry_at: float = 0.0
    why: str = ""
    """Why it failed last; empty: it did not, or has gone on since."""
    samples: tuple[tuple[float, int], ...] = ()
    """Times with `done` at them, the oldest first."""

    @property
    def runs(self) -> bool:
        """Whether a fetcher works for it."""
        return self.state in ("listing", "downloading")


def is_due(status: DownloadStatus, now: float) -> bool:
    """Whether a fetcher should start."""
    return status.state == "wanted" or (status.state == "failed" and now >= status.retry_at)


def ask_again(status: DownloadStatus, now: float) -> DownloadStatus:
    """An order wants it now: a pause ends, and what is whole is compared with its source."""
    if status.runs:
        return status
    return replace(status, state="wanted", since=now, failures=0, retry_at=now)


def begin(status: DownloadStatus, now: float) -> DownloadStatus:
    """A fetcher starts."""
    return replace(status, state="listing", since=now, samples=())


def take_list(
    status: DownloadStatus, revision: str, size: int, done: int, now: float
) -> DownloadStatus:
    """The fetcher knows what there is to fetch, and there is room for it."""
    return replace(
        status, state="downloading", since=now, revision=revision, size=size, done=done,
        samples=((now, done),),
    )  # fmt: skip


def take_progress(status: DownloadStatus, done: int, now: float) -> DownloadStatus:
    """The fetcher reports what is on the disk by now."""
    if status.state != "downloading":
        return status
    gained = done > status.done
    samples = status.samples
    if not samples or now - samples[-1][0] >= STEP_S:
        samples = (*(one for one in samples if now - one[0] <= WINDOW_S), (now, done))
    return replace(
        status,
        done=done,
        samples=samples,
        failures=0 if gained else status.failures,
        why="" if gained else status.why,
    )


def finish(status: DownloadStatus, now: float) -> DownloadStatus:
    """The files are there, and right."""
    return DownloadStatus("whole", now, status.size, status.size, status.revision)


def fail(status: DownloadStatus, why: str, now: float, *, lasting: bool = False) -> DownloadStatus:
    """The fetcher has failed, or died. lasting: to try at once would be in vain."""
    failures = status.failures + 1
    pause_s = LAST_RETRY_S if lasting else min(FIRST_RETRY_S * 2 ** (failures - 1), LAST_RETRY_S)
    return replace(
        status, state="failed", since=now, failures=failures, retry_at=now + pause_s, why=why,
        samples=(),
    )  # fmt: skip


def seconds_left(status: DownloadStatus, now: float) -> int | None:
    """How long it takes yet, at the rate of the last seconds; None: not known."""
    if status.state != "downloading" or not status.samples:
        return None
    at, done = next((one for one in status.samples if now - one[0] <= WINDOW_S), status.samples[-1])
    rate = (status.done - done) / max(now - at, 1e-9)
    return ceil((status.size - status.done) / rate) if rate > 0 else None


def sentence_for_callers(status: DownloadStatus, now: float) -> str:
    """The same for those who only call the model: reasons name sources, folders and tokens."""
    if status.state != "failed":
        return sentence_of(status, now)
    return f"its files can't be downloaded; the next try is in {_until_retry(status, now)} s"


def _until_retry(status: DownloadStatus, now: float) -> int:
    return max(0, ceil(status.retry_at - now))


def sentence_of(status: DownloadStatus, now: float) -> str:
    """How far it is, for people."""
    match status.state:
        case "wanted":
            return "its files wait to be downloaded"
        case "listing":
            return "its files are looked up at their source"
        case "downloading":
            left = seconds_left(status, now)
            more = "" if left is None else f", some {left} s left"
            return (
                f"its files are downloaded: {size_text(status.done)} of"
                f" {size_text(status.size)}{more}"
            )
        case "failed":
            again = _until_retry(status, now)
            return f"its files can't be downloaded: {status.why}; the next try is in {again} s"
        case "whole":
            return ""
