"""What is measured, running: kvmig's front ends, or vLLM's, on engines that compute nothing."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.load import process
from bench.load.orders import Orders
from kvmig.models import BUNDLED
from kvmig.process.sockets import free_port

START_S = 180.0
COMMON = ("--served-model-name", "count", "--disable-uvicorn-access-log")


@dataclass(frozen=True)
class Setup:
    """One way to serve. server: kvmig, vllm or kvmig-transformers."""

    server: str
    front_ends: int
    instances: int
    uds: str = ""
    """Of kvmig: path of its socket, instead of a port."""


class Site:
    """Started by `with`, and ended.

    front_ends, scheduler, stubs: process ids (with one front end, kvmig's launcher is in it).
    """

    def __init__(self, setup: Setup, log: Path) -> None:
        self.setup = setup
        self.port = free_port()
        self.front_ends: list[int] = []
        self.stubs: list[int] = []
        self._log_path = log
        self._stack = ExitStack()

    def __enter__(self) -> Site:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmig-load-"))
            self._log = stack.enter_context(self._log_path.open("wb"))
            address = f"ipc://{folder}/orders"
            if self.setup.server == "vllm":
                processes = self._start_vllm(stack, folder, address)
            else:
                processes = self._start_kvmig(stack, address)
            self._wait(processes)
            self.orders = Orders(address)
            stack.callback(self.orders.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start_kvmig(self, stack: ExitStack, address: str) -> list[subprocess.Popen[bytes]]:
        setup = self.setup
        engine = "transformers" if setup.server == "kvmig-transformers" else "vllm"
        stubs = process.start("bench.load.host", address, engine, setup.instances, log=self._log)
        stack.callback(process.end, stubs)
        self.stubs = [stubs.pid]
        place = ("--uds", setup.uds) if setup.uds else ("--port", self.port)
        served = process.start(
            "bench.load.serve", address, BUNDLED, *COMMON, "--engine", engine, *place,
            "--instances", setup.instances, "--front-ends", setup.front_ends,
            "--staging-buffers", 1, "--chunk-bytes", 4096, "--block-size", 32, log=self._log,
        )  # fmt: skip
        stack.callback(process.end, served)
        self._served = served.pid
        return [stubs, served]

    def _start_vllm(
        self, stack: ExitStack, folder: str, address: str
    ) -> list[subprocess.Popen[bytes]]:
        setup = self.setup
        paths = [
            (f"ipc://{folder}/in{number}", f"ipc://{folder}/out{number}")
            for number in range(setup.front_ends)
        ]
        flat = [path for pair in paths for path in pair]
        core = process.start("bench.load.twin_core", address, setup.instances, *flat, log=self._log)
        stack.callback(process.end, core)
        self.stubs = [core.pid]
        environment = {}
        if setup.front_ends > 1:  # as vLLM does for several API servers
            metrics = stack.enter_context(tempfile.TemporaryDirectory())
            environment["PROMETHEUS_MULTIPROC_DIR"] = metrics
        with socket.create_server(("127.0.0.1", self.port), backlog=1024) as listening:
            fronts = []
            for number, (to_core, from_core) in enumerate(paths):
                descriptor = listening.fileno()
                front = process.start(
                    "bench.load.twin", descriptor, setup.front_ends, number, to_core, from_core,
                    BUNDLED, *COMMON, "--port", self.port, "--block-size", 32,
                    log=self._log, descriptors=[descriptor], environment=environment,
                )  # fmt: skip
                stack.callback(process.end, front)
                fronts.append(front)
        self.front_ends = [front.pid for front in fronts]
        return [core, *fronts]

    def _wait(self, processes: list[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + START_S
        path = self.setup.uds
        transport = httpx.HTTPTransport(verify=False, uds=path or None)
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", transport=transport) as http:
            # Several front ends share the port: each may be the one that answers.
            answers = 0
            while answers < 4 * self.setup.front_ends:
                if any(one.poll() is not None for one in processes):
                    raise RuntimeError(f"a process ended\n{self.last_words()}")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not up in {START_S:g} s\n{self.last_words()}")
                with contextlib.suppress(httpx.HTTPError):
                    answers += http.get("/health", timeout=30).status_code == 200
                    continue
                time.sleep(0.2)
        if self.setup.server != "vllm":
            every = process.descendants(self._served)
            fronts = [pid for pid, words in every.items() if "kvmig.frontend.process_main" in words]
            self.front_ends = fronts or [self._served]

    @property
    def scheduler(self) -> list[int]:
        """It starts after the front ends."""
        every = {} if self.setup.server == "vllm" else process.descendants(self._served)
        return [pid for pid, words in every.items() if "cli.scheduler" in words]

    def last_words(self) -> str:
        """The end of what its processes have said."""
        return self._log_path.read_text(errors="replace")[-3000:]
