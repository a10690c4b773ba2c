"""`python -m tests.support.gpu_nursery vllm SOCKET`: `kvmig.launcher.shared_fork_server`, whose
instances have their KV caches on GPUs of the tests' own, and do what a test orders by files in
$KVMIG_TEST_ORDERS:

- `environment`: variables of instances that start from now on, such as those of the fake GPUs;
- `source copying`, as any state of a handshake's side: a `Blow` for whoever enters that next.

Each instance's engine says what it is in the file `engine PID`.

What their memory is, NVML says (`tests.support.fake_devices`), and each counts its own.

Each instance opens the driver itself: nothing here has. An instance that has ended starts again at
once, and what it has left is looked for soon.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import pytest

from kvmig import serve
from kvmig.core.config import UnitConfig
from kvmig.engines.base import ServingEngine
from kvmig.engines.vllm.kind import VllmKind
from kvmig.kernels import driver
from kvmig.kernels.driver import CudaDriver
from kvmig.kvtransfer.machine import StateMachine
from kvmig.kvtransfer.transports import select
from kvmig.launcher import shared_fork_server
from kvmig.process import child, supervisor
from tests.support import fake_gpu

ORDERS = "KVMIG_TEST_ORDERS"
ENVIRONMENT = "environment"
CORES = "KVMIG_TEST_CORES"
"""Variable of a nursery: cores that its servers believe to have."""
V2 = "VLLM_USE_V2_MODEL_RUNNER"
State = tuple[str, str]
"""Side and state of a handshake."""


class Blow(NamedTuple):
    """A signal for the next instance that enters a state, and how long after it has."""

    number: int
    delay_s: float = 0.0


class Orders:
    """The folder, as a test has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def environment(self, variables: Mapping[str, str]) -> None:
        """Of instances that start from now on."""
        (self._folder / ENVIRONMENT).write_text(json.dumps(variables))

    @contextmanager
    def blows(self, blows: Mapping[State, Blow]) -> Iterator[Callable[[], list[State]]]:
        """Inside the block; gives those that nobody has got so far."""

        def to_come() -> list[State]:
            return [one for one in blows if self._file(one).exists()]

        for one, blow in blows.items():
            self._file(one).write_text(json.dumps(blow))
        try:
            yield to_come
        finally:
            for one in to_come():
                self._file(one).unlink()

    def engine(self, process: int) -> object:
        """What the engine of an instance is."""
        return json.loads((self._folder / f"engine {process}").read_text())

    def _file(self, state: State) -> Path:
        return self._folder / " ".join(state)


def main(words: Sequence[str]) -> int:
    """As `kvmig.launcher.shared_fork_server`."""
    folder = Path(os.environ[ORDERS])
    load, make, init, go = (
        VllmKind.load,
        VllmKind.make,
        StateMachine.__init__,
        StateMachine.apply_event,
    )

    def load_runner(kind: VllmKind) -> None:
        if os.environ.get(V2) == "1":
            from tests.support import runner_v2

            runner_v2.pytest_collection_finish()
        load(kind)
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.is_sleep_mode_available = lambda platform: True

    def make_on_gpu(
        kind: VllmKind, argv: list[str], unit_tokens: int, unit: UnitConfig | None = None
    ) -> ServingEngine:
        if (told := folder / ENVIRONMENT).exists():
            os.environ.update(json.loads(told.read_text()))
        put_on_gpu("--async-scheduling" in argv, unit is not None)
        made = make(kind, argv, unit_tokens, unit)
        (folder / f"engine {os.getpid()}").write_text(json.dumps(words_of(made)))
        return made

    def entered(machine: StateMachine) -> None:
        side = "source" if type(machine).__name__ == "SourceMachine" else "destination"
        order = folder / f"{side} {machine.state}"
        if order.exists():
            blow = Blow(*json.loads(order.read_text()))
            order.unlink()
            if blow.delay_s:
                Timer(blow.delay_s, os.kill, (os.getpid(), blow.number)).start()
            else:
                os.kill(os.getpid(), blow.number)

    def begun(machine: StateMachine, key: str, initial: StrEnum) -> None:
        init(machine, key, initial)
        entered(machine)

    def gone(machine: StateMachine, event: StrEnum) -> None:
        go(machine, event)
        entered(machine)

    patch = pytest.MonkeyPatch()
    if many := os.environ.get(CORES):
        patch.setattr(serve, "cores", lambda: int(many))
    patch.setattr(VllmKind, "load", load_runner)
    patch.setattr(VllmKind, "make", make_on_gpu)
    patch.setattr(StateMachine, "__init__", begun)
    patch.setattr(StateMachine, "apply_event", gone)
    patch.setattr(supervisor, "PAUSES_S", (0.1,))
    patch.setattr(select, "LOOK_S", 0.2)
    return shared_fork_server.main(words)


def put_on_gpu(steps_overlap: bool, shared: bool) -> None:
    """The engine that this process makes next has its cache on the first GPU that it sees, or those
    of its workers that are processes of their own on a GPU each."""
    from kvmig.engines.vllm import config, worker
    from tests.support.gpu_memory import CountingWorker
    from tests.support.gpu_worker import count_as_gpus, export_cache, memory_of, take_pages_of_gpus

    patch = pytest.MonkeyPatch()
    fake_gpu.install(patch)
    gpu = CudaDriver(0)
    describe, configure = worker.describe_cache, config.engine_config

    def describe_moved(of: Any, layer_names: Sequence[str]) -> object:
        patch.setattr(worker, "describe_cache", describe)
        return worker.move_cache(of, layer_names, memory_of(gpu))

    def overlapping(args: Any) -> Any:
        made = configure(args)
        made.scheduler_config.async_scheduling = steps_overlap  # vLLM's CPU platform has none
        made.parallel_config.worker_cls = f"{CountingWorker.__module__}.{CountingWorker.__name__}"
        return made

    count_as_gpus(patch, gpu)
    if shared:
        take_pages_of_gpus(patch)
    else:
        patch.setattr(worker, "describe_cache", describe_moved)
    patch.setattr(worker, "export_cache", partial(export_cache, library=driver.LIBRARY))
    patch.setattr(config, "engine_config", overlapping)


def words_of(engine: Any) -> dict[str, object]:
    """What tests ask about an engine."""
    config = engine._core.vllm_config
    return {
        "GPUs": os.environ["CUDA_VISIBLE_DEVICES"],
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "steps overlap": config.max_concurrent_batches > 1,
    }


if __name__ == "__main__":
    child.leave(main(sys.argv[1:]))
