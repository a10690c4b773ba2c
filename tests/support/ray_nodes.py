"""Nodes of a Ray cluster by `ray start`, each on a host of `tests.support.network`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.support.network import Host, Network

PORT = 6379
START_S = 60.0
END_S = 20.0
UP = "Ray runtime started."
STORE_BYTES = 80_000_000
"""Ray's least object store; nothing of ours is in it."""
RAYS_OWN = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Environment of a node: it reports to nobody; its workers, which have a niceness of 15 by default,
get as much of a busy machine as whoever waits for them."""


class RayHosts:
    """One node a host; the first is the head, and has no CPU to give away."""

    def __init__(self, network: Network, logs: Path) -> None:
        """logs: a folder."""
        self._scratch = network.scratch
        self._logs = logs
        self._processes: list[subprocess.Popen[bytes]] = []
        head, *others = network.hosts
        self.address = f"{head.address}:{PORT}"
        try:
            self._start(head, "--head", f"--port={PORT}", "--num-cpus=0",
                        "--include-dashboard=false", f"--temp-dir={self._scratch}",
                        "--disable-usage-stats")  # fmt: skip
            self._wait(head)
            for host in others:
                self._start(host, f"--address={self.address}", "--num-cpus=1")
            for host in others:
                self._wait(host)
        except BaseException:
            self.close()
            raise

    def _start(self, host: Host, *flags: str) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        command = [
            *host.enter, ray, "start", "--block", f"--node-ip-address={host.address}",
            f"--object-store-memory={STORE_BYTES}", *flags,
        ]  # fmt: skip
        with self._log(host).open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **RAYS_OWN},
                )
            )

    def _wait(self, host: Host) -> None:
        """Until its node is in the cluster."""
        deadline = time.monotonic() + START_S
        while UP not in (said := self._log(host).read_text()):
            ended = any(process.poll() is not None for process in self._processes)
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"no Ray node on {host.address}: {said[-3000:]}")
            time.sleep(0.1)

    def _log(self, host: Host) -> Path:
        return self._logs / f"ray-{host.address}"

    def running(self, module: str) -> list[psutil.Process]:
        """What runs `python -m module` on the nodes."""
        return [
            process
            for node in self._processes
            for process in psutil.Process(node.pid).children(recursive=True)
            if module in " ".join(process.cmdline())
        ]

    def close(self) -> None:
        """End all nodes, the head last."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
