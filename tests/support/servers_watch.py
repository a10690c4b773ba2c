"""What a fleet's server has of a Ray cluster of one node: the process that sends agents wishes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvmig.launcher.node_files import ClusterWish, FilesWish, WantedUnit, encode_wish
from kvmig.launcher.node_reports import NodeReport, report_of
from kvmig_tools.patience import SERVER_PATIENCE_S

ROOT = str(Path(__file__).parents[2])
FLEET = "f" * 32


class ServersWatch:
    """It sends its last wish every second, also while the server stands still."""

    def __init__(self, address: str, term: int, root: Path, node: str) -> None:
        """node: Ray's id of the only one."""
        self._term, self._root, self._node = term, root, node
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvmig.launcher.ray_watch", address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ROOT},
        )  # fmt: skip

    def wish(self, *units: WantedUnit, engines: tuple[str, ...] = ()) -> None:
        """Let the node have these units, and fork servers of these engines."""
        wish = ClusterWish(
            common=FilesWish(root=str(self._root), word=f"of {self._term}"), engines=engines,
            fleet=FLEET, term=self._term, units={self._node: units},
        )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(encode_wish(wish))
        self.process.stdin.flush()

    def next_report(self) -> NodeReport:
        """What it reports of the only node."""
        assert self.process.stdout is not None
        (node,) = report_of(self.process.stdout.readline()).nodes
        return node

    def until(self, wanted: Callable[[NodeReport], object]) -> NodeReport:
        deadline = time.monotonic() + SERVER_PATIENCE_S
        while not wanted(node := self.next_report()):
            assert time.monotonic() < deadline, node
        return node

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self._leave()

    def close(self) -> None:
        """End it; may be called twice, and after `kill`."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self._leave()

    def _leave(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(SERVER_PATIENCE_S)
