"""Requests with LoRA adapters move between real engines, which have one slot for adapters."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvmig.ground.errors import MigrationRefused
from tests import tiny_lora
from tests.vllm_pair import PROMPT, SEEDED, Engines, Pair, assert_same
from tests.vllm_side import Configuration

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.engine


def adapter(folder: Path, number: int) -> LoRARequest:
    """A random one."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter {number}", number, str(tiny_lora.make(folder, number)))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    return adapter(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    return adapter(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def configurations() -> tuple[Configuration, Configuration]:
    wanted = Configuration(
        flags=("--enable-lora", "--max-loras=1", "--max-cpu-loras=4", "--max-lora-rank=8")
    )
    return wanted, wanted


@pytest.fixture(autouse=True)
def no_adapter_is_loaded(pair: Pair) -> None:
    for side in (pair.a, pair.b):
        for number in side.core.list_loras():
            side.core.remove_lora(number)


async def test_a_lora_request_moved_there_and_back_equals_one_left_alone(
    pair: Pair, one: LoRARequest
) -> None:
    plain = await pair.unmoved(PROMPT)
    unmoved = await pair.unmoved(PROMPT, lora=one)
    moved = await pair.there_and_back(PROMPT, lora=one)
    assert_same(moved, unmoved)
    assert moved.tokens != plain.tokens


async def test_the_adapter_is_loaded_before_the_request_is_suspended(
    pair: Pair, one: LoRARequest
) -> None:
    export = await pair.exported("moved", PROMPT, lora=one, until=10)
    assert pair.b.core.list_loras() == set()

    await pair.done(pair.b.engine.reserve(export))

    assert pair.b.core.list_loras() == {1}
    await pair.done(pair.b.engine.cancel("moved"))
    await pair.done(pair.a.engine.resume("moved"))
    await pair.finish("moved")


async def test_an_engine_without_lora_refuses(
    pair: Pair, engines: Engines, one: LoRARequest
) -> None:
    without_lora = engines.side(Configuration())
    elsewhere = pair.towards(without_lora)
    export = await pair.exported("kept", PROMPT, lora=one, until=10)

    with pytest.raises(MigrationRefused, match=r"incompatible: .*--enable-lora"):
        await elsewhere.done(without_lora.engine.reserve(export))

    await pair.done(pair.a.engine.resume("kept"))
    await pair.finish("kept")
    await elsewhere.assert_empty()


async def test_an_adapter_that_is_not_on_the_destinations_disk_is_refused(
    pair: Pair, tmp_path: Path
) -> None:
    lost = adapter(tmp_path, 3)
    export = await pair.exported("kept", PROMPT, lora=lost, until=10)
    shutil.rmtree(lost.lora_path)

    await pair.refused("kept", export, "incompatible: LoRA adapter adapter 3")


async def test_a_destination_whose_adapter_slots_are_in_use_refuses(
    pair: Pair, one: LoRARequest, two: LoRARequest
) -> None:
    await pair.run(pair.b, "busy", PROMPT, lora=two, until=1)
    export = await pair.exported("kept", PROMPT, lora=one, until=10)

    await pair.refused("kept", export, "no_batch_slot")


async def test_a_slot_that_was_taken_since_the_reserve_is_refused_at_the_commit(
    pair: Pair, one: LoRARequest, two: LoRARequest
) -> None:
    unmoved = await pair.unmoved(PROMPT, lora=one)
    export = await pair.exported("kept", PROMPT, lora=one, until=10)
    await pair.done(pair.b.engine.reserve(export))
    await pair.run(pair.b, "busy", PROMPT, lora=two, until=1)
    tail = await pair.suspend(pair.a, "kept", 0)

    with pytest.raises(MigrationRefused, match="no_batch_slot"):
        await pair.done(pair.b.engine.commit("kept", tail))

    await pair.done(pair.a.engine.resume("kept"))
    assert (await pair.finish("kept")).tokens == unmoved.tokens


async def test_a_resumed_request_whose_slot_was_taken_waits_for_it(
    pair: Pair, one: LoRARequest, two: LoRARequest
) -> None:
    unmoved = await pair.unmoved(PROMPT, lora=one, **SEEDED)
    await pair.exported("kept", PROMPT, lora=one, **SEEDED, until=10)
    await pair.suspend(pair.a, "kept", 0)
    await pair.run(pair.a, "busy", PROMPT, lora=two, until=1)

    await pair.done(pair.a.engine.resume("kept"))
    pair.a.step()

    states = {one.request_id: one.state for one in await pair.done(pair.a.engine.requests())}
    assert states == {"kept": "waiting", "busy": "running"}
    assert (await pair.finish("kept")).tokens == unmoved.tokens


async def test_an_adapter_that_is_another_one_at_the_destination_is_refused(
    pair: Pair, tmp_path: Path
) -> None:
    there = adapter(tmp_path, 4)
    pair.submit(pair.b, "before", PROMPT, lora=there)
    await pair.finish("before")
    replace(there, tmp_path)
    export = await pair.exported("kept", PROMPT, lora=there, until=10)

    await pair.refused("kept", export, "adapter 4 was replaced after it was loaded")


async def test_an_adapter_that_was_replaced_after_it_was_loaded_is_moved_by_nobody(
    pair: Pair, tmp_path: Path
) -> None:
    here = adapter(tmp_path, 5)
    await pair.run(pair.a, "kept", PROMPT, lora=here, until=10)
    replace(here, tmp_path)

    with pytest.raises(MigrationRefused, match="adapter 5 was replaced after it was loaded"):
        await pair.done(pair.a.engine.export("kept"))

    await pair.finish("kept")


async def test_after_a_load_in_place_requests_with_the_new_adapter_move(
    pair: Pair, tmp_path: Path
) -> None:
    here = adapter(tmp_path, 6)
    pair.submit(pair.a, "before", PROMPT, lora=here)
    await pair.finish("before")
    replace(here, tmp_path)
    anew = msgspec.to_builtins(msgspec.structs.replace(here, load_inplace=True))
    pair.a.core.utility(1, 1, "add_lora", (anew,))
    pair.a.take_calls()
    await asyncio.sleep(0)
    await pair.run(pair.a, "moved", PROMPT, lora=here, until=10)

    await pair.move(pair.a, pair.b, "moved")

    await pair.finish("moved")


async def test_a_request_runs_again_only_with_the_adapter_that_it_began_with(
    pair: Pair, tmp_path: Path
) -> None:
    used = adapter(tmp_path, 7)
    pair.submit(pair.a, "first", PROMPT, lora=used)
    first = await pair.finish("first")
    pair.submit(pair.b, "again", PROMPT, lora=used, again=first.tokens[:10])
    later = time.time() + 60
    os.utime(Path(used.lora_path) / "adapter_model.safetensors", (later, later))
    await pair.b.entered()

    assert str((await pair.finish("again")).finish_reason) == "error"


def replace(used: LoRARequest, folder: Path) -> None:
    """Another adapter lies where this one lay."""
    shutil.copytree(
        tiny_lora.make(folder, used.lora_int_id + 100), used.lora_path, dirs_exist_ok=True
    )
