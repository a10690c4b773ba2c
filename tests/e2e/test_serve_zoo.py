"""The families that people serve, behind `python -m kvmig.serve` with no flag of kvmig's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.streams import place, run_moved, run_unmoved, start_streams
from tests.support.zoo import FAMILIES, SERVING_FLAGS, make

# In each check tests/engines/vllm/test_zoo.py moves requests of three of them.
pytestmark = [pytest.mark.server, pytest.mark.long]

VLLMS = (
    "--enforce-eager",
    "--kv-cache-memory-bytes=1g",
    "--max-model-len=1216",
    "--max-num-seqs=8",
)
"""So that it starts quickly; all of them are vLLM's."""
TOKENS = {"mamba2": 1000}
"""Of a stream that moves there and back, where 200 are over before."""
PATH = "/v1/completions"


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest,
    nursery: Nursery,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("zoo")
    flags = [*VLLMS, *SERVING_FLAGS.get(request.param, ())]
    model = make(request.param, folder)
    with leaving_nothing(
        Served(flags, model=model, nursery=nursery, log=folder / "log"), no_traceback=True
    ) as served:
        yield served


@pytest.fixture
def served(family: Served) -> Iterator[Served]:
    yield family
    assert_server_is_empty(family)


def body(prompt: str, tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"temperature": 0.9, "seed": 7}, id="seeded"),
    ],
)
async def test_a_stream_moved_there_and_back_equals_one_left_alone(
    served: Served, fields: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    family = request.node.callspec.params["family"]
    wanted = body("There was once", TOKENS.get(family, 200), logprobs=1, **fields)
    unmoved = await run_unmoved(served, PATH, wanted)

    moved, reports = await run_moved(served, PATH, wanted)

    assert [report["state"] for report in reports] == ["committed"] * 2, reports
    moved.same_as(unmoved)
    assert unmoved.tokens == wanted["max_tokens"]
    assert unmoved.choices[0].text


async def test_an_instance_that_is_drained_hands_over_its_eight_streams(served: Served) -> None:
    """What they say depends on their batches; that nothing is lost doesn't."""
    async with httpx.AsyncClient(base_url=f"{served.url}/kvmig/v1/", verify=False) as http:
        assert (await http.post("instances/i1/drain")).status_code == 202
        streams = await start_streams(
            served, [body(f"{n} There was once", 250) for n in range(8)], 2
        )
        for stream in streams:
            await place(served, stream, "i0")
        assert (await http.delete("instances/i1/drain")).status_code == 200

        assert (await http.post("instances/i0/drain")).status_code == 202
        deadline = time.monotonic() + SERVER_PATIENCE_S
        detail = ""
        while not detail.startswith("it is empty"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
            detail = (await http.get("instances")).json()["data"][0]["detail"]
        assert not any(stream.task.done() for stream in streams)
        assert (await http.delete("instances/i0/drain")).status_code == 200

    for stream in streams:
        answer = await stream.end()
        assert (answer.tokens, answer.choices[0].finish_reason) == (250, "length")
