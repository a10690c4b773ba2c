"""A fleet's Ray cluster as its server has it: reports of a process of its own that has joined it.

`kvmig.launcher.ray_watch` is that process: it ends with the server, or when the cluster is gone,
and is started again.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable

import msgspec

from kvmig.core.errors import ConfigError
from kvmig.launcher.node_files import ClusterWish, encode_wish
from kvmig.launcher.node_reports import ClusterReport, report_of
from kvmig.launcher.ray_cluster import checked_address
from kvmig.process.supervisor import end_by_stdin

MODULE = "kvmig.launcher.ray_watch"
CHECK_S = 60.0
"""Timeout of joining the cluster."""
SILENCE_S = 60.0
"""A process without a report for this time hangs, and is killed: Ray itself gives a head up
after a minute."""
AGAIN_S = 2.0
"""Pause before it is started again."""
REPORT_BYTES = 1 << 24
"""Longest report."""
END_S = 5.0

log = logging.getLogger(__name__)


def check_cluster(address: str) -> None:
    """Raises ConfigError for a cluster that can't be joined, with the reason."""
    checked_address(address)
    try:
        found = subprocess.run(
            [sys.executable, "-m", MODULE, address, "--check"],
            stdin=subprocess.DEVNULL,
            stderr=PIPE,
            timeout=CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"--ray is {address}, but joining that cluster takes more than {CHECK_S:g} s"
        ) from error
    if found.returncode:
        lines = found.stderr.decode(errors="replace").strip().splitlines()
        said = lines[-1].removeprefix("kvmig: ") if lines else f"exit code {found.returncode}"
        raise ConfigError(said)


class ClusterWatch:
    """`run` it as a task."""

    def __init__(
        self,
        address: str,
        take: Callable[[ClusterReport | None], None],
        wish: Callable[[], ClusterWish],
    ) -> None:
        """take: gets each report, and None when no more come. wish: which files nodes are to have
        now."""
        self._address = address
        self._take = take
        self._wish = wish

    async def run(self) -> None:
        """Take reports, and start the process again whenever it ends, until cancelled."""
        said = ""
        while True:
            try:
                why = await self._watch()
            except OSError as error:
                why = f"the process that watches it can't be started: {error}"
            self._take(None)
            if why != said:
                log.warning("the Ray cluster is not watched now: %s", why)
            said = why
            await asyncio.sleep(AGAIN_S)

    async def _watch(self) -> str:
        """Run the process until its end; why it has ended. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MODULE, self._address, stdin=PIPE, stdout=PIPE,
            limit=REPORT_BYTES,
        )  # fmt: skip
        try:
            return await self._follow(process)
        finally:
            await end_by_stdin(
                process, END_S, "the process that watches the cluster"
            )  # it frees its agents then

    async def _follow(self, process: Process) -> str:
        assert process.stdout is not None
        assert process.stdin is not None
        said = b""
        while True:
            if (line := encode_wish(self._wish())) != said:
                process.stdin.write(line)
                said = line
            try:
                async with asyncio.timeout(SILENCE_S):
                    line = await process.stdout.readline()
                if not line:
                    return "the process that watches it has ended"
                report = report_of(line)
            except TimeoutError:
                return f"nothing was reported for {SILENCE_S:g} s"
            except (ValueError, msgspec.DecodeError) as error:
                return f"a report can't be read: {error}"
            if report.failed:
                return report.failed
            self._take(report)
