"""A vLLM server whose checkpoint is replaced by one that counts down: no stream goes on by it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.models import model_flags
from kvmig.models import BUNDLED
from kvmig_tools.nursery import Nursery
from kvmig_tools.served import SMALL, Served
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.support import count_down
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.streams import (
    Stream,
    StreamFailed,
    count_from,
    counted,
    start_streams,
    until_said,
)

pytestmark = pytest.mark.server

PATH = "/v1/completions"
LONG = 2000
"""Tokens that no stream reaches before the second instance is restarted."""


@pytest.fixture(scope="module")
def replaced(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Path]]:
    """Two instances of a copy of the bundled model, and the folder."""
    folder = tmp_path_factory.mktemp("weights")
    model = folder / "model"
    shutil.copytree(BUNDLED, model)
    flags = [*SMALL, *PATIENT, NEVER_BY_ITSELF, "--instances=2", "--heartbeat-timeout=20"]
    flags += model_flags("device20ms")
    with leaving_nothing(
        Served(flags, model=model, nursery=nursery, log=folder / "log"), no_traceback=True
    ) as served:
        yield served, model


@pytest.mark.long  # tests/e2e/test_serve_versions.py has it on toys
async def test_a_rolling_restart_onto_other_weights_continues_no_stream_by_them(
    replaced: tuple[Served, Path],
) -> None:
    served, model = replaced
    rows = await asyncio.to_thread(served.get, "instances")
    (before,) = {row["weights"] for row in rows}
    streams = await start_streams(served, [count_from(1000 * n, LONG) for n in range(2)], 20)
    count_down.replace_weights(model)

    async with httpx.AsyncClient(base_url=served.url, verify=False) as client:
        answer = await client.post("/kvmig/v1/instances/restart", json={"deadline_s": 1})
        assert answer.status_code == 202, answer.text
    ends = await asyncio.gather(*(one.end() for one in streams), return_exceptions=True)
    await until_said(served, "rolling restart: done")
    new = Stream(served, PATH, {**count_from(0, 100), "prompt": "Count: 5001 5000"})
    end = await new.end()

    for n, stream in enumerate(streams):
        counted(stream.answer, 1000 * n)
    failed = [one for one in ends if isinstance(one, BaseException)]
    assert failed, "the second restart's deadline has ended none: LONG is too short"
    for error in failed:
        assert isinstance(error, StreamFailed)
        assert f"the weights that the request began with ({before})" in str(error)
    counted(end, 4999, by=-1)
    rows = await asyncio.to_thread(served.get, "instances")
    (after,) = {row["weights"] for row in rows}
    assert after != before
    await asyncio.to_thread(assert_server_is_empty, served)
