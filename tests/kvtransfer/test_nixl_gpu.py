"""NIXL with buffers in GPUs' memory, on GPUs of the tests' own. UCX finds no GPU here, and takes a
GPU's memory for the host's: NIXL refuses it, or is told that it is the host's (`Mistaken`)."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvmig.core.errors import PeerError
from kvmig.kernels import ipc
from kvmig.kernels.arrays import memory_of
from kvmig.kernels.driver import CudaDriver
from kvmig.kvtransfer.messages import Chunk, Offer
from kvmig.kvtransfer.transports import nixl, ucx
from kvmig.kvtransfer.transports.base import BufferShape, StagingPool, TransportInbox
from kvmig.kvtransfer.transports.nixl import NixlInbox, NixlStaging, RdmaPlace
from kvmig.rpc.codec import Frame
from tests.kvtransfer.test_transports_processes import needs_nixl
from tests.support import fake_gpu
from tests.support.gpu_end import IDS, INTO, GpuEnd

pytestmark = [needs_nixl, pytest.mark.usefixtures("gpus")]

SLOTS, SIZE = 2, 100_000


class Mistaken:
    """NIXL's API; a GPU's memory, in which the CPU may then read and write, is the host's to it."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self.gpus: list[int] = []
        """Of the memory that was registered."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def nixl_agent(self, *arguments: Any) -> Any:
        agent = self._api.nixl_agent(*arguments)
        register, listed = agent.register_memory, agent.get_xfer_descs

        def register_memory(memory: Sequence[tuple[int, int, int, str]], kind: str) -> Any:
            if kind == "VRAM":
                ((address, _, gpu, _),) = memory
                self.gpus.append(gpu)
                fake_gpu.library().fakegpu_host(ctypes.c_void_p(address))
            return register(memory, "DRAM")

        agent.register_memory = register_memory
        agent.get_xfer_descs = lambda those, kind: listed(those, "DRAM")
        return agent


@pytest.fixture
def mistaken(monkeypatch: pytest.MonkeyPatch) -> Mistaken:
    made = Mistaken(nixl.load())
    monkeypatch.setattr(nixl, "load", lambda: made)
    return made


async def brought(
    staging: StagingPool, inbox: TransportInbox, slot: int, nbytes: int
) -> memoryview:
    """What is in the slot."""
    chunk, numbers = Chunk("m", 0, 0, slot, nbytes, []), list[int]()

    def announce(payload: Sequence[Frame] = (), number: int = 0) -> None:
        numbers.append(number)

    async with asyncio.timeout(20):
        pushing = asyncio.create_task(staging.channel(inbox.token).push(chunk, announce))
        while not numbers:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        came = await inbox.receive(msgspec.structs.replace(chunk, number=numbers[0]), None)
        await pushing
    return came


@pytest.fixture
def source() -> Iterator[GpuEnd]:
    made = GpuEnd(0, 1)
    yield made
    made.close()


async def test_blocks_go_from_one_gpus_memory_to_anothers_and_through_none_of_the_hosts(
    mistaken: Mistaken, source: GpuEnd
) -> None:
    target, nbytes = GpuEnd(1, 2), len(IDS) * source.size
    staging = NixlStaging(SLOTS, nbytes, gpu=0)
    inbox = NixlInbox(staging.offer(), gpu=1)
    assert (staging.memory, inbox.memory, mistaken.gpus) == (None, None, [0, 1])
    _, slot = await staging.acquire(1), await staging.acquire(1)
    out = await staging.channel(inbox.token).buffer(slot)
    sums = await asyncio.to_thread(source.copies.gather, IDS, out[:nbytes])
    came = await brought(staging, inbox, slot, nbytes)
    assert [memory_of(one).device for one in (out, came)] == ["cuda", "cuda"]
    assert await asyncio.to_thread(target.copies.scatter, INTO, came) == sums
    expected = dict(zip(INTO, map(source.host.block, IDS), strict=True))
    assert np.array_equal(target.cache.memory(), target.cache.expected(expected))
    del out, came
    inbox.close()
    staging.close()
    target.close()


async def test_memory_that_nixl_refuses_is_the_hosts_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    staging = NixlStaging(SLOTS, SIZE, gpu=0)
    inbox = NixlInbox(staging.offer(), gpu=0)
    assert caplog.text.count("NIXL brings blocks through the host's memory: ") == 2
    slot = await staging.acquire(1)
    (await staging.channel(inbox.token).buffer(slot))[:5] = b"seven"
    assert bytes(await brought(staging, inbox, slot, 5)) == b"seven"
    inbox.close()
    staging.close()


def test_memory_that_no_rdma_device_reaches_is_the_hosts(
    mistaken: Mistaken, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attribute = CudaDriver.attribute
    monkeypatch.setattr(
        CudaDriver, "attribute", lambda gpu, what: what != ipc.CAN_RDMA and attribute(gpu, what)
    )
    staging = NixlStaging(SLOTS, SIZE, gpu=1)
    assert "RDMA devices don't reach memory of GPU 1" in caplog.text
    assert staging.memory is not None
    assert not mistaken.gpus
    staging.close()


@pytest.mark.parametrize(("knows", "kind"), [(True, "VRAM"), (False, "DRAM")])
def test_a_source_that_knows_no_gpus_is_given_memory_of_the_host(
    mistaken: Mistaken, knows: bool, kind: str
) -> None:
    """One of the version before."""
    offered = nixl.RdmaOffer(SLOTS, SIZE, gpus=True) if knows else BufferShape(SLOTS, SIZE)
    inbox = NixlInbox(Offer("nixl", offered.token()), gpu=1)
    place = msgspec.json.decode(inbox.token, type=RdmaPlace)
    assert (place.kind, place.device) == (kind, int(knows))
    inbox.close()


def test_memory_of_another_kind_is_no_place(mistaken: Mistaken) -> None:
    staging = NixlStaging(SLOTS, SIZE)
    token = msgspec.json.encode(
        {"metadata": "", "base": 0, "slot_bytes": SIZE, "kind": "FILE", "device": 0}
    )
    with pytest.raises(PeerError, match="not a token of NIXL"):
        staging.channel(token.decode())
    staging.close()


def test_ucxs_transports_of_gpus_are_asked_for_by_name(
    mistaken: Mistaken, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "")
    monkeypatch.delenv("UCX_TLS")
    staging = NixlStaging(SLOTS, SIZE, gpu=1)
    assert {"cuda_ipc", "gdr_copy"} < {*os.environ["UCX_TLS"].split(",")}
    assert "NIXL, GPU 1: gdr_copy isn't there (no /dev/gdrdrv)" in caplog.text
    staging.close()


@pytest.mark.parametrize(
    ("chosen", "dma_buf", "files", "said"),
    [
        (ucx.NAMED, True, ["dev/gdrdrv"], []),
        (ucx.NAMED, False, ["dev/gdrdrv", "sys/module/nvidia_peermem"], []),
        (ucx.NAMED, False, ["dev/gdrdrv"], ["nvidia_peermem isn't loaded"]),
        (ucx.NAMED, True, [], ["gdr_copy isn't there"]),
        ("rc,cuda_copy", True, [], ["UCX_TLS is rc,cuda_copy, without cuda_ipc"]),
        ("rc,cuda", True, [], []),
    ],
)
def test_what_ucx_lacks_for_a_gpus_memory_is_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    chosen: str,
    dma_buf: bool,
    files: Sequence[str],
    said: Sequence[str],
) -> None:
    monkeypatch.setenv("UCX_TLS", chosen)
    for file in files:
        (tmp_path / file).mkdir(parents=True)
    found = list(ucx.find_fall_backs(dma_buf, tmp_path))
    assert len(found) == len(said)
    assert all(part in one for part, one in zip(said, found, strict=True))
