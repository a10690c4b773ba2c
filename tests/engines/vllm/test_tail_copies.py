"""The blocks of a tail, where a device copies them beside the engine's thread."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvmig.core.errors import KvmigError, MigrationRefused
from kvmig.engines.block_copies import BlockCopies
from kvmig.engines.vllm import runner
from tests.support.copy_device import CopyDevice, destination_of, ready_to_commit
from tests.support.vllm_pair import PROMPT, Pair, assert_same
from tests.support.vllm_side import Side

pytestmark = pytest.mark.engine


async def test_an_idle_engine_prepares_the_request_while_its_last_blocks_are_copied(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmoved = await pair.unmoved(PROMPT)
    tail, last = await ready_to_commit(pair)
    device, registered, register = (
        CopyDevice(pair.b, monkeypatch),
        threading.Event(),
        runner.register,
    )

    def note(*args: object) -> None:
        register(*args)  # type: ignore[arg-type]
        registered.set()

    def before() -> None:
        assert registered.wait(10)

    device.before = before
    monkeypatch.setattr(runner, "register", note)
    await pair.done(pair.b.engine.commit("moved", tail, last))
    assert device.copied.is_set()
    await pair.done(pair.a.engine.release("moved"))
    assert_same(await pair.finish("moved"), unmoved)


async def test_an_engine_that_steps_is_asked_when_the_last_blocks_are_copied(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmoved = await pair.unmoved(PROMPT)
    tail, last = await ready_to_commit(pair)
    device, go_on = CopyDevice(pair.b, monkeypatch), threading.Event()
    device.before = lambda: assert_set(go_on)
    pair.b.core.step_began = time.monotonic()
    commit = asyncio.ensure_future(pair.b.engine.commit("moved", tail, last))
    await asyncio.sleep(0.02)
    assert pair.b.core.input_queue.empty()
    go_on.set()
    await pair.done(commit)
    await pair.done(pair.a.engine.release("moved"))
    assert_same(await pair.finish("moved"), unmoved)


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)


@pytest.mark.parametrize("how", ["changed", "fails"])
async def test_last_blocks_that_do_not_come_whole_leave_nothing_there(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    unmoved = await pair.unmoved(PROMPT)
    tail, last = await ready_to_commit(pair)
    device = CopyDevice(pair.b, monkeypatch)

    def fail() -> None:
        raise KvmigError("the device failed")

    if how == "fails":
        device.before = fail
    else:
        last.fused[0] ^= 1
    wrong = "the device failed" if how == "fails" else "block 0 came changed"
    error = KvmigError if how == "fails" else MigrationRefused
    with pytest.raises(error, match=wrong):
        await pair.done(pair.b.engine.commit("moved", tail, last))
    assert pair.b.used_blocks == 0
    assert destination_of(pair.b).reserved() == 0
    monkeypatch.undo()
    await pair.done(pair.a.engine.resume("moved"))
    assert_same(await pair.finish("moved"), unmoved)


async def test_a_commit_that_is_refused_frees_no_block_that_is_still_written(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail, last = await ready_to_commit(pair)
    device, copied_when_freed = CopyDevice(pair.b, monkeypatch), list[bool]()
    device.before = lambda: time.sleep(0.05)
    cancel = destination_of(pair.b).cancel

    def note(request_id: str) -> None:
        copied_when_freed.append(device.copied.is_set())
        cancel(request_id)

    def refuse(*args: object) -> None:
        raise MigrationRefused("error", "no worker answers")

    monkeypatch.setattr(destination_of(pair.b), "cancel", note)
    monkeypatch.setattr(runner, "register", refuse)
    with pytest.raises(MigrationRefused, match="no worker answers"):
        await pair.done(pair.b.engine.commit("moved", tail, last))
    assert copied_when_freed == [True]
    monkeypatch.undo()
    await pair.done(pair.a.engine.resume("moved"))
    await pair.finish("moved")


@pytest.mark.parametrize("times", [1, 2])
async def test_a_commit_that_nobody_awaits_any_more_leaves_its_buffer_when_it_is_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    tail, last = await ready_to_commit(pair)
    device, go_on = CopyDevice(pair.b, monkeypatch), threading.Event()
    device.before = lambda: assert_set(go_on)
    pair.b.core.step_began = time.monotonic()
    commit = asyncio.ensure_future(pair.b.engine.commit("moved", tail, last))
    await asyncio.sleep(0.02)
    for _ in range(times):
        commit.cancel()
        await asyncio.sleep(0.02)
    assert not commit.done()
    go_on.set()
    await asyncio.wait([commit], timeout=10)
    assert commit.cancelled()
    pair.b.core.step_began = None
    await pair.done(pair.b.engine.cancel("moved"))
    await pair.done(pair.a.engine.resume("moved"))
    await pair.finish("moved")


# -- at the source


def buffer_of(side: Side) -> memoryview:
    return memoryview(bytearray(side.engine.layout.block_bytes * 4))


async def test_a_device_gathers_a_tail_beside_the_engines_thread(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.exported("kept", PROMPT, until=10)
    device, threads = CopyDevice(pair.a, monkeypatch), list[str]()
    device.before = lambda: threads.append(threading.current_thread().name)
    buffer, again = buffer_of(pair.a), buffer_of(pair.a)
    tail = await pair.suspend(pair.a, "kept", 0, buffer)
    assert [name.rsplit("_", 1)[0] for name in threads] == ["kvmig-copy"]
    assert await pair.done(pair.a.engine.gather(tail.block_ids, again)) == tail.checksums
    assert buffer == again
    await pair.done(pair.a.engine.resume("kept"))
    await pair.finish("kept")


async def test_a_request_whose_tail_can_not_be_gathered_runs_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmoved = await pair.unmoved(PROMPT)
    await pair.exported("kept", PROMPT, until=10)
    device = CopyDevice(pair.a, monkeypatch)

    def fail() -> None:
        raise KvmigError("the device failed")

    device.before = fail
    with pytest.raises(KvmigError, match="the device failed"):
        await pair.suspend(pair.a, "kept", 0, buffer_of(pair.a))
    assert_same(await pair.finish("kept"), unmoved)


async def test_a_gather_that_fails_between_two_steps_ends_only_the_suspension(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmoved = await pair.unmoved(PROMPT)
    await pair.exported("kept", PROMPT, until=10)

    def fail(*args: object) -> list[int]:
        raise RuntimeError("nobody foresaw it")

    monkeypatch.setattr(BlockCopies, "gather_now", fail)
    with pytest.raises(RuntimeError, match="nobody foresaw it"):
        await pair.suspend(pair.a, "kept", 0, buffer_of(pair.a))
    assert_same(await pair.finish("kept"), unmoved)


async def test_a_suspension_that_is_given_up_ends_when_its_copy_has(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.exported("kept", PROMPT, until=10)
    device, go_on = CopyDevice(pair.a, monkeypatch), threading.Event()
    device.before = lambda: assert_set(go_on)
    suspending = asyncio.ensure_future(pair.a.engine.suspend("kept", 0, buffer_of(pair.a)))
    await asyncio.sleep(0)
    for _ in range(3):  # the last that holds it is over by then
        pair.a.step()
    await pair.settle()
    suspending.cancel()
    await asyncio.sleep(0.02)
    assert not suspending.done()
    go_on.set()
    await asyncio.wait([suspending], timeout=10)
    assert suspending.cancelled()
    await pair.done(pair.a.engine.resume("kept"))
    await pair.finish("kept")
