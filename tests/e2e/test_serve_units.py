"""Two real servers of one unit: KV cache goes to who wants it, every token is right, and nobody is
stopped by the end of the agent."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest

from kvmig.core.errors import TransportError
from kvmig.sharing.lease_ledger import MIB
from kvmig.sharing.messages import MemberShare, UnitState
from kvmig.sharing.unit_state import fetch_unit
from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server

ARENA = 80 * MIB
BLOCK = MIB // 8
FLAGS = (
    "--enforce-eager", "--block-size=32", "--max-num-seqs=16", "--max-model-len=2048",
    "--dtype=float32", "--instances=1", "--shutdown-timeout=2", "--reclaim-patience=0.5",
)  # fmt: skip
PROMPT = 220
"""Numbers of five tokens each."""


class Agent:
    """`python -m kvmig.sharing`, which may die; ended at the end of the block."""

    def __init__(self, path: Path, arena: int = ARENA) -> None:
        self.path, self.arena = path, arena
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        words = (str(self.path), f"--memory={self.arena}B", "--end-with-stdin")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvmig.sharing", *words], stdin=subprocess.PIPE
        )
        self.until(lambda unit: True)

    def kill(self) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()

    def unit(self) -> UnitState:
        return asyncio.run(fetch_unit(str(self.path)))

    def until(self, holds: Callable[[UnitState], bool], *, starts: bool = False) -> UnitState:
        """starts: an engine may, with the one block that it has before its first lease."""
        most = self.arena + (BLOCK if starts else 0)
        deadline = time.monotonic() + SERVER_PATIENCE_S
        while True:
            try:
                unit = self.unit()
                assert sum(one.lease for one in unit.shares) <= most
                if holds(unit):
                    return unit
            except TransportError:
                pass  # not yet
            assert time.monotonic() < deadline
            time.sleep(0.02)


def share(unit: UnitState, model: str) -> MemberShare:
    return next(one for one in unit.shares if one.model == model)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path / "unit") as made:
        yield made


def counted(served: Served, model: str, start: int, tokens: int) -> None:
    """One call, whose every token is looked at."""
    before = " ".join(f"{number:04}" for number in range(start, start + PROMPT))
    body = {"model": model, "prompt": before, "max_tokens": tokens, "temperature": 0}
    answer: Any = httpx.post(f"{served.url}/v1/completions", json=body, timeout=300).json()
    after = "".join(f" {number:04}" for number in range(start + PROMPT, start + PROMPT + tokens))
    assert answer["choices"][0]["text"] == after[:tokens], answer


def until_shown(served: Served, line: str) -> None:
    """Wait until its metrics say so."""
    wait_until(lambda: line in httpx.get(f"{served.url}/metrics", timeout=30).text)


def guarantee_changes(agent: Agent, a: Served) -> None:
    """By an order, while it serves; one that can't be is refused, and nothing is changed."""

    def order(size: int) -> tuple[int, Any]:
        url = f"{a.url}/kvmig/v1/instances/i0"
        answer = httpx.patch(url, json={"guarantee_bytes": size}, timeout=30)
        return answer.status_code, answer.json()

    status, rows = order(60 * MIB)
    assert (status, rows["data"][0]["shared"]["guarantee_bytes"]) == (200, 60 * MIB)
    unit = agent.unit()
    assert (share(unit, "a").guarantee, share(unit, "b").guarantee) == (60 * MIB, 20 * MIB)
    for size, words in ((78 * MIB, "MiB are missing"), (MIB, "one request of the greatest length")):
        status, refused = order(size)
        assert (status, refused["error"]["type"]) == (409, "ConflictError")
        assert words in refused["error"]["message"]
        assert share(agent.unit(), "a").guarantee == 60 * MIB
    assert order(0)[0] == 200
    agent.until(lambda unit: all(abs(one.guarantee - ARENA / 2) < MIB for one in unit.shares))


@pytest.mark.long
def test_a_guarantee_that_was_changed_outlives_a_crash_and_a_rolling_restart(
    agent: Agent, nursery: Nursery, tmp_path: Path
) -> None:
    flags = [*FLAGS, "--instances=2", "--front-ends=2", f"--unit={agent.path}"]

    def guarantees(unit: UnitState) -> dict[str, tuple[int, int]]:
        """Process and MiB of each, by instance."""
        return {
            one.instance.rpartition(".")[2]: (one.process, round(one.guarantee / MIB))
            for one in unit.shares
        }

    with Served([*flags, "--served-model-name=a"], nursery=nursery, log=tmp_path / "a") as a:
        url = f"{a.url}/kvmig/v1/instances"

        def states() -> set[str]:
            return {row["state"] for row in httpx.get(url, timeout=30).json()["data"]}

        def until_again(name: str) -> None:
            """It is another process, and all serve."""
            gone = before[name][0]
            agent.until(lambda unit: guarantees(unit).get(name, (gone,))[0] != gone, starts=True)
            agent.until(lambda unit: states() == {"serving"}, starts=True)

        agent.until(lambda _: "kvmig: serving" in a.output())  # both front ends
        for name, size in (("i0", 48), ("i1", 22)):
            body = {"guarantee_bytes": size * MIB}
            assert httpx.patch(f"{url}/{name}", json=body, timeout=30).status_code == 200
        before = guarantees(agent.unit())
        assert {name: size for name, (_, size) in before.items()} == {"i0": 48, "i1": 22}

        psutil.Process(before["i0"][0]).kill()
        until_again("i0")
        crashed = guarantees(agent.unit())
        assert (crashed["i0"][1], crashed["i1"]) == (48, before["i1"])

        answer = httpx.post(f"{url}/restart", json={"instances": ["i1"]}, timeout=30)
        assert answer.status_code == 202
        until_again("i1")
        renewed = guarantees(agent.unit())
        assert (renewed["i0"], renewed["i1"][1]) == (crashed["i0"], 22)


@pytest.mark.long
def test_memory_follows_the_load_and_every_token_is_right_whatever_happens_to_the_agent(
    agent: Agent, nursery: Nursery, tmp_path: Path
) -> None:
    def flags(name: str) -> list[str]:
        unit = (f"--unit={agent.path}", "--unit-shares=80,40")
        return [*FLAGS, *unit, f"--served-model-name={name}"]

    with (
        ThreadPoolExecutor(24) as clients,
        Served(flags("a"), nursery=nursery, log=tmp_path / "a") as a,
        Served(flags("b"), nursery=nursery, log=tmp_path / "b") as b,
    ):
        assert [row["shared"]["decode_share"] for row in a.get("instances")] == [40]
        for one in agent.unit().shares:
            assert one.lease == pytest.approx(ARENA / 2, abs=MIB)
        told = httpx.get(f"{a.url}/metrics", timeout=30).text
        assert re.search(r'^kvmig_unit_lease_bytes\{instance="i0"\} 4', told, re.MULTILINE)
        assert 'kvmig_unit_connected{instance="i0"} 1.0' in told
        guarantee_changes(agent, a)
        calls = [clients.submit(counted, a, "a", 100 + one, 250) for one in range(12)]
        agent.until(lambda unit: share(unit, "a").lease > 0.6 * ARENA)
        agent.kill()
        calls += [clients.submit(counted, b, "b", 300 + one, 150) for one in range(10)]
        until_shown(b, 'kvmig_unit_connected{instance="i0"} 0.0')
        assert not all(call.done() for call in calls)
        agent.start()
        lent = agent.until(lambda unit: len(unit.shares) == 2 and all(s.used for s in unit.shares))
        assert share(lent, "a").lease + share(lent, "b").lease <= ARENA
        agent.until(lambda unit: share(unit, "b").lease > 0.45 * ARENA)
        until_shown(b, 'kvmig_unit_connected{instance="i0"} 1.0')
        for call in calls:
            call.result(SERVER_PATIENCE_S)
        for served in (a, b):
            told = httpx.get(f"{served.url}/metrics", timeout=30).text
            waited = re.search(r"^kvmig_unit_turn_wait_seconds_total{.*} (.*)$", told, re.MULTILINE)
            assert waited is not None
            assert float(waited[1]) > 0
            assert (
                "--unit-shares order its steps, and limit no SMs: a CPU has no" in served.output()
            )
        a.stop()
        agent.until(lambda unit: len(unit.shares) == 1 and unit.shares[0].lease == ARENA)
        late = [*FLAGS, f"--unit={agent.path}", "--unit-guarantee=78MiB"]
        with pytest.raises(Exception, match=r"its guarantee takes 78.0 MiB, .* MiB are missing"):
            Served(late, nursery=nursery, log=tmp_path / "c").start()
