"""The same on vLLM: tokens and log-probabilities of a prompt that is computed at one instance and
decoded at the other equal those of one that stays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.conftest import PATIENT
from tests.e2e.test_serve_prompts import begin, handed_over, states
from tests.support.leaks import Footprint, assert_server_is_empty, leaving_nothing
from tests.support.waiting import until_yes

pytestmark = [pytest.mark.server, pytest.mark.long]

CHUNK = 64
"""Tokens of a step: a prompt of 1,506 takes 24."""
TOKENS = 120


@pytest.fixture
def served(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("prompts") / "log"
    flags = [
        *SMALL, *PATIENT, "--instances=2", "--prompt-instances=i0", "--no-enable-prefix-caching",
        f"--max-num-batched-tokens={CHUNK}",
        "--heartbeat-timeout=20",
    ]  # fmt: skip
    with leaving_nothing(Served(flags, nursery=nursery, log=log)) as served:
        yield served
        assert_server_is_empty(served)


async def drain(served: Served, *, stop: bool = False) -> None:
    """Let i0 take nothing new, or let it serve again."""
    url = f"{served.url}/kvmig/v1/instances/i0/drain"
    async with httpx.AsyncClient(timeout=SERVER_PATIENCE_S) as client:
        answer = await client.request("DELETE" if stop else "POST", url)
    assert answer.status_code in (200, 202), answer.text
    await until_yes(lambda: states(served)["i0"] == ("serving" if stop else "draining"))


async def test_a_prompt_that_is_handed_over_gives_what_one_that_stays_does(served: Served) -> None:
    await begin(served, 1000, 9).end()  # the first call takes long
    stream = begin(served, 2000, logprobs=2, max_tokens=TOKENS)
    moved = await stream.end()
    report = await handed_over(served, stream)
    assert (report["why"], report["exact"]) == ("prompt", True)

    await drain(served)
    stayed = await begin(served, 2000, logprobs=2, max_tokens=TOKENS).end()
    moved.same_as(stayed)
    await drain(served, stop=True)

    for killed in ("i1", "i0"):
        stream = begin(served, 2000, max_tokens=TOKENS)
        await stream.reach(1)
        llumlets = await asyncio.to_thread(lambda: Footprint.of(served).llumlets())
        llumlets[killed].kill()
        again = await stream.end()
        assert again.choices[0].text == stayed.choices[0].text
        await until_yes(lambda: set(states(served).values()) == {"serving"})
