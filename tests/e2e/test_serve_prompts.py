"""Prompts are computed at i0, set apart for them, and decoded at i1: exact, whoever is killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvmig.engines.toy.script import ToyScript
from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.support.leaks import Footprint, assert_server_is_empty, leaving_nothing
from tests.support.streams import Stream, counted
from tests.support.toys import Toys
from tests.support.waiting import until_yes

pytestmark = pytest.mark.server

BLOCK = 32
NUMBERS = 300
"""In a prompt: 1,506 tokens, 47 blocks, 24 chunks."""
AT = 20 * BLOCK
"""Tokens of a prompt after which a test stops it."""
TOKENS = 40
LEASE = ("--reply-timeout-ms=3000", "--lease-ms=6000")
"""A killed source's reservation is free again before a test looks for it."""


@pytest.fixture(scope="module")
def server(toy_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    flags = [
        "--instances=2", "--prompt-instances=i0", f"--block-size={BLOCK}", "--num-blocks=140",
        *LEASE, "--shutdown-timeout=5",
    ]  # fmt: skip
    with leaving_nothing(
        Toys(flags, tmp_path_factory.mktemp("prompts"), nursery=toy_nursery)
    ) as served:
        yield served


@pytest.fixture
def served(server: Toys) -> Iterator[Toys]:
    wait_for_both(server)
    yield server
    server.play(ToyScript())
    assert_server_is_empty(server)


def wait_for_both(server: Served) -> None:
    """Until both instances serve."""

    async def both() -> None:
        await until_yes(lambda: states(server) == {"i0": "serving", "i1": "serving"})

    asyncio.run(both())


def states(server: Served) -> dict[str, str]:
    return {row["id"]: row["state"] for row in server.get("instances")}


def prompt_to(number: int, numbers: int = NUMBERS) -> str:
    """That counts up to the number after this one, which `counted` goes on from."""
    return "Count:" + "".join(f" {n:04d}" for n in range(number + 2 - numbers, number + 2))


def begin(served: Served, number: int, numbers: int = NUMBERS, **fields: Any) -> Stream:
    body = {"prompt": prompt_to(number, numbers), "max_tokens": TOKENS, "ignore_eos": True}
    return Stream(served, "/v1/completions", {**body, "temperature": 0, **fields})


async def handed_over(served: Served, stream: Stream) -> dict[str, Any]:
    """The report of the migration that brought it to where it decodes, once there is one."""
    name, ends = stream.answer.request_id, list[str]()

    def committed() -> dict[str, Any] | None:
        rows = [one for one in served.get("migrations") if name in one["request_id"]]
        ends[:] = [f"{one['state']} {one['reason']} {one['detail']}" for one in rows]
        return next((one for one in rows if one["state"] == "committed"), None)

    deadline = time.monotonic() + SERVER_PATIENCE_S
    while (found := await asyncio.to_thread(committed)) is None:
        assert time.monotonic() < deadline, ends
        await asyncio.sleep(0.05)
    return found


async def is_moving(served: Served) -> None:
    """Wait until i1 has room for a prompt that i0 computes."""

    def coming() -> bool:
        (row,) = [one for one in served.get("instances") if one["id"] == "i1"]
        return bool(row["migrations_in"] and row["blocks_used"])

    await until_yes(coming)


async def test_a_prompts_chunks_travel_and_it_is_decoded_elsewhere(served: Toys) -> None:
    served.play(ToyScript(prefill=AT))
    stream = begin(served, 2000)
    await is_moving(served)  # its prompt isn't computed yet
    assert stream.answer.tokens == 0
    served.play(ToyScript(hold=1))  # and no more than one token at either
    report = await handed_over(served, stream)
    served.play(ToyScript())
    counted(await stream.end(), 2000)
    assert (report["state"], report["why"], report["source"]) == ("committed", "prompt", "i0"), (
        report
    )
    assert report["output_tokens"] == 1
    assert report["stages"][0]["blocks"] == AT // BLOCK
    blocks = sum(stage["blocks"] for stage in report["stages"]) + report["tail_blocks"]
    assert blocks == -(-len(prompt_to(2000)) // BLOCK)


async def test_several_prompts_are_handed_over_one_after_the_other(served: Toys) -> None:
    numbers = range(1000, 9000, 1000)
    streams = {number: begin(served, number, 60) for number in numbers}
    for number, stream in streams.items():
        counted(await stream.end(), number)


async def test_a_short_prompt_is_computed_where_it_is_decoded(served: Toys) -> None:
    served.play(ToyScript(hold=5))
    stream = begin(served, 3000, 20)
    await stream.reach(5)
    rows = await asyncio.to_thread(served.get, "requests")
    assert [row["instance"] for row in rows] == ["i1"]
    served.play(ToyScript())
    counted(await stream.end(), 3000)


@pytest.mark.parametrize("killed", ["i0", "i1"])
async def test_either_end_is_killed_in_the_middle_of_a_prompt(served: Toys, killed: str) -> None:
    served.play(ToyScript(prefill=AT))
    stream = begin(served, 4000)
    await is_moving(served)
    llumlets = await asyncio.to_thread(lambda: Footprint.of(served).llumlets())
    llumlets[killed].kill()
    await until_yes(lambda: states(served)[killed] != "serving")
    served.play(ToyScript())
    counted(await stream.end(), 4000)


async def test_a_client_that_leaves_in_the_middle_of_its_prompt_leaves_nothing(
    served: Toys,
) -> None:
    served.play(ToyScript(prefill=AT))
    stream = begin(served, 5000)
    await is_moving(served)
    await stream.leave()
    await asyncio.to_thread(assert_server_is_empty, served)
