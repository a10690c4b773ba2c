"""Metrics of many processes as one text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmig.fleet import metrics
from kvmig.fleet.controller import ModelController
from kvmig.fleet.host_memory import MemoryBudget
from kvmig.fleet.managed_model import CatalogEntry, DeploymentRecord, ManagedModel
from kvmig.fleet.metrics import FleetMetrics, of_workers
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.tables import StoreError
from kvmig.fleet.workers import FleetWorker
from kvmig.proxy.exposition import merged, parsed

STEPS = """# HELP steps_total Steps.
# TYPE steps_total counter
steps_total{engine="0"} 3.0
"""
SECONDS = """# HELP step_seconds Time.
# TYPE step_seconds histogram
step_seconds_bucket{le="1.0"} 2.0
step_seconds_bucket{le="+Inf"} 3.0
step_seconds_count 3.0
step_seconds_sum 4.5
"""


def test_what_a_family_is_stands_there_once_before_the_samples_of_all() -> None:
    text = merged([parsed(({"model": name}, STEPS + SECONDS)) for name in "ab"]).decode()
    for line in ("# HELP steps_total Steps.", "# TYPE step_seconds histogram"):
        assert text.count(line) == 1
    for name in "ab":
        assert f'steps_total{{engine="0",model="{name}"}} 3.0' in text
        assert f'step_seconds_bucket{{le="+Inf",model="{name}"}} 3.0' in text
    names = [family.name for family in text_string_to_metric_families(text)]
    assert len(names) == len(set(names))


def test_a_family_of_two_types_is_untyped_and_loses_nothing() -> None:
    other = STEPS.replace("counter", "gauge").replace("3.0", "4.0")
    text = merged([parsed(({"model": "a"}, STEPS)), parsed(({"model": "b"}, other))]).decode()
    assert 'steps_total{engine="0",model="a"} 3.0' in text
    assert 'steps_total{engine="0",model="b"} 4.0' in text


def test_what_is_no_such_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        merged([parsed(({}, "steps_total many\n"))])


class Serving(ModelController):
    """Two models, each with a socket."""

    def __init__(self, folder: Path) -> None:
        settings = FleetSettings(data=str(folder))
        super().__init__(settings, lambda _: None, lambda _, __: 0, MemoryBudget())
        self.found = [made(name, str(folder / name)) for name in "ab"]

    def fronts(self) -> list[ManagedModel]:
        return self.found

    def claimed_by(self, name: str) -> int:
        return 7


class Ready(ManagedModel):
    serving = 1


def made(name: str, socket: str) -> ManagedModel:
    spec = ModelSpec(name=name, source="path:/toy", engine="toy")
    model = Ready(
        CatalogEntry(name, name, 1, True, spec), note=DeploymentRecord(name, name, 1, socket)
    )
    model.scaled["up", "load"] += 2
    return model


async def none_used(_: str) -> Sequence[Any]:
    return ()


async def answering(path: Path, text: str, asked: list[str]) -> asyncio.Server:
    """A deployment; with an empty text it never answers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode().splitlines()[0])
        if text:
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
            writer.write((head + text).encode())
            writer.close()
        else:
            await reader.read()  # until the client has gone
            writer.close()

    return await asyncio.start_unix_server(serve, path)


async def test_a_deployment_that_does_not_answer_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "SCRAPE_S", 0.2)
    asked: list[str] = []
    async with (
        await answering(tmp_path / "a", STEPS, asked),
        await answering(tmp_path / "b", "", []),
    ):
        made = FleetMetrics(Serving(tmp_path), lambda: (), none_used)
        text = (await made.text()).decode()
    assert asked == ["GET /metrics HTTP/1.1"]
    assert 'steps_total{engine="0",model="a"} 3.0' in text
    assert 'model="b"} 3.0' not in text
    assert 'kvmig_scrapes_missed_total{model="b"} 1.0' in text
    assert 'kvmig_autoscaler_decisions_total{model="a",reason="load",way="up"} 2.0' in text
    assert 'kvmig_model_state{model="a",state="zero"} 1.0' in text


async def test_a_text_is_good_for_a_while_whoever_asks(tmp_path: Path) -> None:
    asked: list[str] = []
    now = 0.0
    models = Serving(tmp_path)
    del models.found[1]
    async with await answering(tmp_path / "a", STEPS, asked):
        made = FleetMetrics(models, lambda: (), none_used, lambda: now)
        await asyncio.gather(*(made.text() for _ in range(5)))
        assert len(asked) == 1
        now = metrics.CACHE_S
        await made.text()
        assert len(asked) == 2


async def test_without_the_database_there_is_no_usage_but_all_the_rest(tmp_path: Path) -> None:
    async def locked(_: str) -> Sequence[Any]:
        raise StoreError("the database is locked")

    models = Serving(tmp_path)
    models.found.clear()
    proxies = ('kvmig_proxy_running{model="a",proxy="0"} 2.0\n',)
    made = FleetMetrics(models, lambda: proxies, locked, free=lambda: {"data": 5})
    text = (await made.text()).decode()
    assert 'kvmig_disk_free_bytes{of="data"} 5.0' in text
    assert 'kvmig_proxy_running{model="a",proxy="0"} 2.0' in text


async def test_a_database_that_does_not_answer_is_asked_once_and_keeps_no_text_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "USAGE_S", 0.01)
    unlocked, asked, now = asyncio.Event(), [], 0.0

    async def used(field: str) -> Sequence[Any]:
        asked.append(field)
        await unlocked.wait()
        return [{field: "a", "calls": 2, "prompt": 10, "output": 20}]

    models = Serving(tmp_path)
    models.found.clear()
    made = FleetMetrics(models, lambda: (), used, lambda: now, behind_s=lambda: 9.0)
    for _ in range(3):
        text = (await made.text()).decode()
        assert "kvmig_usage_behind_seconds 9.0" in text
        assert "kvmig_usage_calls_total{" not in text
        now += metrics.CACHE_S
    assert sorted(asked) == ["model", "user"]
    unlocked.set()
    assert 'kvmig_usage_calls_total{model="a"} 2.0' in (await made.text()).decode()


async def test_usage_is_told_by_model(tmp_path: Path) -> None:
    async def used(field: str) -> Sequence[Any]:
        return [{field: "a", "calls": 2, "prompt": 10, "output": 20}]

    models = Serving(tmp_path)
    models.found.clear()
    text = (await FleetMetrics(models, lambda: (), used).text()).decode()
    assert 'kvmig_usage_tokens_total{kind="output",model="a"} 20.0' in text
    assert 'kvmig_usage_calls_total{model="a"} 2.0' in text
    assert 'kvmig_user_tokens_total{kind="prompt",user="a"} 10.0' in text


def test_a_worker_is_in_one_state_and_a_cordoned_one_takes_no_instances() -> None:
    ready = FleetWorker("a", state="ready")
    state, takes = of_workers([ready, FleetWorker("b", state="ready", cordoned=True)])
    shown = {(one.labels["worker"], one.labels["state"]) for one in state.samples if one.value == 1}
    assert shown == {("a", "ready"), ("b", "ready")}
    assert {one.labels["worker"]: one.value for one in takes.samples} == {"a": 1, "b": 0}
