"""One cluster, two minors of vLLM: streams move between them, and a rolling upgrade loses none.

The next minor's tree lies beside the installed vLLM (`python scripts/setup_env.py --vllm VERSION`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.served import SMALL, Served
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.e2e.test_serve_moves import CALLS
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.next_vllm import next_tree
from tests.support.streams import (
    Stream,
    count_from,
    counted,
    run_moved,
    run_unmoved,
    start_stream,
    until_said,
)

pytestmark = pytest.mark.server

PATH = "/v1/completions"
STREAMS = 3


@pytest.fixture(scope="module")
def tree() -> str:
    """The next minor's folder."""
    return next_tree()


@contextmanager
def two(nursery: Nursery, folder: Path, *flags: str) -> Iterator[Served]:
    own = (*SMALL, *PATIENT, NEVER_BY_ITSELF, "--instances=2", "--max-num-seqs=24", *flags)
    with leaving_nothing(
        Served(own, nursery=nursery, log=folder / "log"), no_traceback=True
    ) as served:
        yield served


@pytest.fixture(scope="module")
def mixed(
    tree: str, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """i0 is the installed vLLM, i1 the next minor."""
    folder = tmp_path_factory.mktemp("mixed")
    with two(nursery, folder, f"--instance-vllm=i1: {tree}") as served:
        yield served


@pytest.fixture(scope="module")
def installed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Both are the installed vLLM, until they are upgraded."""
    with two(nursery, tmp_path_factory.mktemp("installed")) as served:
        yield served


def builds(served: Served) -> dict[str, str]:
    """Each instance's vLLM."""
    return {row["id"]: row["vllm"] for row in served.get("instances")}


async def restart(served: Served, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=served.url, verify=False) as client:
        return await client.post("/kvmig/v1/instances/restart", json=body)


@pytest.mark.long  # the rolling upgrade below moves streams, too
@pytest.mark.parametrize("kind", CALLS)
async def test_a_call_moved_to_the_other_minor_and_back_equals_the_one_left_alone(
    mixed: Served, tree: str, kind: str
) -> None:
    assert builds(mixed) == {"i0": "", "i1": tree}
    path, body = CALLS[kind]
    unmoved = await run_unmoved(mixed, path, body)

    moved, reports = await run_moved(mixed, path, body)

    assert [(one["state"], one["exact"]) for one in reports] == [("committed", True)] * len(reports)
    assert len(reports) == 2 * len(moved.choices)
    moved.same_as(unmoved)


@pytest.mark.long  # tests/frontend/test_rolling_restart.py has it without vLLM
async def test_a_vllm_that_does_not_start_leaves_the_cluster_as_it_was(
    mixed: Served, tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('torn')\n")
    (tmp_path / "vllm-0.33.9.dist-info").mkdir()
    (tmp_path / "vllm-0.33.9.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.33.9\n")
    before = builds(mixed)
    stream = await start_stream(mixed, count_from(0, 400), 5)

    answer = await restart(mixed, vllm=str(tmp_path), instances=["i0"])

    assert answer.status_code == 202, answer.text
    await until_said(mixed, "rolling restart: stopped at instance i0 (it can't be the engine in")
    while {row["state"] for row in mixed.get("instances")} != {"serving"}:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    assert builds(mixed) == before
    counted(await stream.end(), 0)


@pytest.mark.parametrize(
    ("folder", "why"),
    [("/nowhere", "holds no vLLM, must be a folder with the package vllm"), (".", "holds no vLLM")],
)
async def test_a_folder_without_a_vllm_is_refused_and_nothing_is_drained(
    installed: Served, folder: str, why: str
) -> None:
    answer = await restart(installed, vllm=folder)

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"vllm is '{folder}' {why}")
    assert {row["state"] for row in installed.get("instances")} == {"serving"}


@pytest.mark.long  # tests/frontend/test_rolling_restart.py has it without vLLM
async def test_a_rolling_upgrade_under_streams_loses_none(installed: Served, tree: str) -> None:
    upgraded = asyncio.Event()
    ended: Counter[int] = Counter()

    async def client(number: int) -> None:
        """One stream after the other, each counted to its end."""
        while not upgraded.is_set() or not ended[number]:
            stream = Stream(installed, PATH, count_from(100 * number, 1000))
            counted(await stream.end(), 100 * number)
            ended[number] += 1

    async with asyncio.TaskGroup() as clients:
        for number in range(STREAMS):
            clients.create_task(client(number))
        answer = await restart(installed, vllm=tree)
        assert answer.status_code == 202, answer.text
        await until_said(installed, "rolling restart: done")
        upgraded.set()

    assert builds(installed) == {"i0": tree, "i1": tree}
    assert len(ended) == STREAMS
    moves = installed.get("migrations?limit=1000")
    away = [one for one in moves if one["why"] == "drain" and one["source"] == "i1"]
    assert any(one["state"] == "committed" and one["exact"] for one in away), moves
    await asyncio.to_thread(assert_server_is_empty, installed)
