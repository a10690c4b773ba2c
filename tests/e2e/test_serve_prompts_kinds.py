"""Prompts that are computed at i0 and decoded at i1, with LoRA adapters and of two families whose
KV differs from Llama's: what a client gets equals what one instance alone gives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.conftest import PATIENT
from tests.e2e.test_serve_prompts import handed_over, states
from tests.support import tiny_lora
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.streams import Answer, Stream
from tests.support.waiting import until_yes
from tests.support.zoo import SERVING_FLAGS, make

pytestmark = [pytest.mark.server, pytest.mark.long]

ADAPTERS = ("one", "two")
FAMILIES = ("gemma3", "deepseek-v2")
"""Sliding windows beside full attention, and latents in place of keys and values."""
ZOO = (
    "--enforce-eager",
    "--block-size=32",
    "--kv-cache-memory-bytes=1g",
    "--max-model-len=1216",
    "--max-num-seqs=8",
)
PROMPTS = (
    "--instances=2", "--prompt-instances=i0", "--no-enable-prefix-caching",
    "--max-num-batched-tokens=64", "--heartbeat-timeout=20", "--shutdown-timeout=5",
)  # fmt: skip
PROMPT = [10 + 7 * number % 240 for number in range(1000)]
"""Tokens of 16 steps, which all of these models know."""
TOKENS = 100


def flags_of(adapters: list[str]) -> list[str]:
    lora = ("--enable-lora", "--max-loras=2", "--max-lora-rank=8", "--lora-modules")
    return [*SMALL, *PATIENT, *PROMPTS, *lora, *adapters]


@pytest.fixture(scope="module")
def adapted(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapted")
    named = enumerate(ADAPTERS, 1)
    flags = flags_of([f"{name}={tiny_lora.make(folder, number)}" for number, name in named])
    with leaving_nothing(Served(flags, nursery=nursery, log=folder / "log")) as served:
        yield served
        assert_server_is_empty(served)


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("family")
    flags = [*ZOO, *PATIENT, *PROMPTS, *SERVING_FLAGS.get(request.param, ())]
    model = make(request.param, folder)
    with leaving_nothing(Served(flags, model=model, nursery=nursery, log=folder / "log")) as served:
        yield served
        assert_server_is_empty(served)


def begin(served: Served, **fields: Any) -> Stream:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2, **fields}
    return Stream(served, "/v1/completions", body)


async def hand_over(served: Served, **fields: Any) -> Answer:
    """The answer to a prompt that i0 computes and i1 goes on with."""
    stream = begin(served, **fields)
    answer = await stream.end()
    report = await handed_over(served, stream)
    assert (report["why"], report["exact"]) == ("prompt", True), report
    assert (report["source"], report["destination"]) == ("i0", "i1"), report
    return answer


async def drain(served: Served, *, stop: bool = False) -> None:
    """Let i0 take nothing new, or let it serve again."""
    url = f"{served.url}/kvmig/v1/instances/i0/drain"
    async with httpx.AsyncClient(timeout=SERVER_PATIENCE_S, verify=False) as client:
        answer = await client.request("DELETE" if stop else "POST", url)
    assert answer.status_code in (200, 202), answer.text
    await until_yes(lambda: states(served)["i0"] == ("serving" if stop else "draining"))


async def compute_alone(served: Served, kinds: list[dict[str, Any]]) -> list[Answer]:
    """The answers of i1, which computes the prompts itself."""
    await drain(served)
    answers = [await begin(served, **fields).end() for fields in kinds]
    await drain(served, stop=True)
    return answers


async def test_each_adapters_prompt_is_handed_over_and_gives_what_it_does_alone(
    adapted: Served,
) -> None:
    kinds: list[dict[str, Any]] = [
        {"model": name, "temperature": 0} for name in (adapted.model, *ADAPTERS)
    ]
    moved = [await hand_over(adapted, **fields) for fields in kinds]
    for answer, alone in zip(moved, await compute_alone(adapted, kinds), strict=True):
        answer.same_as(alone)
    assert len({answer.choices[0].text for answer in moved}) == len(kinds), "adapters differ"

    together = await asyncio.gather(*(begin(adapted, **fields).end() for fields in kinds))
    assert [answer.tokens for answer in together] == [TOKENS] * len(kinds)


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "seeded"]
)
async def test_a_familys_prompt_is_handed_over_and_gives_what_it_does_alone(
    family: Served, fields: dict[str, Any]
) -> None:
    moved = await hand_over(family, **fields)
    (alone,) = await compute_alone(family, [fields])
    moved.same_as(alone)
    assert moved.tokens == TOKENS
