"""The transformers engine where the conformance suite can't go: tight caches and log-probabilities.

Its engines are small on purpose, so that requests wait, are preempted, and stand in each other's
way; all tests share two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from transformers.generation.continuous_batching.requests import RequestState as State

from kvmig.engines.transformers import factory
from tests.support.transformers_bench import Bench, benched

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PROMPT = list(b"101 102 103 104 105 106 107")
OTHER = list(b"901 902 903 904 905 906 907")


class TightBench(Bench):
    """Two engines of 12 blocks of 16 tokens, four requests a step."""

    def __init__(self) -> None:
        tight = {"num_blocks": 12, "max_batch_tokens": 16, "max_batch_requests": 4}
        super().__init__({name: factory(**tight) for name in "ab"})

    def submit(self, name: str, max_tokens: int = 40, **fields: Any) -> str:
        return self.send(name, PROMPT, max_tokens, **fields)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[TightBench]:
    async with benched(TightBench) as made:
        yield made


SCORED: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"logprobs": 2, "temperature": 1.5, "seed": 5, "top_k": 9, "top_p": 0.95, "min_p": 0.01},
]


@pytest.mark.parametrize("fields", SCORED)
async def test_tokens_and_log_probabilities_go_on_as_if_nothing_had_moved(
    bench: TightBench, fields: dict[str, Any]
) -> None:
    async with bench.migrator() as move:
        stays = bench.submit("a", **fields)
        expected = [(o.token_ids, o.logprobs) for o in await bench.reach(stays, 99)]
        moves = bench.submit("a", **fields)
        await bench.reach(moves, 5)
        assert (await move.migrate(moves, "a", "b")).state == "committed"
        got = [(o.token_ids, o.logprobs) for o in await bench.reach(moves, 99)]
        assert got == expected
        for _, (one,) in got:
            assert len(one.top) == fields["logprobs"]


async def test_a_stop_token_ends_a_moved_request(bench: TightBench) -> None:
    async with bench.migrator() as move:
        tokens = await bench.finish(bench.submit("a"))
        stop = max(tokens, key=tokens.index)  # the one that comes last for the first time
        with bench.slow("a"):
            moves = bench.submit("a", stop_token_ids=[stop])
            await bench.reach(moves, 1)
            report = await move.migrate(moves, "a", "b")
        assert report.state == "committed", (report.reason, report.detail)
        assert await bench.finish(moves) == tokens[: tokens.index(stop) + 1]
        assert bench.got[moves][-1].finish_reason == "stop"


async def test_a_request_that_waits_moves_to_where_it_can_run(bench: TightBench) -> None:
    async with bench.migrator() as move:
        expected = await bench.finish(bench.submit("a", 60))
        with bench.slow("a"):
            big = [bench.submit("a", 60) for _ in range(4)]  # as many as run at once
            await bench.reach(big[3], 1)
            with bench.slow("a", step_s=0.5):  # none of these ends before it has moved
                waits = bench.submit("a", 60)
                states = {one.request_id: one for one in await bench.engines["a"].requests()}
                assert states[waits].state == "waiting"
                assert states[waits].wanted_blocks == 2
                report = await move.migrate(waits, "a", "b")
            assert report.state == "committed", (report.reason, report.detail)
            assert (report.stages, report.output_tokens) == ([], 0), "it had begun to run"
        for request_id in (*big, waits):
            assert await bench.finish(request_id) == expected


async def test_requests_that_are_preempted_while_others_move_get_all_their_tokens(
    bench: TightBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench.migrator() as move:
        # Others than each other's: equal blocks are shared.
        prompts = [
            list(f"{n} {n + 1} {n + 2} {n + 3} {n + 4} {n + 5}".encode())
            for n in range(200, 280, 10)
        ]
        expected = [
            await bench.finish(bench.submit("a", 60, prompt_token_ids=prompt)) for prompt in prompts
        ]
        preempted = [0]
        again = State.create_equivalent_initial_request

        def count(state: State) -> State:
            preempted[0] += 1
            return again(state)

        monkeypatch.setattr(State, "create_equivalent_initial_request", count)
        ids = [bench.submit("a", 60, prompt_token_ids=prompt) for prompt in prompts]
        await bench.reach(ids[0], 3)
        while not all(bench.has_ended(one) for one in ids):
            for request_id in ids:
                await move.migrate(request_id, "a", "b")
                await move.migrate(request_id, "b", "a")
            await asyncio.sleep(0.01)
        assert [await bench.finish(request_id) for request_id in ids] == expected
        assert preempted[0]


async def test_an_engine_whose_blocks_a_migration_holds_waits_for_them(bench: TightBench) -> None:
    """The stock engine would end, for it has a request that it can't go on with."""
    async with bench.migrator():
        a, b = bench.engines["a"], bench.engines["b"]
        expected = await bench.finish(bench.submit("a", 60))
        alone = await bench.finish(bench.submit("a", 60, prompt_token_ids=OTHER))
        donor = bench.submit("a", 60)
        await bench.reach(donor, 2)
        await b.reserve(await a.export(donor))
        await b.grow(donor, 9 * 16)
        starved = bench.submit("b", 60, prompt_token_ids=OTHER)
        fits = 2 * 16 - len(OTHER) + 1
        await bench.reach(starved, fits)
        await asyncio.sleep(0.3)
        assert len(bench.got[starved]) == fits
        await b.cancel(donor)
        await a.resume(donor)
        assert await bench.finish(starved) == alone
        assert await bench.finish(donor) == expected


async def test_a_request_that_fits_nowhere_is_refused_with_the_figures(bench: TightBench) -> None:
    async with bench.migrator():
        refused = {
            "at most 192 fit": bench.submit("a", 500),
            "max_tokens is 0": bench.submit("a", 0),
            "prompt_token_ids is empty": bench.submit("a", prompt_token_ids=[]),
            "temperature is -1.0": bench.submit("a", temperature=-1.0),
            "top_p is 0.0": bench.submit("a", top_p=0.0),
            "logprobs is 21, must be from 0 to 20": bench.submit("a", logprobs=21),
        }
        for sentence, request_id in refused.items():
            (output,) = await bench.reach(request_id, 1)
            assert output.finish_reason == "error"
            assert sentence in output.error
        bench.engines["a"].submit(1, "strange", [b"\x81\xa5top_q\x03"])
        (output,) = await bench.reach("strange", 1)
        assert output.finish_reason == "error"


async def test_a_load_says_what_is_left_of_a_prompt_that_runs(bench: TightBench) -> None:
    """60 tokens in blocks of 16, 16 of them a step."""
    prompt = [30 + number * number % 70 for number in range(60)]
    with bench.prefill_blocks("a") as left:
        await bench.finish(bench.submit("a", 3, prompt_token_ids=prompt))
    assert left[:5] == [3, 2, 1, 0, 0]


async def test_a_destination_without_a_batch_slot_refuses(bench: TightBench) -> None:
    async with bench.migrator() as move:
        busy = [bench.submit("b", 100, prompt_token_ids=PROMPT[:9]) for _ in range(4)]
        for request_id in busy:
            await bench.reach(request_id, 1)
        moves = bench.submit("a", 60)
        await bench.reach(moves, 2)
        report = await move.migrate(moves, "a", "b")
        assert (report.state, report.reason) in (
            ("aborted", "no_batch_slot"),
            ("aborted", "no_blocks"),
        )
        bench.engines["b"].abort(busy)
        await bench.finish(moves)
