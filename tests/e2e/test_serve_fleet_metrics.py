"""One /metrics of a fleet of toys."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmig.fleet.metrics import CACHE_S
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.fleets import ToyFleet, answer, ask, hold_streams, kill
from tests.support.waiting import until

pytestmark = pytest.mark.server


async def shown(fleet: ToyFleet) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and values of all samples by name."""
    async with fleet.client() as client:
        text = await client.get("/metrics")
    assert text.status_code == 200, text.text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text.text):
        assert family.name not in found
        for one in family.samples:
            found.setdefault(one.name, []).append((dict(one.labels), one.value))
    return found


def value(found: list[tuple[dict[str, str], float]], **labels: str) -> float:
    return next(is_ for has, is_ in found if labels.items() <= has.items())


async def call_both(fleet: ToyFleet, models: str) -> None:
    """Models a and b, and a call for each letter."""
    fleet.add_toy("a")
    fleet.add_toy("b")
    async with fleet.client() as client:
        for model in models:
            await answer(client, ask(model, 10))


async def test_all_models_are_in_one_text_by_their_names(fleet: ToyFleet) -> None:
    await call_both(fleet, "aab")
    await asyncio.sleep(3)  # proxies tell theirs now and then, usage is merged
    found = await shown(fleet)
    for model, calls in (("a", 2), ("b", 1)):
        assert value(found["kvmig_instance_running"], model=model) == 0
        assert value(found["kvmig_model_state"], model=model, state="serving") == 1
        assert value(found["kvmig_proxy_requests_total"], model=model, status="200") >= calls
        assert value(found["kvmig_usage_tokens_total"], model=model, kind="output") >= 10 * calls
        assert value(found["kvmig_claim_bytes"], model=model) > 0
    assert "kvmig_scrapes_missed_total" not in found


async def test_a_deployment_that_is_stopped_costs_its_own_part_only(fleet: ToyFleet) -> None:
    await call_both(fleet, "ab")
    (stopped,) = fleet.processes("kvmig.frontend.process_main of b ")
    os.kill(stopped, signal.SIGSTOP)
    await asyncio.sleep(CACHE_S)
    try:
        found = await shown(fleet)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert {labels["model"] for labels, _ in found["kvmig_instance_running"]} == {"a"}
    assert value(found["kvmig_scrapes_missed_total"], model="b") == 1


async def test_without_a_server_a_proxy_tells_its_own(fleet: ToyFleet) -> None:
    fleet.add_toy("a")
    async with fleet.client() as client:
        await answer(client, ask("a", 10))
    (server,) = fleet.processes("kvmig.fleet.server")
    kill(server)
    # Its threads listen until the last one has ended, and break off what they have accepted.
    await until(lambda: not Path(f"/proc/{server}").exists())
    found = await shown(fleet)
    assert value(found["kvmig_proxy_requests_total"], model="a", status="200") >= 1
    assert not any(name.startswith(("kvmig_model_", "kvmig_claim_")) for name in found)
    fleet.until_it_listens()


OF_CALLS = (
    "kvmig_proxy_running", "kvmig_proxy_held", "kvmig_instance_running", "kvmig_instance_waiting",
    "kvmig_instance_blocks_used",
)  # fmt: skip


async def until_counted(fleet: ToyFleet, name: str, calls: float) -> None:
    """Wait until all samples of a gauge are so much together, where the fleet says it at all."""
    async with asyncio.timeout(SERVER_PATIENCE_S):
        while True:
            with contextlib.suppress(httpx.HTTPError):  # no proxy is there
                if sum(is_ for _, is_ in (await shown(fleet)).get(name, [])) == calls:
                    return
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("gone", ["kvmig.proxy", "kvmig.frontend.process_main", "kvmig.serve"])
async def test_of_a_process_that_is_killed_no_gauge_counts_a_call(
    fleet: ToyFleet, gone: str
) -> None:
    fleet.add_toy("a")
    (stream,) = await hold_streams(fleet, ask("a", 40))
    await until_counted(fleet, "kvmig_proxy_running", 1)
    await until_counted(fleet, "kvmig_instance_running", 1)
    for pid in fleet.processes(gone):
        kill(pid)
    await asyncio.wait([stream.task])
    stream.task.exception()  # its proxy's end is one
    for name in OF_CALLS:
        await until_counted(fleet, name, 0)
    # A proxy that isn't there again after 3 s knows no model that is added then.
    await until(lambda: fleet.get("status")["proxies"] == 1)


async def test_of_a_model_that_is_removed_no_gauge_is_left(fleet: ToyFleet) -> None:
    fleet.add_toy("gone")
    async with fleet.client() as client:
        await answer(client, ask("gone", 10))
    async with asyncio.timeout(SERVER_PATIENCE_S):
        while not await gauges_of(fleet, "gone"):  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.2)
    fleet.ask("DELETE", "models/gone")
    async with asyncio.timeout(SERVER_PATIENCE_S):
        while await gauges_of(fleet, "gone"):  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.2)


async def gauges_of(fleet: ToyFleet, model: str) -> list[str]:
    """Names of all that is shown of a model and that isn't counted up."""
    counted_up = ("_total", "_created", "_bucket", "_sum", "_count")
    return [
        name
        for name, found in (await shown(fleet)).items()
        if not name.endswith(counted_up)
        and any(labels.get("model") == model for labels, _ in found)
    ]
