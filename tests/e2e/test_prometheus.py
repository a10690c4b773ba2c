"""A real Prometheus scrapes a fleet of toys: panels have data, each alert fires in its scenario.

The alerts are those of deploy/prometheus with windows and delays of seconds (`AlertTimes`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmig.engines.toy.script import ScriptFile, ToyScript
from kvmig_tools.patience import SERVER_PATIENCE_S
from scripts.monitoring.panels import BOARDS
from scripts.monitoring.rules import AlertTimes, recorded_rules, rules_of
from tests.support.fake_devices import GIB, FakeMachine, devices
from tests.support.fleets import PATH, ToyFleet, ask, hold_streams
from tests.support.prometheus_server import PROGRAM, PrometheusServer, prometheus_of
from tests.support.waiting import until, wait_until

pytestmark = [
    pytest.mark.server,
    pytest.mark.long,
    pytest.mark.skipif(PROGRAM is None, reason="no Prometheus here: Debian's prometheus"),
]

QUICK = AlertTimes(
    fast=("10s", "5s"),
    slow=("15s", "8s"),
    moves="15s",
    faults="15s",
    soon="1s",
    later="2s",
    behind_s=5,
)
SIZE, CLAIM = 16 * GIB, 4 * GIB
BURNS = {"KvmigTtftBurnsFast", "KvmigTtftBurnsSlow", "KvmigTpotBurnsFast", "KvmigTpotBurnsSlow"}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> FakeMachine:
    """With two GPUs."""
    made = FakeMachine(tmp_path_factory.mktemp("machine"))
    made.install(devices(2, SIZE))
    return made


@pytest.fixture(scope="module")
def fleet(machine: FakeMachine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    """On two GPUs, with model a, which has two instances."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine.environment.items():
            patch.setenv(name, value)
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        with ToyFleet(tmp_path_factory.mktemp("fleet")) as made:
            made.add_toy(
                "a",
                gpu_memory=CLAIM,
                instances={"min": 2, "max": 2},
                flags=["--policy=freeness"],
            )
            made.until("models/a", serving=2)
            yield made


@pytest.fixture(scope="module")
def prometheus(
    fleet: ToyFleet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrometheusServer]:
    rules = rules_of(QUICK)
    usual = {"name": "kvmig-recorded-as-usual", "rules": recorded_rules(AlertTimes())}
    rules["groups"].append(usual)
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus_of(folder, f"127.0.0.1:{fleet.port}", fleet.key, rules) as made:
        wait_until(lambda: made.samples('up{job="kvmig"} == 1'))
        yield made


def key_of(fleet: ToyFleet, user: str, **limits: Any) -> str:
    """A key of a new user."""
    fleet.ask("POST", "users", {"name": user}).raise_for_status()
    answer = fleet.ask("POST", "keys", {"user": user, **limits})
    answer.raise_for_status()
    return str(answer.json()["key"])


def call(fleet: ToyFleet, body: dict[str, Any], key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key or fleet.key}"}
    return httpx.post(f"{fleet.url}{PATH}", json=body, headers=headers, timeout=SERVER_PATIENCE_S)


def move_all(fleet: ToyFleet) -> None:
    """Move each stream of model a that there is now."""
    for one in fleet.get("live")["streams"]:
        if one["model"] == "a":
            fleet.ask("POST", "live/move", {"model": "a", "request_id": one["row"]["id"]})


@contextmanager
def load_of(fleet: ToyFleet) -> Iterator[None]:
    """Calls of two models, one of which starts for each of them; streams that move; 429s."""
    fleet.add_toy("z", gpu_memory=CLAIM, instances={"zero_after_s": 0.5})
    bea, small = key_of(fleet, "bea", quota=10**6), key_of(fleet, "small", rpm=1)
    over = threading.Event()

    def calling(model: str, key: str, pause_s: float, tokens: int) -> None:
        while not over.wait(pause_s):
            with suppress(httpx.HTTPError):
                call(fleet, ask(model, tokens), key)

    def moving() -> None:
        while not over.wait(0.5):
            move_all(fleet)

    threads = [
        threading.Thread(target=calling, args=words, daemon=True)
        for words in (
            ("a", bea, 0.1, 400), ("a", bea, 0.1, 400), ("a", small, 0.5, 4), ("z", bea, 5.0, 4),
        )
    ]  # fmt: skip
    threads.append(threading.Thread(target=moving, daemon=True))
    for one in threads:
        one.start()
    try:
        yield
    finally:
        over.set()
        for one in threads:
            one.join(60)
        fleet.ask("DELETE", "models/z").raise_for_status()


def queries() -> list[tuple[str, str]]:
    """The name of a panel and a query of it, as Grafana would ask it."""
    return [
        (
            f"{board.uid}: {panel.title}",
            query.expr.replace("$__rate_interval", "30s")
            .replace("$model", ".*")
            .replace("$worker", ".*"),
        )
        for board in BOARDS
        for panel in board.panels
        for query in panel.queries
    ]


def test_each_panel_has_data_and_no_alert_fires_under_usual_load(
    fleet: ToyFleet, prometheus: PrometheusServer
) -> None:
    with load_of(fleet):
        without = queries()
        deadline = time.monotonic() + 150
        while without and time.monotonic() < deadline:
            time.sleep(1)
            without = [one for one in without if not prometheus.samples(one[1])]
        assert without == []
        fired = {one["metric"]["alertname"] for one in prometheus.samples("ALERTS")}
    assert fired - BURNS == set()  # a busy machine may be slow


@pytest.fixture
def calm(fleet: ToyFleet, prometheus: PrometheusServer) -> Iterator[PrometheusServer]:
    """No alert fires before a scenario."""
    prometheus.wait_calm()
    yield prometheus
    fleet.hold(None)


async def slow_calls(fleet: ToyFleet, script: ToyScript) -> None:
    """Calls that stand as the script says for longer than the goal allows."""
    fleet.script.write(script)
    bodies = [ask("a", 10, start=at) for at in range(20, 24)]
    calls = [asyncio.create_task(asyncio.to_thread(call, fleet, body)) for body in bodies]
    await asyncio.sleep(3)
    fleet.hold(None)
    for answer in await asyncio.gather(*calls):
        assert answer.status_code == 200


async def test_first_tokens_that_come_late_burn_their_budget(
    fleet: ToyFleet, calm: PrometheusServer
) -> None:
    await asyncio.to_thread(call, fleet, ask("a", 10))
    await slow_calls(fleet, ToyScript(prefill=0))
    await asyncio.to_thread(calm.wait_firing, "KvmigTtftBurnsFast", "KvmigTtftBurnsSlow")
    assert calm.firing() <= BURNS


async def test_tokens_that_come_slowly_burn_their_budget(
    fleet: ToyFleet, calm: PrometheusServer
) -> None:
    await slow_calls(fleet, ToyScript(hold=5))
    await asyncio.to_thread(calm.wait_firing, "KvmigTpotBurnsFast", "KvmigTpotBurnsSlow")
    assert calm.firing() <= {"KvmigTpotBurnsFast", "KvmigTpotBurnsSlow"}


async def test_moves_to_where_no_block_is_free_are_aborted(
    fleet: ToyFleet, calm: PrometheusServer
) -> None:
    fleet.add_toy(
        "full",
        gpu_memory=CLAIM,
        instances={"min": 2, "max": 2},
        flags=["--policy=freeness", "--num-blocks=6"],
    )
    await until(lambda: fleet.get("models/full")["serving"] == 2, pause_s=0.1)
    bodies = [ask("full", 120, start=at) for at in (30, 40)]
    streams = await hold_streams(fleet, *bodies, tokens=90)
    found = fleet.get("live")["streams"]
    assert {one["row"]["instance"] for one in found} == {"i0", "i1"}
    for _ in range(5):
        order = {"model": "full", "request_id": found[0]["row"]["id"]}
        answer = await asyncio.to_thread(fleet.ask, "POST", "live/move", order)
        assert answer.json()["move"]["reason"] == "no_blocks"
        await asyncio.sleep(1)
    await asyncio.to_thread(calm.wait_firing, "KvmigMovesAborted")
    assert calm.firing() - BURNS == {"KvmigMovesAborted"}
    fleet.hold(None)
    for stream in streams:
        await stream.task
    fleet.ask("DELETE", "models/full").raise_for_status()


def test_an_instance_that_is_stopped_ails(fleet: ToyFleet, calm: PrometheusServer) -> None:
    (stopped,) = fleet.processes("kvmig.launcher.llumlet_main i1 of a ")
    os.kill(stopped, signal.SIGSTOP)
    calm.wait_firing("KvmigInstanceAiling")
    assert calm.firing() - BURNS == {"KvmigInstanceAiling"}
    with suppress(ProcessLookupError):  # it was killed and started again meanwhile
        os.kill(stopped, signal.SIGCONT)
    fleet.until("models/a", serving=2)


def test_a_model_that_does_not_start_has_failed(
    fleet: ToyFleet, calm: PrometheusServer, tmp_path: Path
) -> None:
    file = tmp_path / "script"
    ScriptFile(str(file)).write(ToyScript(load=False))
    fleet.add(
        {
            "name": "never",
            "source": "path:/toy",
            "engine": "toy",
            "gpu_memory": CLAIM,
            "flags": [f"--script={file}"],
            "instances": {"start_timeout_s": 1},
        }
    )
    fleet.ask("POST", "models/never/wake").raise_for_status()
    calm.wait_firing("KvmigModelFailed")
    assert calm.firing() == {"KvmigModelFailed"}
    fleet.ask("DELETE", "models/never").raise_for_status()


async def test_a_model_that_nothing_has_room_for_waits(
    fleet: ToyFleet, calm: PrometheusServer
) -> None:
    streams = await hold_streams(fleet, ask("a", 20), ask("a", 20, start=50))
    fleet.add_toy("large", gpu_memory=SIZE - GIB, gpus_per_instance=2)
    calling = asyncio.create_task(asyncio.to_thread(call, fleet, ask("large")))
    await asyncio.to_thread(calm.wait_firing, "KvmigNoRoom")
    assert calm.firing() - BURNS == {"KvmigNoRoom"}
    fleet.ask("DELETE", "models/large").raise_for_status()
    fleet.hold(None)
    await calling
    for stream in streams:
        await stream.task


def test_a_quota_that_is_nearly_used_up_is_named(fleet: ToyFleet, calm: PrometheusServer) -> None:
    key = key_of(fleet, "carl", quota=400)
    assert call(fleet, ask("a", 370), key).status_code == 200
    calm.wait_firing("KvmigQuotaNearEnd")
    (alert,) = calm.samples('ALERTS{alertname="KvmigQuotaNearEnd"}')
    assert alert["metric"]["kind"] == "key"
    assert calm.firing() - BURNS == {"KvmigQuotaNearEnd"}
    fleet.ask("DELETE", f"keys/{alert['metric']['name']}").raise_for_status()


def test_a_database_that_is_locked_leaves_the_ledger_behind(
    fleet: ToyFleet, calm: PrometheusServer
) -> None:
    (file,) = fleet.folder.glob("*.sqlite")
    with closing(sqlite3.connect(file, timeout=30, isolation_level=None)) as locking:
        locking.execute("BEGIN EXCLUSIVE")
        call(fleet, ask("a", 10))
        calm.wait_firing("KvmigUsageBehind")
        assert calm.firing() - BURNS == {"KvmigUsageBehind"}
        locking.execute("ROLLBACK")


def test_a_driver_that_answers_what_nobody_foresaw_is_a_fault_of_the_rounds(
    fleet: ToyFleet, machine: FakeMachine, calm: PrometheusServer
) -> None:
    with machine.answering_nonsense():
        calm.wait_firing("KvmigRoundFaults")
        assert calm.firing() - BURNS == {"KvmigRoundFaults"}
        (alert,) = calm.samples('ALERTS{alertname="KvmigRoundFaults", alertstate="firing"}')
        assert alert["metric"]["part"] == "GPUs"
        assert call(fleet, ask("a", 10)).status_code == 200
    calm.wait_calm()  # once it answers again


def test_a_fleet_that_is_gone_is_a_target_that_is_down(
    fleet: ToyFleet, calm: PrometheusServer
) -> None:
    fleet.stop()
    calm.wait_firing("KvmigTargetDown")
    assert calm.firing() == {"KvmigTargetDown"}
