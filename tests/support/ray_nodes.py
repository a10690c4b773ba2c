"""Nodes of a Ray cluster by `ray start`, each on a host of `tests.support.network`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.network import Host, Network

PORT = 6379
END_S = 20.0
UP = "Ray runtime started."
STORE_BYTES = 80_000_000
"""Ray's least object store; nothing of ours is in it."""
NO_SETTINGS: Mapping[str, int] = MappingProxyType({})
RAYS_OWN = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Environment of a node: it reports to nobody; its workers, which have a niceness of 15 by default,
get as much of a busy machine as whoever waits for them."""
QUICK_TO_NOTICE = {"health_check_period_ms": 1000, "health_check_timeout_ms": 1000,
                   "health_check_failure_threshold": 3}  # fmt: skip
"""Ray's settings by which it notices soon that a node is gone."""


class RayHosts:
    """One node a host; the first is the head, and has no CPU to give away."""

    def __init__(
        self, network: Network, logs: Path, cpus: int = 1, settings: Mapping[str, int] = NO_SETTINGS
    ) -> None:
        """logs: a folder. cpus: of each node but the head. settings: Ray's own."""
        self._scratch = network.scratch
        self._logs = logs
        self._cpus = cpus
        self._processes: dict[Host, subprocess.Popen[bytes]] = {}
        head, *others = network.hosts
        self.address = f"{head.address}:{PORT}"
        own = [f"--system-config={json.dumps(dict(settings))}"] if settings else []
        try:
            self._start(head, "--head", f"--port={PORT}", "--num-cpus=0",
                        "--include-dashboard=false", f"--temp-dir={self._scratch}",
                        "--disable-usage-stats", *own)  # fmt: skip
            self._wait(head)
            for host in others:
                self._begin(host)
            for host in others:
                self._wait(host)
        except BaseException:
            self.close()
            raise

    def _begin(self, host: Host) -> None:
        self._start(host, f"--address={self.address}", f"--num-cpus={self._cpus}")

    def join(self, host: Host) -> None:
        """Let a node on the host join, whose node before has ended."""
        self._begin(host)
        self._wait(host)

    def processes(self, host: Host) -> list[psutil.Process]:
        """The processes of a host's node."""
        if self._processes[host].poll() is not None:
            return []
        try:
            whole = psutil.Process(self._processes[host].pid)
            return [whole, *whole.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self, host: Host) -> None:
        """End a host's node at once, with all that runs there."""
        for process in self.processes(host):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._processes[host].wait(END_S)

    def wait_end(self, host: Host) -> None:
        """Wait for the end of a node that Ray counts as lost. Raises TimeoutExpired."""
        self._processes[host].wait(SERVER_PATIENCE_S)

    def _start(self, host: Host, *flags: str) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        command = [
            *host.enter, ray, "start", "--block", f"--node-ip-address={host.address}",
            f"--object-store-memory={STORE_BYTES}", *flags,
        ]  # fmt: skip
        with self._log(host).open("wb") as log:
            self._processes[host] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **RAYS_OWN}
            )

    def _wait(self, host: Host) -> None:
        """Until its node is in the cluster."""
        deadline = time.monotonic() + SERVER_PATIENCE_S
        while UP not in (said := self._log(host).read_text()):
            ended = self._processes[host].poll() is not None
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"no Ray node on {host.address}: {said[-3000:]}")
            time.sleep(0.1)

    def _log(self, host: Host) -> Path:
        return self._logs / f"ray-{host.address}"

    def running(self, module: str) -> list[psutil.Process]:
        """What runs `python -m module` on the nodes."""
        return [one for host in self._processes for one in self.running_on(host, module)]

    def running_on(self, host: Host, module: str) -> list[psutil.Process]:
        """The same on one host."""
        found = []
        for process in self.processes(host):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if module in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def close(self) -> None:
        """End all nodes, the head last."""
        for process in reversed(self._processes.values()):
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
