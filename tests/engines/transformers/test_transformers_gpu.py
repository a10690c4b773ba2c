"""The transformers engine's copies as on a GPU: the cache counts as a device's, its copies run
on GPUs of the tests' own (`fake_gpu`), blocks go through memory of these."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest
import torch

from kvmig.core.config import MigrationConfig
from kvmig.core.errors import ConfigError
from kvmig.engines import device_copies
from kvmig.engines.transformers import factory
from kvmig.migrator import Migrator
from tests.support.transformers_on_gpu import OnGpu

pytestmark = pytest.mark.engine

PROMPT = list(b"101 102 103 104 105 106 107")
TOKENS, FEW = 150, 70
PACE_S = 0.02
"""A step of a request that moves: its copies are slow here."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="device is 'cuda', but torch sees no GPU"):
        factory(device="cuda")


@pytest.mark.parametrize("other", [0, pytest.param(1, marks=pytest.mark.long)])
async def test_a_request_moves_between_engines_on_gpus_token_for_token(
    gpus: None, monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    """A6: both engines are in one process, on one GPU or two."""
    # Threads of a CTA take their turns here: by the seconds, with as many as a GPU has.
    monkeypatch.setattr(device_copies, "CTAS_WITHOUT_TMA", 1)
    ends = {"a": OnGpu(0, monkeypatch), "b": OnGpu(other, monkeypatch)}
    a, b = ends["a"].engine, ends["b"].engine
    for end in ends.values():
        end.connect()
        await end.engine.requests()
        end.put_steps_on_the_gpu()

    async def until(tokens: int) -> list[int]:
        async with asyncio.timeout(60):
            while len(found := ends["a"].got + ends["b"].got) < tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        return found

    def assign(request_id: str, name: str) -> None:
        ends[name].engine.assign(request_id, 1)

    try:
        a.submit(1, "stays", a.encode_request(PROMPT, TOKENS, seed=3))
        expected = await until(TOKENS)
        for end in ends.values():
            end.got.clear()
            end.pace_s = PACE_S
        config = MigrationConfig(transport="cuda-ipc", reply_timeout_ms=20_000)
        async with Migrator({"a": a, "b": b}, config, on_commit=assign) as migrator:
            a.submit(1, "moves", a.encode_request(PROMPT, TOKENS, seed=3))
            await until(9)
            report = await migrator.migrate("moves", "a", "b")
            assert (report.state, report.transport) == ("committed", "cuda-ipc")
            assert await until(TOKENS) == expected
            assert ends["b"].got
        for end in ends.values():
            assert end.stepped
            assert end.kernels.launches.workers
    finally:
        for end in ends.values():
            await end.close()


@pytest.mark.long
async def test_a_copy_that_ends_after_its_migration_was_given_up_changes_no_request(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A4: the source is stuck in the middle of a copy, the destination gives the blocks to another
    request, and then the copy goes on."""
    ends = {"a": OnGpu(0, monkeypatch), "b": OnGpu(1, monkeypatch)}
    a, b = ends["a"], ends["b"]
    for end in ends.values():
        end.connect()
        await end.engine.requests()
        end.put_steps_on_the_gpu()

    async def run(end: OnGpu, request_id: str, seed: int, tokens: int = FEW) -> list[int]:
        end.got.clear()
        end.engine.submit(1, request_id, end.engine.encode_request(PROMPT, FEW, seed=seed))
        await until(end, tokens)
        return list(end.got)

    async def until(end: OnGpu, tokens: int) -> None:
        async with asyncio.timeout(60):
            while len(end.got) < tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    gate = Event()
    try:
        moved, other = await run(a, "moved", 3), await run(a, "other", 4)
        config = MigrationConfig(transport="cuda-ipc", reply_timeout_ms=2000, lease_ms=4000)
        engines = {name: end.engine for name, end in ends.items()}
        async with Migrator(engines, config) as migrator:
            a.pace_s = PACE_S
            await run(a, "moves", 3, tokens=9)
            a.hold_copies(lambda: gate.wait(30))
            migration = asyncio.create_task(migrator.migrate("moves", "a", "b"))
            async with asyncio.timeout(60):
                while not b.engine.load().used_blocks:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                while b.engine.load().used_blocks:
                    await b.engine.requests()
                    await asyncio.sleep(0.01)
            b.pace_s = PACE_S
            running = asyncio.create_task(run(b, "other", 4))
            await until(b, 5)
            gate.set()
            report = await migration
            assert (report.state, report.reason) == ("aborted", "timeout")
            assert await running == other
            await until(a, FEW)
            assert a.got == moved
    finally:
        gate.set()
        for end in ends.values():
            await end.close()
