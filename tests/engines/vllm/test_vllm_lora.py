"""Requests with LoRA adapters move between real engines, which have one slot for adapters."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvmig.core.errors import MigrationRefused
from tests.support import tiny_lora
from tests.support.vllm_pair import LONG, PROMPT, SEEDED, Engines, Pair, assert_same
from tests.support.vllm_side import Configuration, Output, Side

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


@pytest.mark.long
async def test_a_prompt_with_an_adapter_is_computed_at_one_and_decoded_at_the_other(
    pair: Pair, one: LoRARequest
) -> None:
    plain = await pair.unmoved(LONG)
    unmoved = await pair.unmoved(LONG, lora=one)
    went = await pair.hand_over(LONG, lora=one)
    assert sum(map(bool, went)) > 1
    moved = await pair.finish("moved")
    assert_same(moved, unmoved)
    assert moved.tokens != plain.tokens


async def test_the_adapter_is_loaded_before_the_request_is_suspended(
    pair: Pair, one: LoRARequest
) -> None:
    export = await pair.exported("moved", PROMPT, lora=one, until=10)
    assert pair.b.core.list_loras() == set()

    await pair.done(pair.b.engine.reserve(export))

    assert len(pair.b.core.list_loras()) == 1
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


async def resume_without_slot(pair: Pair, one: LoRARequest, two: LoRARequest) -> Output:
    """Have `kept` resumed after `busy` has taken its adapter's only place; `kept`, unmoved."""
    unmoved = await pair.unmoved(PROMPT, lora=one, **SEEDED)
    await pair.exported("kept", PROMPT, lora=one, **SEEDED, until=10)
    await pair.suspend(pair.a, "kept", 0)
    await pair.run(pair.a, "busy", PROMPT, lora=two, until=1)
    await pair.done(pair.a.engine.resume("kept"))
    return unmoved


async def test_a_resumed_request_whose_slot_was_taken_waits_for_it(
    pair: Pair, one: LoRARequest, two: LoRARequest
) -> None:
    unmoved = await resume_without_slot(pair, one, two)
    pair.a.step()

    states = {one.request_id: one.state for one in await pair.done(pair.a.engine.requests())}
    assert states == {"kept": "waiting", "busy": "running"}
    assert (await pair.finish("kept")).tokens == unmoved.tokens


async def test_one_that_waits_for_its_slot_takes_no_place_of_those_that_run(
    pair: Pair, one: LoRARequest, two: LoRARequest
) -> None:
    """Runner V2 has as many as may run, which are four."""
    unmoved = await resume_without_slot(pair, one, two)

    for number in range(3):
        pair.submit(pair.a, f"busy {number}", PROMPT, lora=two)
    await pair.step(pair.a, until=("busy 2", 1))

    assert len(pair.a.scheduler.running) == 4
    assert (await pair.finish("kept")).tokens == unmoved.tokens


async def test_one_that_waits_for_its_slot_with_its_blocks_does_so_after_a_move_that_failed(
    pair: Pair, one: LoRARequest, two: LoRARequest
) -> None:
    unmoved = await resume_without_slot(pair, one, two)

    await pair.done(pair.a.engine.export("kept"))
    await pair.suspend(pair.a, "kept", 0)
    await pair.done(pair.a.engine.resume("kept"))

    queue = pair.a.scheduler.kv_holding_waiting
    assert [one.request_id for one in queue] == ["kept"]
    assert (await pair.finish("kept")).tokens == unmoved.tokens


async def test_a_request_moves_to_an_engine_that_has_what_its_adapter_was_before(
    pair: Pair, tmp_path: Path
) -> None:
    there = adapter(tmp_path, 4)
    pair.submit(pair.b, "before", PROMPT, lora=there)
    before = await pair.finish("before")
    replace(there, tmp_path)
    unmoved = await pair.unmoved(PROMPT, lora=there)

    moved = await pair.there_and_back(PROMPT, lora=there)

    assert_same(moved, unmoved)
    assert moved.logprobs != before.logprobs


async def test_a_request_whose_adapter_was_replaced_stays_and_ends_with_the_one_that_it_has(
    pair: Pair, tmp_path: Path
) -> None:
    here = adapter(tmp_path, 5)
    unmoved = await pair.unmoved(PROMPT, lora=here)
    export = await pair.exported("kept", PROMPT, lora=here, until=10)
    replace(here, tmp_path)

    with pytest.raises(MigrationRefused, match="adapter 5 is another one here"):
        await pair.done(pair.b.engine.reserve(export))

    await pair.done(pair.a.engine.resume("kept"))
    assert_same(await pair.finish("kept"), unmoved)


async def test_after_a_load_in_place_requests_have_the_new_adapter_and_move(
    pair: Pair, tmp_path: Path
) -> None:
    here = adapter(tmp_path, 6)
    pair.submit(pair.a, "before", PROMPT, lora=here)
    before = await pair.finish("before")
    replace(here, tmp_path)
    await pair.done(loaded(pair.a, here, load_inplace=True))
    await pair.run(pair.a, "moved", PROMPT, lora=here, until=10)

    await pair.move(pair.a, pair.b, "moved")

    moved = await pair.finish("moved")
    assert_same(moved, await pair.unmoved(PROMPT, lora=here))
    assert moved.logprobs != before.logprobs  # nor did the blocks of before serve


async def test_two_adapters_that_front_ends_gave_one_number_answer_each_for_itself(
    pair: Pair, one: LoRARequest, two: LoRARequest
) -> None:
    alone = [await pair.unmoved(PROMPT, lora=lora) for lora in (one, two)]
    same = msgspec.structs.replace(two, lora_int_id=one.lora_int_id)
    for lora in (one, same):
        await pair.done(loaded(pair.a, lora))

    for number in range(2):
        for name, lora, wanted in (("one", one, alone[0]), ("two", same, alone[1])):
            pair.submit(pair.a, f"{name} {number}", PROMPT, lora=lora)
            assert_same(await pair.finish(f"{name} {number}"), wanted)
    assert alone[0].tokens != alone[1].tokens


async def test_one_name_for_two_adapters_shares_neither_weights_nor_blocks(
    pair: Pair, one: LoRARequest, two: LoRARequest
) -> None:
    wanted = await pair.unmoved(PROMPT, lora=two)
    pair.submit(pair.a, "first", PROMPT, lora=one)
    await pair.finish("first")
    renamed = msgspec.structs.replace(two, lora_name=one.lora_name, lora_int_id=one.lora_int_id)
    pair.submit(pair.a, "second", PROMPT, lora=renamed)
    assert_same(await pair.finish("second"), wanted)


async def test_files_that_lie_where_an_adapter_lay_are_never_loaded_under_its_number(
    pair: Pair, tmp_path: Path
) -> None:
    core, used = pair.a.core, adapter(tmp_path, 8)
    own = core.adapters.resolve_adapter(used)
    core.load_adapter(own)
    core.remove_lora(own.lora_int_id)  # as where there are too many
    replace(used, tmp_path)
    with pytest.raises(MigrationRefused, match="adapter 8 was replaced"):
        core.load_adapter(own)


async def test_a_request_that_waits_for_an_adapter_which_is_lost_ends_no_other(
    pair: Pair, one: LoRARequest, tmp_path: Path
) -> None:
    unmoved = await pair.unmoved(PROMPT, lora=one)
    await pair.run(pair.a, "other", PROMPT, lora=one, until=10)
    lost = adapter(tmp_path, 10)
    pair.submit(pair.a, "waits", PROMPT, lora=lost)
    pair.a.step()
    assert pair.a.scheduler.requests["waits"].status.name == "WAITING"
    core = pair.a.core
    core.remove_lora(core.adapters.resolve_adapter(lost).lora_int_id)  # as where there are too many
    replace(lost, tmp_path)
    pair.a.look_at_adapters()
    assert_same(await pair.finish("other"), unmoved)
    assert str((await pair.finish("waits")).finish_reason) == "error"


async def test_a_request_whose_adapter_cannot_be_loaded_ends_no_other(
    pair: Pair, one: LoRARequest, tmp_path: Path
) -> None:
    broken = adapter(tmp_path, 9)
    (Path(broken.lora_path) / "adapter_model.safetensors").write_bytes(b"broken")
    unmoved = await pair.unmoved(PROMPT, lora=one)
    await pair.run(pair.a, "other", PROMPT, lora=one, until=10)
    pair.submit(pair.a, "broken", PROMPT, lora=broken)
    assert_same(await pair.finish("other"), unmoved)
    assert str((await pair.finish("broken")).finish_reason) == "error"


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


async def test_what_encoders_make_of_media_is_kept_by_adapter(
    pair: Pair, one: LoRARequest, two: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from tests.engines.vllm.test_vllm_multimodal import with_image

    core = pair.a.core
    lora_config: Any = core.vllm_config.lora_config
    monkeypatch.setattr(lora_config, "enable_tower_connector_lora", True)
    same_name = msgspec.structs.replace(two, lora_name=one.lora_name)
    identifiers = []
    for lora in (one, same_name, one):
        asked = with_image(20)
        request = EngineCoreRequest(
            "r", asked["prompt"], asked["images"], SamplingParams(), None, 0.0, lora, None, None
        )
        built, _ = core.preprocess_add_request(request)
        identifiers.append(built.mm_features[0].identifier)
    assert identifiers[0] == identifiers[2] != identifiers[1]


@pytest.mark.parametrize("way", ["a copy that keeps its times", "a link"])
def test_older_files_that_lie_there_now_are_others_to_a_request_that_would_run_again(
    tmp_path: Path, way: str
) -> None:
    from kvmig.engines.vllm.lora import replaced_since

    older, used = adapter(tmp_path, 11), adapter(tmp_path, 12)
    time.sleep(0.05)  # a kernel's clock for files is coarser
    began = time.time()
    assert not replaced_since(used, began)
    time.sleep(0.05)
    if way == "a link":
        shutil.move(used.lora_path, tmp_path / "gone")
        Path(used.lora_path).symlink_to(older.lora_path)
    else:
        shutil.copytree(older.lora_path, used.lora_path, dirs_exist_ok=True)
    assert replaced_since(used, began)


async def loaded(side: Side, lora: LoRARequest, **fields: bool) -> None:
    """As `POST /v1/load_lora_adapter` has it loaded."""
    given = msgspec.to_builtins(msgspec.structs.replace(lora, **fields))
    side.core.utility(1, 1, "add_lora", (given,))
    side.take_calls()
    await asyncio.sleep(0)


def replace(used: LoRARequest, folder: Path) -> None:
    """Another adapter lies where this one lay."""
    shutil.copytree(
        tiny_lora.make(folder, used.lora_int_id + 100), used.lora_path, dirs_exist_ok=True
    )
