"""Who has a unit's KV cache, and how soon it comes to who wants it.

The KV cache that all engines have in memory, sampled; what an idle engine has; how long a model
whose requests wait for memory waits until it has it: from the prefix cache of another one, by
migrations of another one's requests, and by preemptions. And how much of a core an idle engine
takes.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench import report
from bench.models import model_folder
from bench.units.site import (
    BLOCK_TOKENS,
    MIB,
    PATIENCE_S,
    Agent,
    Site,
    block_bytes,
    cores,
    share,
)
from kvmig.sharing.messages import UnitState

SAMPLE_S = 0.1
LONGEST = 1216
"""Tokens of a request at most."""
PROMPT = 800


class Bursts(Site):
    """With clients in threads."""

    def __init__(self, stack: ExitStack, folder: Path, checkpoint: Path) -> None:
        super().__init__(stack, folder, checkpoint)
        self._clients: list[threading.Thread] = []
        self.failed: list[str] = []
        self._number = 0

    def call(self, model: str, prompt: int, tokens: int) -> None:
        """One call with a prompt of its own, to its end."""
        self._number += 1
        number = self._number
        ids = [7 + (number // 90**place) % 90 for place in range(3)] + [11] * (prompt - 3)
        body = {
            "model": model, "prompt": ids, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip

        def work() -> None:
            try:
                url = f"{self.served[model].url}/v1/completions"
                # Without certificates, which take 30 ms to load: hundreds come at once.
                answer = httpx.post(url, json=body, timeout=PATIENCE_S, verify=False)
                if answer.status_code != 200:
                    self.failed.append(answer.text[:200])
            except httpx.HTTPError as error:
                self.failed.append(repr(error))

        thread = threading.Thread(target=work, daemon=True)
        self._clients.append(thread)
        thread.start()

    def burst(self, model: str, calls: int, prompt: int, tokens: int) -> None:
        for _ in range(calls):
            self.call(model, prompt, tokens)

    def quiet(self) -> None:
        """Until all calls have ended."""
        for one in self._clients:
            one.join(PATIENCE_S)
        self._clients.clear()


def resident_kv(pid: int) -> int | None:
    """Of a process's KV cache in memory: its mapping without reserve, in small pages."""
    resident: int | None = None
    kept = 0
    with Path(f"/proc/{pid}/smaps").open() as lines:
        for line in lines:
            if line.startswith("Rss:"):
                kept = int(line.split()[1]) * 1024
            elif line.startswith("VmFlags:") and " nr " in line and " nh" in line:
                resident = kept + (resident or 0)
    return resident


class Sampler:
    """KV cache of all engines, again and again, on a thread of its own."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._pids = list(pids)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._began = time.monotonic()

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            sizes = [round((resident_kv(pid) or 0) / MIB, 2) for pid in self._pids]
            at = round(time.monotonic() - self._began, 2)
            self.rows.append({"what": "rss", "at_s": at, "mib": sizes})


def waited(site: Bursts, agent: Agent, model: str, calls: int, tokens: int, block: int) -> float:
    """Let so many requests come at once; seconds from the first one that waits for memory until
    the model has what it was guaranteed, or wants. block: its bytes."""
    site.burst(model, calls, PROMPT, tokens)
    began = agent.until(lambda unit: share(unit, model).wanted > share(unit, model).lease)

    def has(unit: UnitState) -> bool:
        one = share(unit, model)
        return one.lease >= min(one.wanted, one.guarantee) - block

    return agent.until(has) - began


def fill(site: Bursts, agent: Agent, model: str, calls: int, tokens: int, most: float) -> None:
    """Let it take the memory of the others."""
    site.burst(model, calls, PROMPT, tokens)
    agent.until(lambda unit: share(unit, model).lease >= most * unit.arena)


def memory(arena: int, repeats: int, model: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """U1: figures and samples."""
    rows: list[dict[str, Any]] = []
    checkpoint = model_folder(model)
    block = block_bytes(checkpoint)
    per_request = -(-PROMPT // BLOCK_TOKENS) * block
    all_of_it = arena // per_request + 2
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        site = Bursts(stack, Path(folder), checkpoint)
        here, there = site.agent("here", arena), site.agent("there", arena)
        own = f"--max-num-seqs={all_of_it + 8}", f"--max-model-len={LONGEST}"
        site.serve("idle", here, "--instances=1", *own)
        site.serve("a", here, "--instances=1", *own)
        site.serve("b", here, "--instances=2", *own, f"--unit=i1: {there.path}",
                   "--migrate-below=0", "--reclaim-patience=60")  # fmt: skip
        site.serve("c", here, "--instances=1", *own, "--reclaim-patience=2")
        inside = [one.process for one in here.unit().shares]
        idle = share(here.unit(), "idle").process
        core = cores(psutil.Process(idle), 5.0)
        quarter = max(2, all_of_it // 5)
        with Sampler(inside) as sampler:
            for _ in range(repeats):
                fill(site, here, "c", all_of_it, 1, 0.7)
                site.quiet()
                rows.append({"what": "cached", "s": waited(site, here, "a", quarter, 1, block)})
                site.quiet()
                site.order("POST", "b", "instances/i1/drain")
                site.burst("b", all_of_it - 4, PROMPT, 400)
                here.until(lambda unit: share(unit, "b").used >= 0.7 * unit.arena)
                site.order("DELETE", "b", "instances/i1/drain")
                rows.append({"what": "migration", "s": waited(site, here, "a", quarter, 1, block)})
                site.quiet()
                site.burst("c", all_of_it - 4, PROMPT, 400)
                here.until(lambda unit: share(unit, "c").used >= 0.7 * unit.arena)
                rows.append({"what": "preemption", "s": waited(site, here, "a", quarter, 1, block)})
                site.quiet()
        last = {pid: (resident_kv(pid) or 0) / MIB for pid in inside}
    rows += sampler.rows
    most = max(sum(row["mib"]) for row in sampler.rows)

    def longest(what: str) -> float:
        return max(float(row["s"]) for row in rows if row["what"] == what) * 1e3

    return {
        "arena, MiB": arena / MIB,
        "KV cache in memory at most, of the arena": most * MIB / arena,
        "KV cache of an idle engine, MiB": last[idle],
        "core of an idle engine": core,
        "samples": len(sampler.rows),
        "wait for memory from another's cache, longest ms": longest("cached"),
        "wait for memory with migrations, longest ms": longest("migration"),
        "wait for memory with preemptions, longest ms": longest("preemption"),
        "failed": len(site.failed),
    }, rows


TARGETS: dict[str, report.Target] = {
    "KV cache in memory at most, of the arena": {"max": 1.05},
    "KV cache of an idle engine, MiB": {"max": 4.0},
    "wait for memory from another's cache, longest ms": {"max": 100.0},
    "wait for memory with migrations, longest ms": {"max": 1000.0},
    "wait for memory with preemptions, longest ms": {"max": 2500.0},
    "core of an idle engine": {"max": 0.02},
    "failed": {"max": 0},
}
