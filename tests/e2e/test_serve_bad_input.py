"""What a start with bad input says: one sentence, exit code 2, and nothing left running."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from kvmig.engines.toy.script import ScriptFile, ToyScript
from kvmig.models import BUNDLED
from kvmig.process.sockets import free_port
from kvmig_tools.nursery import ForkedServer, Nursery, forked_for
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.leaks import orphans

pytestmark = pytest.mark.server

MODEL = str(BUNDLED)
QUICK = ("--enforce-eager", "--max-num-seqs=4", "--num-gpu-blocks-override=300")
TOY = ("toy", "--engine=toy")
MARK = "KVMIG_TEST_RUN"
"""In the environment of all that a start of ours starts."""

REFUSED = [
    (["no/such/folder"], "MODEL is no/such/folder, must be a folder with a config.json"),
    ([], "MODEL is missing"),
    ([MODEL, "--block-size", "abc"], "--block-size is 'abc', must be a whole number"),
    (
        [MODEL, "--check", "--max-model-len", "100000000"],
        "User-specified max_model_len (100000000) is greater than the derived max_model_len",
    ),
    (
        [MODEL, "--check", "--enable-lora", "--lora-modules", f"a={MODEL}"],
        f"adapter a: there is no {MODEL}/adapter_config.json",
    ),
    ([MODEL, "--no-such-flag", "3"], "unrecognized arguments: --no-such-flag 3"),
    ([MODEL, "--config", "/no/such.yaml"], "vLLM's flags can't be read: [Errno 2] No such file"),
    ([MODEL, "--data-parallel-rank", "1"], "use --instances N"),
    ([MODEL, "-dp", "2", "-ep"], "--data-parallel-size is 2, must be 1 with"),
    ([MODEL, "--scheduler-cls", "a.b"], "--scheduler-cls a.b can't be used"),
    ([MODEL, "--kv-transfer-config", "{}"], "--kv-transfer-config can't be used"),
    ([MODEL, "--pipeline-parallel-size", "2"], "use --tensor-parallel-size"),
    (
        [MODEL, "--unit", "/no/such"],
        "--unit is /no/such, must be a unit's socket: no process listens at",
    ),
    ([MODEL, "--unit", ""], "--unit is [''], must be one path of a unit's socket"),
    (
        [MODEL, "--unit", "/u", "--ray"],
        "--unit is /u, must be left out with --ray: only `kvmig up --ray` starts agents",
    ),
    (
        [MODEL, "--ray", "--instance-gpus", "i0: 1"],
        "--instance-gpus is i0: 1, must be left out with --ray: Ray chooses the GPUs",
    ),
    (
        [MODEL, "--engine=toy", "--instance-gpu-memory", "4GiB"],
        "--instance-gpu-memory is 4294967296, must be left out with --engine toy",
    ),
    (
        [MODEL, "--instance-gpu-memory", "4GiB", "--kv-cache-memory-bytes=1G"],
        "--instance-gpu-memory is 4294967296, must be left out with flags of the engine",
    ),
    (
        [MODEL, "--instance-gpu-memory", "4GiB"],
        "--instance-gpu-memory is 4294967296, must be left out: NVML shows no GPU",
    ),
    (
        [MODEL, "--ray", "--gpu-memory", "4GiB"],
        "--gpu-memory is 4294967296, must be left out with --ray",
    ),
    ([*TOY, "--unit", "/u"], "--unit is /u, must be left out with --engine toy: only vLLM's"),
    (
        [MODEL, "--unit", "/u", "--unit", "i7: /v"],
        "--unit is 'i7: /v', must name one of 2 instances",
    ),
    (
        [MODEL, "--unit", "/u", "--unit", "/v"],
        "--unit is ['/u', '/v'], must be one path of a unit's",
    ),
    ([MODEL, "--unit", "i1: /v"], "--unit is [], must be one path of a unit's socket"),
    ([MODEL, "--unit-shares", "80,40"], "--unit-shares is given, but --unit is not"),
    ([MODEL, "--unit", "/u", "--unit-shares", "80"], "'80' must be two of 10, 20, 30, 40"),
    ([MODEL, "--unit", "/u", "--unit-shares", "0,40"], "'0,40' must be two of 10, 20"),
    ([MODEL, "--unit", "/u", "--unit-shares", "80,101"], "'80,101' must be two of 10, 20"),
    ([MODEL, "--unit-guarantee", "1GiB"], "--unit-guarantee is 1024 MiB, but --unit is not given"),
    ([MODEL, "--unit", "/u", "--unit-guarantee", "x"], "'x' must be a number of MiB"),
    (
        [MODEL, "--unit", "/u", "--reclaim-patience", "-1"],
        "--reclaim-patience is -1.0, must be 0 or",
    ),
    ([MODEL, "--instance-flags", "i7: --block-size 64"], "must be one of i0, i1, a colon and"),
    (
        [MODEL, "--instance-flags", "i1: --block-size x"],
        "--block-size is 'x', must be a whole number",
    ),
    ([MODEL, "--instance-vllm", "i7: /tmp"], "must be one of i0, i1, a colon and a folder"),
    ([MODEL, "--instance-vllm", "i1: /nowhere"], "'/nowhere' holds no vLLM, must be a folder with"),
    ([MODEL, "--port", "0", "--instances", "500"], "not enough memory for 500 instances"),
    (
        [MODEL, "--port", "0", "--kv-cache-memory-bytes", "9000g"],
        "lower --instances or --kv-cache-memory-bytes",
    ),
    ([MODEL, "--port", "70000"], "--port 70000 on 127.0.0.1 can't be used"),
    ([MODEL, "--host", "192.0.2.1"], "192.0.2.1 can't be used"),
    ([MODEL, "--instances", "0"], "--instances is 0, must be 1 or more"),
    ([MODEL, "--instances", "two"], "argument --instances: invalid int value: 'two'"),
    ([MODEL, "--priority-class", "high=-1,headroom=-5"], "high: headroom is -5, must be 0 or more"),
    (
        [MODEL, "--priority-class=high=-1", "--instance-flags", "i1: --scheduling-policy fcfs"],
        "--scheduling-policy is fcfs, must be priority",
    ),
    ([MODEL, "--autoscale", "10"], "--autoscale is 10, must be x,y with 0 <= x < y"),
    ([MODEL, "--autoscale", "60,10"], "--autoscale is 60,10, must be x,y with 0 <= x < y"),
    (
        [MODEL, "--autoscale=10,60", "--min-instances=3", "--max-instances=2"],
        "--max-instances is 2, must be at least --min-instances (3)",
    ),
    ([MODEL, "--max-instances", "1"], "--max-instances is 1, must be at least --instances (2)"),
    (
        [MODEL, "--autoscale=1,2", "--scale-stabilization=-1"],
        "--scale-stabilization is -1.0, must be 0 or",
    ),
    ([MODEL, "--autoscale=1,2", "--scale-cooldown=-1"], "--scale-cooldown is -1.0, must be 0 or"),
    ([MODEL, "--drain-deadline", "-1"], "--drain-deadline is -1.0, must be 0 or more"),
    ([MODEL, "--max-restarts", "-1"], "--max-restarts is -1, must be 0 or more"),
    ([MODEL, "--front-ends", "-1"], "--front-ends is -1, must be 0 or more"),
    ([MODEL, "--policy", "best"], "--policy is best, must be kvmig or"),
    ([MODEL, "--transport", "ftp"], "--transport is ftp, must be auto or shm or tcp"),
    ([MODEL, "--transport", "nixl"], "or be given with --trust-network"),
    ([MODEL, "--max-body", "9B"], "--max-body is 9, must be 1024 or more"),
    ([MODEL, "--heartbeat-timeout", "0"], "--heartbeat-timeout is 0.0, must be more seconds than"),
    ([MODEL, "--max-crashes", "0"], "--max-crashes is 0, must be 1 or more"),
    ([MODEL, "--ray", "head"], "--ray is 'head', must be auto or HOST:PORT"),
    ([MODEL, "--ray", "ray://head:10001"], "must be auto or HOST:PORT"),
    ([MODEL, "--ray", "127.0.0.1:1"], "--ray is 127.0.0.1:1, but no Ray cluster answers there"),
    ([MODEL, "--ray", "--ray-resources", "CPU: 1"], "--ray-resources is 'CPU: 1', must be a JSON"),
    ([MODEL, "--ray-resources", '{"CPU": 1}'], "but --ray is not given"),
    ([MODEL, "--chunk-bytes", "1"], "--chunk-bytes is 1, must be 4096 or more"),
    ([MODEL, "--pause-spread", "1.5"], "--pause-spread is 1.5, must be 0 to 1"),
    ([MODEL, "--pause-spread", "nan"], "--pause-spread is nan, must be 0 to 1"),
]


@pytest.fixture(autouse=True)
def _nothing_stays_when_a_test_fails() -> Iterator[None]:
    yield
    while Start.present:
        start = Start.present.pop()
        for one in start.running():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        start.process.wait()
        assert start.process.stderr is not None
        start.process.stderr.close()


class Start:
    """One `python -m kvmig.serve`, found again by its mark."""

    present: ClassVar[list[Start]] = []

    def __init__(self, *flags: str) -> None:
        self.present.append(self)
        self.mark = uuid.uuid4().hex
        self.port = free_port()
        self._orphans = orphans()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvmig.serve", *flags, "--port", str(self.port)],
            env={**os.environ, MARK: self.mark},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )

    def running(self) -> list[psutil.Process]:
        """All processes of this start."""
        found = []
        for one in psutil.process_iter():
            try:
                if one.environ().get(MARK) == self.mark and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def child(self, instance: int) -> psutil.Process:
        """A llumlet, as soon as it is there."""
        deadline = time.monotonic() + SERVER_PATIENCE_S
        while True:
            found = [
                one
                for one in self.running()
                if "kvmig.launcher.llumlet_main" in " ".join(one.cmdline())
            ]
            if len(found) > instance:
                return found[instance]
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def end(self) -> tuple[int, list[str]]:
        """Exit code and what kvmig itself said; nothing is left."""
        _, said = self.process.communicate(timeout=SERVER_PATIENCE_S)
        assert self.running() == []
        assert orphans() <= self._orphans
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))
        assert "Traceback" not in said, said
        return self.process.returncode, [
            line for line in said.splitlines() if line.startswith("kvmig: ")
        ]


@pytest.mark.parametrize(("argv", "wanted"), REFUSED, ids=[wanted for _, wanted in REFUSED])
def test_bad_input_is_answered_with_one_sentence(
    nursery: Nursery, tmp_path: Path, argv: list[str], wanted: str
) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        code = ForkedServer(argv, nursery.environment, output.fileno()).wait(SERVER_PATIENCE_S)

    assert code == 2
    assert "Traceback" not in log.read_text()
    lines = [line for line in log.read_text().splitlines() if line.startswith("kvmig: ")]
    # A server of another engine than the nursery's first says that it can't be forked from it.
    [said] = [line for line in lines if "this server starts its own" not in line]
    assert wanted in said


def test_help_shows_our_flags_by_group() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "kvmig.serve", "--help"],
        capture_output=True, text=True, timeout=SERVER_PATIENCE_S, check=True,
    ).stdout  # fmt: skip

    for group in ("cluster:", "scheduler:", "migration:"):
        assert f"\n{group}\n" in shown
    for flag in ("--instances", "--policy", "--transport", "--chunk-ms", "--shutdown-timeout"):
        assert flag in shown


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "kvmig.serve", *TOY, "--port", str(port)],
            capture_output=True, text=True, timeout=SERVER_PATIENCE_S, check=False,
        )  # fmt: skip

    assert done.returncode == 2
    assert f"--port {port} on 127.0.0.1 can't be used" in done.stderr
    assert "Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


def parent(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return None


def test_a_model_that_does_not_load_ends_the_start(nursery: Nursery, tmp_path: Path) -> None:
    model = tmp_path / "broken"
    shutil.copytree(BUNDLED, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])

    log, flags = tmp_path / "log", [str(model), *QUICK, f"--port={free_port()}"]
    with log.open("wb") as output:
        start = ForkedServer(flags, nursery.environment, output.fileno())
    instances: set[int] = set()
    deadline = time.monotonic() + SERVER_PATIENCE_S
    while (code := start.poll()) is None:
        assert time.monotonic() < deadline, log.read_text()
        found = forked_for(start.pid)  # whatever vLLM starts there has the same stdin
        instances |= {pid for pid in found if parent(pid) not in (None, *found)}
        time.sleep(0.05)

    said = [line for line in log.read_text().splitlines() if line.startswith("kvmig: ")]
    assert code == 2
    assert f"can't serve {model}: " in said[-1]
    assert said[-1].startswith("kvmig: instance i")
    assert len(said) == 3, "two instances start, and one sentence"
    assert len(instances) == 2
    assert not any(map(psutil.pid_exists, instances))
    assert "Traceback" not in log.read_text()


@pytest.fixture
def starting(tmp_path: Path) -> list[str]:
    """Flags of instances that never come to an end of their start."""
    script = tmp_path / "script"
    ScriptFile(str(script)).write(ToyScript(load=False))
    return [*TOY, f"--script={script}"]


def test_an_instance_that_dies_while_starting_ends_the_start(starting: list[str]) -> None:
    start = Start(*starting)
    start.child(1).kill()

    code, said = start.end()

    assert code == 2
    assert "died while starting (killed by SIGKILL)" in said[-1]


def test_a_signal_while_starting_ends_it(starting: list[str]) -> None:
    start = Start(*starting)
    start.child(0)
    start.process.send_signal(signal.SIGTERM)

    code, said = start.end()

    assert code == 0
    assert all(line.endswith("starts") for line in said), said
