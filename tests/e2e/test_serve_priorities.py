"""Priority classes: who runs first, who gives way, who is refused when too many
wait, and what /metrics says of it.

Two batch slots an instance, and blocks for one and a half of the longest requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.conftest import PATIENT
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.streams import Stream, count_from, place, row_of, run_unmoved
from tests.support.toys import Toys

pytestmark = pytest.mark.server

PATH = "/v1/completions"
BLOCKS = 100
TOKENS = 60
HELD = 20
"""Where streams wait for the test."""
CLASSES = ("--priority-class=high=-10", "--priority-class=fast=-20,target=0.001")
MAX_WAITING = 8
"""More than other tests here have in all queues."""
ALLOWED = "must be fast (-20) or high (-10) or normal (0)"


@pytest.fixture(scope="module")
def server(toy_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    flags = [
        f"--num-blocks={BLOCKS}", "--max-num-seqs=2", "--instances=2", *CLASSES, *PATIENT,
        "--policy=kvmig", "--migrate-below=-1000000", "--shutdown-timeout=5",
        f"--max-waiting={MAX_WAITING}",
    ]  # fmt: skip
    with leaving_nothing(
        Toys(flags, tmp_path_factory.mktemp("priorities"), nursery=toy_nursery)
    ) as served:
        yield served


@pytest.fixture
def served(server: Toys) -> Iterator[Toys]:
    yield server
    assert_server_is_empty(server)


def metric(served: Toys, name: str, priority_class: str) -> float:
    """Summed over instances."""
    text = httpx.get(f"{served.url}/metrics", verify=False).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels.get("priority_class") == priority_class
    )


async def until_metric(served: Toys, name: str, priority_class: str, more_than: float) -> None:
    for _ in range(200):
        if await asyncio.to_thread(metric, served, name, priority_class) > more_than:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{name} of {priority_class} stays at {more_than}")


def long_prompt(number: int, tokens: int) -> str:
    """Counts up to `number`."""
    return "Count:" + "".join(f" {n:04d}" for n in range(number - tokens // 5 + 2, number))


async def side_by_side(served: Toys, *bodies: dict[str, Any]) -> list[Stream]:
    """These calls, all on the instance that the first one got; to be held meanwhile."""
    streams = [Stream(served, PATH, bodies[0])]
    row = await row_of(served, streams[0], output_tokens=1)
    for body in bodies[1:]:
        streams.append(Stream(served, PATH, body))
        await place(served, streams[-1], row["instance"])
    return streams


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "ask"),
    [
        (PATH, {"prompt": "1"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]}),
        ("/v1/responses", {"input": "1"}),
    ],
)
def test_an_unknown_priority_is_refused_in_one_sentence(
    served: Toys, path: str, ask: dict[str, Any], stream: bool
) -> None:
    body = {"model": served.model, "stream": stream, **ask}
    with httpx.Client(base_url=served.url, verify=False) as client:
        refused = client.post(path, json={**body, "priority": 7})
        named = client.post(path, json={**body, "priority": "low"})
        by_header = client.post(path, json=body, headers={"X-Vllm-Priority": "7"})
    for answer in (refused, named, by_header):
        assert answer.status_code == 400
    assert refused.json()["error"]["message"] == f"priority is 7, {ALLOWED}"
    assert named.json()["error"]["message"] == f"priority is 'low', {ALLOWED}"
    assert by_header.json()["error"]["message"] == f"x-vllm-priority is 7, {ALLOWED}"


async def test_the_queue_is_served_by_class_whoever_came_first(served: Toys) -> None:
    body = count_from(3000, 40, priority="high", logprobs=1)
    unmoved = await run_unmoved(served, PATH, body)
    with served.held(HELD):
        runs = [Stream(served, PATH, count_from(1000 + n, TOKENS)) for n in range(4)]
        slots = [(await row_of(served, one, output_tokens=1))["instance"] for one in runs]
        queued: dict[str, Stream] = {}
        waiting: list[Stream] = []
        while len(queued) < 2:
            waiting.append(Stream(served, PATH, count_from(2000, 50)))
            at = (await row_of(served, waiting[-1], "waiting"))["instance"]
            queued.setdefault(at, waiting[-1])
        high = Stream(served, PATH, body)
        row = await row_of(served, high, "waiting")
        assert row["priority"] == -10

        await runs[slots.index(row["instance"])].leave()

        await high.reach(1)
        assert queued[row["instance"]].answer.tokens == 0
    (await high.end()).same_as(unmoved)
    await queued[row["instance"]].end()
    for one in (*runs, *waiting):
        await one.leave()


def in_queues(served: Toys) -> int:
    """Requests that wait, on all instances."""
    return sum(row["waiting"] for row in served.get("instances"))


async def refused(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """One call is answered 429, and says when to come again."""
    answer = await http.post(PATH, json=body)
    assert answer.status_code == 429, answer.text
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("RateLimitError", 429)
    assert f"{MAX_WAITING} requests wait for their first token" in error["message"]


async def test_calls_that_are_too_many_are_429_until_those_that_wait_have_begun(
    served: Toys,
) -> None:
    """Streams, calls of several choices and whole answers count for what they are."""
    told = ("kvmig_requests_refused_total", "normal")
    before = metric(served, *told)
    short = {"model": served.model, **count_from(2000, 20)}
    several = {**short, "n": 4, "temperature": 0.9, "seed": 7}
    async with httpx.AsyncClient(
        base_url=served.url, timeout=SERVER_PATIENCE_S, verify=False
    ) as http:
        with served.held(10):
            runs = [Stream(served, PATH, count_from(1000 + n, TOKENS)) for n in range(4)]
            for one in runs:
                await row_of(served, one, output_tokens=1)
            waiting = [Stream(served, PATH, one) for one in (short, short, short, several)]
            whole = asyncio.create_task(http.post(PATH, json=short))
            async with asyncio.timeout(SERVER_PATIENCE_S):
                while in_queues(served) < MAX_WAITING:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

            for body in (short, {**short, "stream": True}, several):
                await refused(http, body)
            high = Stream(served, PATH, {**short, "priority": "high"})
            await row_of(served, high, "waiting")
            assert metric(served, *told) == before + 3

            for one in runs:
                await one.leave()
        assert (await whole).status_code == 200
        answers = [await one.end() for one in (*waiting, high)]
        assert [len(one.choices) for one in answers] == [1, 1, 1, 4, 1]
        assert [one.tokens for one in answers] == [20, 20, 20, 80, 20]
        assert (await http.post(PATH, json=several)).status_code == 200
        assert metric(served, *told) == before + 3


async def test_memory_goes_to_the_class_above_and_both_end_exactly(served: Toys) -> None:
    before = metric(served, "kvmig_preempted_for_priority_total", "normal")
    normal_body = count_from(0, 600, prompt=long_prompt(5000, 1300), temperature=0.9, seed=4)
    high_body = count_from(0, 600, prompt=long_prompt(8000, 1300), priority=-10, logprobs=1)
    undisturbed = [await run_unmoved(served, PATH, one) for one in (normal_body, high_body)]
    with served.held(HELD):
        high, normal = await side_by_side(served, high_body, normal_body)

    (await high.end()).same_as(undisturbed[1])
    (await normal.end()).same_as(undisturbed[0])

    await until_metric(served, "kvmig_preempted_for_priority_total", "normal", before)
    assert metric(served, "kvmig_preempted_for_priority_total", "high") == 0


async def test_a_target_that_no_load_keeps_moves_the_others_away(served: Toys) -> None:
    """The whole instance is headroom of `fast`, as its step times say."""
    kept = metric(served, "kvmig_instance_headroom_blocks", "fast")
    assert kept == pytest.approx(2 * BLOCKS, abs=1.0), "less than a block a request"
    body = count_from(1000, TOKENS, logprobs=1)
    unmoved = await run_unmoved(served, PATH, body)
    before = metric(served, "kvmig_moved_for_priority_total", "normal")
    with served.held(HELD):
        normal, fast = await side_by_side(served, body, count_from(2000, TOKENS, priority="fast"))
        await until_metric(served, "kvmig_moved_for_priority_total", "normal", before)

    reports = await asyncio.to_thread(served.get, "migrations")
    mine = [one for one in reports if normal.answer.request_id in one["request_id"]]
    assert "priority" in {one["why"] for one in mine if one["state"] == "committed"}
    await fast.leave()
    (await normal.end()).same_as(unmoved)


async def test_each_class_has_its_latencies(served: Toys) -> None:
    names = ("kvmig_request_ttft_seconds", "kvmig_request_tpot_seconds", "kvmig_request_seconds")
    before = [metric(served, f"{name}_count", "high") for name in names]
    sums = [metric(served, f"{name}_sum", "high") for name in names]
    begin = time.monotonic()
    await run_unmoved(served, PATH, count_from(1000, 50, priority="high", stop=" 1020"))
    took = time.monotonic() - begin
    for name, count, total in zip(names, before, sums, strict=True):
        assert metric(served, f"{name}_count", "high") == count + 1
        assert 0 < metric(served, f"{name}_sum", "high") - total < took
