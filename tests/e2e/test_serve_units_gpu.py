"""Two real servers of one unit on one GPU of the tests' own: the GPU's memory goes to who wants it,
and every token is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvmig.sharing.lease_ledger import MIB
from kvmig.sharing.messages import UnitState
from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.e2e.test_serve_gpus import nursery_in
from tests.e2e.test_serve_units import FLAGS, Agent, counted, share
from tests.support import fake_gpu
from tests.support.gpu_nursery import V2, Orders
from tests.support.leaks import Footprint

pytestmark = pytest.mark.server

PAGE, GROUP = 2 * MIB, 8 * MIB
ARENA = 10 * GROUP


def pieces(served: Served) -> int:
    """Of the GPU's memory that its instance has."""
    (one,) = Footprint.of(served).llumlets().values()
    return len(fake_gpu.memory_of(one.pid))


def once(
    agent: Agent, holds: Callable[[UnitState], bool], at: dict[str, Served], beside: int
) -> None:
    """Wait for it; meanwhile the instances have at most the arena, and then what they lease.

    beside: pieces that each has for its copies.
    """
    deadline = time.monotonic() + SERVER_PATIENCE_S
    while True:
        have = {name: (pieces(served) - beside) * PAGE for name, served in at.items()}
        assert sum(have.values()) <= ARENA
        unit = agent.unit()
        if holds(unit) and all(share(unit, name).lease == have[name] for name in at):
            return
        assert time.monotonic() < deadline, (unit, have)
        time.sleep(0.02)


def memory_follows_the_load(nursery: Nursery, folder: Path, runner: str) -> None:
    orders, path = Orders(folder), folder / "unit"
    orders.environment({})

    def server(name: str) -> Served:
        flags = [*FLAGS, f"--unit={path}", f"--served-model-name={name}"]
        sees = {"CUDA_VISIBLE_DEVICES": "0"}
        return Served(flags, nursery=nursery, environment=sees, log=folder / name)

    with (
        Agent(path, ARENA) as agent,
        ThreadPoolExecutor(24) as clients,
        server("a") as a,
        server("b") as b,
    ):
        at = {"a": a, "b": b}
        for one in agent.unit().shares:
            assert one.lease <= ARENA / 2
            engine = orders.engine(one.process)
            assert engine == {"GPUs": "0", "runner": runner, "steps overlap": False}
        beside = pieces(a) - share(agent.unit(), "a").lease // PAGE
        calls = [clients.submit(counted, a, "a", 100 + one, 500) for one in range(12)]
        once(agent, lambda unit: share(unit, "a").lease > ARENA / 2, at, beside)
        calls += [clients.submit(counted, b, "b", 300 + one, 500) for one in range(12)]
        once(agent, lambda unit: share(unit, "b").lease >= 4 * GROUP, at, beside)
        for call in calls:
            call.result(SERVER_PATIENCE_S)
        a.stop()
        once(agent, lambda unit: share(unit, "b").lease == ARENA, {"b": b}, beside)
        assert "alone" not in b.output()


@pytest.mark.long
@pytest.mark.parametrize(
    ("runner", "variables"),
    [("V1", {}), ("V2", {V2: "1", "TRITON_INTERPRET": "1"})],
    ids=["V1", "V2"],
)
def test_a_gpus_memory_follows_the_load_and_every_token_is_right(
    runner: str, variables: dict[str, str], tmp_path: Path
) -> None:
    with nursery_in(tmp_path, **variables) as nursery:
        memory_follows_the_load(nursery, tmp_path, runner)
