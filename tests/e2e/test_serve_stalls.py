"""A model whose vocabulary of 128,256 has a tokenizer of 264: tokens without a text, for thousands
of steps, make neither others wait nor an instance look dead."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.models import LONG, make_checkpoint
from kvmig_tools.nursery import Nursery
from kvmig_tools.served import SMALL, Served
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.streams import Stream

pytestmark = [pytest.mark.server, pytest.mark.long]

PATH = "/v1/completions"
STREAMS = 64
TOKENS = 1000
FLAGS = (
    *SMALL, "--num-gpu-blocks-override=2200", "--max-num-seqs=64", "--max-model-len=4096",
    "--instances=2", "--transport=shm", *PATIENT, NEVER_BY_ITSELF,
)  # fmt: skip


@pytest.fixture
def served(nursery: Nursery, tmp_path: Path) -> Iterator[Served]:
    model = tmp_path / "unknown"
    make_checkpoint(model, LONG)
    with leaving_nothing(
        Served(FLAGS, model=model, nursery=nursery, log=tmp_path / "log")
    ) as served:
        yield served
        assert_server_is_empty(served)


def body(number: int) -> dict[str, Any]:
    return {
        "prompt": [1 + number, 100_000 + number], "max_tokens": TOKENS, "ignore_eos": True,
        "temperature": 1, "seed": number,
    }  # fmt: skip


async def test_tokens_that_no_tokenizer_knows_end_no_request_and_make_no_instance_look_dead(
    served: Served, tmp_path: Path
) -> None:
    streams = [Stream(served, PATH, body(number)) for number in range(STREAMS)]
    answered = 0
    while not all(stream.task.done() for stream in streams):
        rows = await asyncio.to_thread(served.get, "instances")
        assert [row["state"] for row in rows] == ["serving", "serving"]
        answered += 1
        await asyncio.sleep(0.5)
    answers = await asyncio.gather(*(stream.end() for stream in streams))

    assert answered > 1
    assert [answer.tokens for answer in answers] == [TOKENS] * STREAMS
    async with httpx.AsyncClient(verify=False) as client:
        metrics = (await client.get(f"{served.url}/metrics")).text
    for name in ("requests_run_again_total", "instances_missing_total"):
        counts = re.findall(rf"^kvmig_{name}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)
        assert sum(map(float, counts)) == 0, name
    assert "did not answer" not in (tmp_path / "log").read_text()
