"""One /metrics of a fleet of toys."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmig.fleet.metrics import CACHE_S
from tests.fleets import ToyFleet, answer, ask, kill

pytestmark = pytest.mark.server


async def shown(fleet: ToyFleet) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and values of all samples by name."""
    async with fleet.client() as client:
        text = await client.get("/metrics")
    assert text.status_code == 200
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text.text):
        assert family.name not in found
        for one in family.samples:
            found.setdefault(one.name, []).append((dict(one.labels), one.value))
    return found


def value(found: list[tuple[dict[str, str], float]], **labels: str) -> float:
    return next(is_ for has, is_ in found if labels.items() <= has.items())


async def test_all_models_are_in_one_text_by_their_names(fleet: ToyFleet) -> None:
    fleet.add_toy("a")
    fleet.add_toy("b")
    async with fleet.client() as client:
        for model in "aab":
            await answer(client, ask(model, 10))
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
    fleet.add_toy("a")
    fleet.add_toy("b")
    async with fleet.client() as client:
        for model in "ab":
            await answer(client, ask(model, 10))
    (stopped,) = fleet.processes("kvmig.front_process of b ")
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
    found = await shown(fleet)
    assert value(found["kvmig_proxy_requests_total"], model="a", status="200") >= 1
    fleet.until_it_listens()
