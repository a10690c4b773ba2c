"""Orders about workers over HTTP: they are refused where a worker has changed since."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI

from kvmig.fleet.api import STATUS, answer_with
from kvmig.fleet.api_paths import PREFIX
from kvmig.fleet.store import FleetStore
from kvmig.fleet.workers_api import FleetWorkers, workers_api
from tests.support.fleet_stores import ANNA
from tests.support.made_up_nodes import made_up_node
from tests.support.worker_bench import WorkerBench


@pytest.fixture
async def http(store: FleetStore, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    bench = WorkerBench(tmp_path)
    bench.see(made_up_node("a"))

    async def stored(call: Any, *args: Any, **kw: Any) -> Any:
        return call(*args, **kw)

    app = FastAPI()
    for kind, status in STATUS.items():
        app.add_exception_handler(kind, answer_with(status))
    workers = FleetWorkers(bench.models, stored, store, lambda: bench.now)
    app.include_router(workers_api(workers, Depends(lambda: ANNA)))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://x{PREFIX}") as client:
        yield client
    await bench.models.close()


PLAIN = {"labels": {}, "cordoned": False, "draining": False}
"""A worker of which nothing is wanted."""


@pytest.mark.parametrize(
    ("other", "body", "changed"),
    [
        ("labels", {"labels": {"zone": "b"}}, 'labels {} became {"zone": "b"}'),
        ("cordon", None, "cordoned false became true"),
        ("drain", None, "draining false became true"),
    ],
)
@pytest.mark.parametrize("order", ["labels", "cordon", "uncordon", "drain"])
async def test_an_order_about_a_worker_that_somebody_has_changed_since_is_refused(
    http: httpx.AsyncClient, other: str, body: Any, changed: str, order: str
) -> None:
    assert (await http.post(f"/workers/worker-a/{other}", json=body)).status_code == 200
    before = (await http.get("/workers/worker-a")).json()
    own = {"labels": {"zone": "a"}} if order == "labels" else {}
    refused = await http.post(f"/workers/worker-a/{order}", json=own | {"based_on": PLAIN})
    sentence = refused.json()["error"]["message"]
    assert (refused.status_code, changed in sentence) == (409, True), sentence
    assert sentence.startswith("worker worker-a: ")
    assert (await http.get("/workers/worker-a")).json() == before
    now = {
        "labels": before["labels"],
        "cordoned": before["cordoned"],
        "draining": before["drain"] is not None,
    }
    done = await http.post(f"/workers/worker-a/{order}", json=own | {"based_on": now})
    assert done.status_code == 200, done.text


async def test_only_what_is_named_of_a_worker_is_compared(http: httpx.AsyncClient) -> None:
    assert (await http.post("/workers/worker-a/cordon")).status_code == 200
    body = {"labels": {"zone": "a"}, "based_on": {"labels": {}}}
    assert (await http.post("/workers/worker-a/labels", json=body)).status_code == 200
    assert (await http.post("/workers/worker-a/labels", json=body)).status_code == 409
    refused = await http.post("/workers/worker-a/cordon", json={"based_on": {"state": "ready"}})
    assert refused.status_code == 422
