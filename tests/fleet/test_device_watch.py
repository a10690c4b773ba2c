"""Looks at GPUs whose driver may hang."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvmig.core.devices import DeviceInventory, DeviceRecord
from kvmig.fleet.device_watch import DeviceWatch
from tests.support.waiting import until

GPU = DeviceRecord(id="0", index=0, uuid="GPU-0", name="H100", total=80 << 30)


async def test_a_driver_that_hangs_keeps_one_thread_and_is_looked_at_again_once_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvmig.fleet.device_watch.LOOK_S", 0.01)
    monkeypatch.setattr("kvmig.fleet.device_watch.LOOK_TIMEOUT_S", 0.05)
    answers, looks = threading.Event(), 0

    def read() -> DeviceInventory:
        nonlocal looks
        looks += 1
        if looks > 1:
            answers.wait(30)
        return DeviceInventory(devices=(GPU,))

    watch = DeviceWatch(read=read)
    watch.read_sample()
    watching = asyncio.create_task(watch.run())
    await until(lambda: len(caplog.records) > 2)
    assert looks == 2
    answers.set()
    await until(lambda: looks > 3)
    watching.cancel()
