"""Servers of one model each, in units of one host."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil

from bench.models import kv_numbers
from bench.site import all_up
from kvmig.core.errors import TransportError
from kvmig.models import BUNDLED
from kvmig.sharing.messages import MemberShare, UnitState
from kvmig.sharing.unit_state import fetch_unit
from kvmig_tools.nursery import Nursery
from kvmig_tools.served import Served

MIB = 1 << 20
BLOCK_TOKENS = 32
LOOK_S = 0.004
FLAGS = (
    "--enforce-eager", f"--block-size={BLOCK_TOKENS}", "--dtype=float32", "--shutdown-timeout=1",
)  # fmt: skip
"""In 32 bits: a CPU without bfloat16 takes half a millisecond for each token of a step in it, ten
times as long. A batch of 28 would compute for 30 ms, and be limited by that."""
PATIENCE_S = 300.0


def block_bytes(checkpoint: Path) -> int:
    """Of one block of the KV cache, under FLAGS."""
    return BLOCK_TOKENS * kv_numbers(checkpoint) * 4


BLOCK_BYTES = block_bytes(BUNDLED)


class Agent:
    """`python -m kvmig.sharing` with an arena of so many bytes."""

    def __init__(self, path: Path, arena: int, rule: str = "kvmig", policy: str = "adbs") -> None:
        self.path = str(path)
        words = (
            self.path, f"--memory={arena}B", f"--quotas={rule}", f"--policy={policy}",
            "--end-with-stdin",
        )  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvmig.sharing", *words], stdin=subprocess.PIPE
        )
        self.until(lambda unit: True)

    def close(self) -> None:
        """End it, if it hasn't ended."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def unit(self) -> UnitState:
        return asyncio.run(fetch_unit(self.path))

    def until(self, holds: Callable[[UnitState], bool]) -> float:
        """When that was so first, by a steady clock."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(TransportError):  # not yet
                if holds(self.unit()):
                    return time.monotonic()
            time.sleep(LOOK_S)
        raise TimeoutError(f"{self.path}: {self.unit()}")


def share(unit: UnitState, name: str) -> MemberShare:
    """Of the instance, or the model, of that name."""
    return next(one for one in unit.shares if name in (one.model, one.instance.split(".")[1]))


class Site:
    """Servers of one model each, in units."""

    def __init__(self, stack: ExitStack, folder: Path, checkpoint: Path = BUNDLED) -> None:
        self._stack = stack
        self._folder = folder
        self._checkpoint = checkpoint
        self._nursery = stack.enter_context(Nursery("vllm"))
        self.served: dict[str, Served] = {}

    def agent(self, name: str, arena: int, rule: str = "kvmig", policy: str = "adbs") -> Agent:
        """Until the end, or `Agent.close`."""
        made = Agent(self._folder / name, arena, rule, policy)
        self._stack.callback(made.close)
        return made

    def serve(self, model: str, agent: Agent, *flags: str) -> None:
        """One that is up."""
        self.serve_all({model: (f"--unit={agent.path}", *flags)})

    def serve_all(self, flags: Mapping[str, Sequence[str]]) -> None:
        """Models with flags of their own; they start at the same time."""
        made = {
            model: Served(
                [*FLAGS, f"--served-model-name={model}", *own],
                model=self._checkpoint,
                nursery=self._nursery,
                log=self._folder / f"{model}.log",
            )
            for model, own in flags.items()
        }
        self._stack.enter_context(all_up(list(made.values())))
        self.served |= made

    def order(self, method: str, model: str, path: str) -> None:
        url = f"{self.served[model].url}/kvmig/v1/{path}"
        httpx.request(method, url, timeout=30).raise_for_status()


def cores(process: psutil.Process, seconds: float) -> float:
    """Processor time for time."""

    def spent() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    began, before = time.monotonic(), spent()
    time.sleep(seconds)
    return (spent() - before) / (time.monotonic() - began)
