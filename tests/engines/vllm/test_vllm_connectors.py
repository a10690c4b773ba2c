"""Requests move between engines with a KV connector of vLLM's; those that it holds stay.

The connectors are vLLM's own, NIXL's with its own library: one engine computes a prompt, another
one reads its blocks over UCX and decodes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvmig.core.errors import MigrationRefused
from kvmig.engines.vllm.connectors import SideChannel
from tests.support.vllm_connector import have_nixl, start_connected
from tests.support.vllm_pair import SAMPLING, SEEDED, Engines, Pair, assert_same, preempt
from tests.support.vllm_side import Configuration, Output, Side

pytestmark = [pytest.mark.engine, pytest.mark.long]

PROMPT = [*range(1, 101)]
WAIT_S = 30.0
READ = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
"""What routers say to the engine that computes the prompt."""


def with_connector(name: str, **extra: object) -> Configuration:
    transfer = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return Configuration(True, (f"--kv-transfer-config={json.dumps(transfer)}",))


# -- prompts in files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompts")


@pytest.fixture
async def sharing(engines: Engines, folder: Path) -> AsyncIterator[Pair]:
    """Two engines that save prompts in one folder, which is empty."""
    wanted = with_connector("ExampleConnector", shared_storage_path=str(folder))
    for number in range(2):
        start_connected(engines, wanted, number)
    forget(folder)
    async with engines.lent(wanted, wanted) as pair:
        yield pair


def saved(folder: Path) -> bool:
    return any(folder.iterdir())


def forget(folder: Path) -> None:
    for one in folder.iterdir():
        shutil.rmtree(one)


@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalties"])
async def test_one_that_saved_its_prompt_moves_there_and_back_and_equals_one_that_stayed(
    sharing: Pair, folder: Path, kind: str
) -> None:
    alone = await sharing.unmoved(PROMPT, **SAMPLING[kind])
    assert saved(folder)
    forget(folder)

    moved = await sharing.there_and_back(PROMPT, **SAMPLING[kind])

    assert saved(folder)
    assert_same(moved, alone)


async def test_one_that_loaded_its_prompt_moves_there_and_back_and_equals_one_that_stayed(
    sharing: Pair,
) -> None:
    await sharing.unmoved(PROMPT, **SEEDED)  # saves it, or an earlier test's answer is taken
    await sharing.run(sharing.a, "saves", PROMPT, until=1, **SEEDED)
    await sharing.finish("saves")
    await sharing.idle()
    sharing.a.scheduler.reset_prefix_cache()
    await sharing.run(sharing.a, "stays", PROMPT, until=1, **SEEDED)
    stayed = await sharing.finish("stays")
    await sharing.idle()
    assert stayed.cached_tokens >= 32, "it was computed"
    for side in (sharing.a, sharing.b):
        side.scheduler.reset_prefix_cache()

    moved = await sharing.there_and_back(PROMPT, **SEEDED)

    assert moved.cached_tokens == stayed.cached_tokens
    assert_same(moved, stayed)


# -- prompts from another engine


@pytest.fixture
async def pair(engines: Engines) -> AsyncIterator[Pair]:
    """Two engines, each of which may compute prompts for the other."""
    have_nixl()
    wanted = with_connector("NixlConnector")
    for number in range(2):
        start_connected(engines, wanted, number)
    async with engines.lent(wanted, wanted) as pair:
        yield pair


async def until_ended(pair: Pair, request_id: str, tokens: int = 1 << 30) -> Output:
    """Step both until the request has so many tokens, or has ended. NIXL's threads need time."""
    async with asyncio.timeout(WAIT_S):
        while True:
            output = pair.outputs.get(request_id, Output())
            if len(output.tokens) >= tokens or output.finish_reason is not None:
                return output
            pair.a.step()
            pair.b.step()
            await pair.settle()
            await asyncio.sleep(0.001)


async def computed(pair: Pair, side: Side, request_id: str, **params: Any) -> dict[str, Any]:
    """Compute a prompt for another engine; what the router tells that one."""
    for one in (pair.a, pair.b):
        one.scheduler.reset_prefix_cache()
    first = {"max_tokens": 1, "extra_args": {"kv_transfer_params": dict(READ)}}
    pair.submit(side, request_id, PROMPT, **{**params, **first})
    output = await until_ended(pair, request_id)
    assert output.transfer is not None
    return {"extra_args": {"kv_transfer_params": output.transfer}}


async def until_free(pair: Pair) -> None:
    """The engine that has computed the prompt knows that it was read."""
    async with asyncio.timeout(WAIT_S):
        while pair.a.core.has_work() or pair.b.core.has_work():
            pair.a.step()
            pair.b.step()
            await pair.settle()
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
async def test_one_whose_prompt_came_from_another_engine_moves_there_and_back(
    pair: Pair, kind: str
) -> None:
    """And equals one that stayed."""
    params = SAMPLING[kind]
    told = await computed(pair, pair.a, "p", **params)
    pair.submit(pair.b, "stays", PROMPT, **params, **told)
    stayed = await until_ended(pair, "stays")
    await until_free(pair)
    assert stayed.cached_tokens >= 96, "its prompt was computed again"

    told = await computed(pair, pair.a, "q", **params)
    pair.submit(pair.b, "moved", PROMPT, **params, **told)
    await until_ended(pair, "moved", 10)
    await pair.move(pair.b, pair.a, "moved")
    await until_ended(pair, "moved", 30)
    await pair.move(pair.a, pair.b, "moved")

    assert_same(await until_ended(pair, "moved"), stayed)
    await until_free(pair)


async def test_one_that_was_moved_is_not_loaded_again_where_it_is_preempted(pair: Pair) -> None:
    """Its prompt's blocks are no longer where they came from."""
    told = await computed(pair, pair.a, "p", **SEEDED)
    pair.submit(pair.b, "stays", PROMPT, **SEEDED, **told)
    stayed = await until_ended(pair, "stays")
    await until_free(pair)
    told = await computed(pair, pair.b, "q", **SEEDED)
    pair.submit(pair.a, "moved", PROMPT, **SEEDED, **told)
    await until_ended(pair, "moved", 10)

    await pair.move(pair.a, pair.b, "moved")
    preempt(pair.b, "moved")
    pair.b.scheduler.reset_prefix_cache()

    moved = await until_ended(pair, "moved")
    assert moved.tokens == stayed.tokens
    assert str(moved.finish_reason) == "length"
    await until_free(pair)


async def test_one_that_runs_again_after_its_engine_was_lost_is_not_loaded_again(
    pair: Pair,
) -> None:
    told = await computed(pair, pair.a, "p", **SEEDED)
    pair.submit(pair.b, "r", PROMPT, **SEEDED, **told)
    whole = await until_ended(pair, "r")
    await until_free(pair)
    tokens = list(whole.tokens)
    pair.a.scheduler.reset_prefix_cache()
    pair.outputs.pop("r")

    pair.submit(pair.a, "r", PROMPT, again=tokens[:20], **SEEDED, **told)
    await pair.a.entered()

    assert (await until_ended(pair, "r")).tokens == tokens[20:]
    await until_free(pair)


async def reason(pair: Pair, side: Side, request_id: str) -> str:
    """Why it is listed as unmovable; and its move is refused for that."""
    states = await pair.done(side.engine.requests())
    (why,) = (one.unmovable for one in states if one.request_id == request_id)
    with pytest.raises(MigrationRefused) as refused:
        await pair.done(side.engine.export(request_id))
    assert refused.value.detail == why
    return why


async def test_one_stays_by_the_connectors_name_until_its_prompt_is_there_and_others_move(
    pair: Pair,
) -> None:
    told = await computed(pair, pair.a, "p")
    await pair.run(pair.b, "beside", PROMPT[::-1], until=5)
    pair.submit(pair.b, "r", PROMPT, **told)
    pair.b.take_calls()

    assert await reason(pair, pair.b, "r") == (
        "NixlConnector holds it: its prompt's blocks come from another engine"
    )
    pair.b.step()
    assert await reason(pair, pair.b, "r") == (
        "NixlConnector holds it: blocks of its prompt are on their way"
    )
    await pair.move(pair.b, pair.a, "beside", steps=0)
    await until_ended(pair, "r", 5)
    await pair.move(pair.b, pair.a, "r")

    assert str((await until_ended(pair, "r")).finish_reason) == "length"
    assert str((await until_ended(pair, "beside")).finish_reason) == "length"
    await until_free(pair)


async def test_one_whose_blocks_another_engine_is_to_read_stays_by_the_connectors_name(
    pair: Pair,
) -> None:
    pair.submit(pair.a, "p", PROMPT, extra_args={"kv_transfer_params": dict(READ)})
    await pair.step(pair.a, until=("p", 3))

    assert await reason(pair, pair.a, "p") == (
        "NixlConnector holds it: another engine reads its blocks when it ends"
    )
    output = await until_ended(pair, "p")
    assert output.transfer is not None
    told = {"kv_transfer_params": output.transfer}
    pair.b.scheduler.reset_prefix_cache()
    pair.submit(pair.b, "r", PROMPT, max_tokens=2, extra_args=told)
    await until_ended(pair, "r")
    await until_free(pair)


async def test_an_engine_reports_ended_requests_whose_blocks_another_one_is_still_to_read(
    pair: Pair,
) -> None:
    """And goes on to make steps until they are read, though nothing runs."""
    assert pair.a.engine.load().unread == 0
    told = await computed(pair, pair.a, "p")
    pair.a.step()
    assert (pair.a.engine.load().unread, pair.a.engine.load().running) == (1, 0)
    assert pair.a.engine.load().used_blocks

    pair.b.scheduler.reset_prefix_cache()
    pair.submit(pair.b, "r", PROMPT, max_tokens=2, **told)
    await until_ended(pair, "r")
    await until_free(pair)

    assert (pair.a.engine.load().unread, pair.b.engine.load().unread) == (0, 0)


async def test_engines_of_one_host_have_a_port_and_an_id_each(pair: Pair) -> None:
    told = [(await computed(pair, side, f"p{side.used_blocks}{n}"))["extra_args"]
            for n, side in enumerate((pair.a, pair.b))]  # fmt: skip
    params = [one["kv_transfer_params"] for one in told]
    assert params[0]["remote_port"] != params[1]["remote_port"]
    assert params[0]["remote_engine_id"] != params[1]["remote_engine_id"]
    for n, (side, given) in enumerate(((pair.b, params[0]), (pair.a, params[1]))):
        side.scheduler.reset_prefix_cache()
        pair.submit(side, f"r{n}", PROMPT, max_tokens=2, extra_args={"kv_transfer_params": given})
        await until_ended(pair, f"r{n}")
    await until_free(pair)


async def test_a_call_that_was_refused_at_the_door_frees_the_blocks_that_wait_for_it(
    pair: Pair,
) -> None:
    """vLLM gives the engine a request that it ends at once: a router hears of its end, too."""
    told = await computed(pair, pair.a, "p")
    assert pair.a.used_blocks

    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    refused = EngineCoreRequest(
        "r", [0], None, SamplingParams(max_tokens=1, **told), None, 0.0, None, None, None,
        abort_immediately=True,
    )  # fmt: skip
    pair.b.engine.submit(1, "r", MsgpackEncoder().encode(refused))
    pair.b.wait_for_new()

    assert str((await until_ended(pair, "r")).finish_reason) == "abort"
    await until_free(pair)
    assert pair.a.used_blocks == 0


def test_ports_are_given_out_once_and_again_when_they_are_free() -> None:
    one, two = SideChannel(21_700), SideChannel(21_700)
    assert one.port != two.port
    one.close()
    again = SideChannel(21_700)
    assert again.port == one.port
    again.close()
    two.close()
