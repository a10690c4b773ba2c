"""GPU memory that processes share: mapped, used, and given back, whatever fails on the way."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import pytest

from kvmig.core.errors import KernelUnavailable, KvmigError
from kvmig.kernels import ipc
from kvmig.kernels.driver import CudaDriver, current_device
from tests.support import fake_gpu
from tests.support.fake_gpu import FakeGpu

NBYTES = 5_000_000
SIZE = 3 << 21
"""In whole pages of the device."""
AT = NBYTES - 4


def _import(pipe: Connection, device: int) -> None:
    """Another process: maps what it gets, reads, writes, and says what it found."""
    descriptor = recv_handle(pipe)
    with fake_gpu.installed():
        gpu = FakeGpu(device)
        try:
            mapping = ipc.open_descriptor(gpu, descriptor, SIZE)
        except KvmigError as error:
            pipe.send(str(error))
            return
        pipe.send(gpu.read(mapping.address + AT, 4))
        gpu.write(mapping.address + AT, b"back")
        pipe.send("written")
        pipe.recv()
        pipe.send(gpu.read(mapping.address + AT, 4))
        ipc.close(gpu, mapping)
    pipe.send("closed")


class Importer:
    def __init__(self, descriptor: int, device: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_import, args=(theirs, device), daemon=True)
        self.process.start()
        send_handle(self.pipe, descriptor, self.process.pid)

    def hear(self) -> object:
        assert self.pipe.poll(20)
        return self.pipe.recv()


@pytest.fixture
def gpu(gpus: None) -> Iterator[FakeGpu]:
    """After the test, all handles, mappings and descriptors are back."""
    made = FakeGpu()
    before = fake_gpu.held(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    yield made
    fake_gpu.fail("")
    assert (fake_gpu.held(), len(os.listdir("/proc/self/fd"))) == before  # noqa: PTH208


def lent(gpu: FakeGpu, device: int = 0) -> tuple[ipc.DeviceMapping, Importer]:
    """Memory that another process has read and written, too."""
    mapping, descriptor = ipc.create(gpu, NBYTES)
    assert mapping.size == SIZE
    gpu.write(mapping.address + AT, b"here")
    peer = Importer(descriptor, device)
    os.close(descriptor)
    assert (peer.hear(), peer.hear()) == (b"here", "written")
    return mapping, peer


def found(peer: Importer) -> object:
    """What is in the memory when the other process closes it, and ends."""
    peer.pipe.send("go on")
    last = peer.hear()
    assert peer.hear() == "closed"
    peer.process.join(20)
    return last


@pytest.mark.parametrize("device", [0, 1])
def test_another_process_reads_and_writes_the_same_memory(device: int) -> None:
    with fake_gpu.installed():
        gpu = FakeGpu()
        mapping, peer = lent(gpu, device)
        assert gpu.read(mapping.address + AT, 4) == found(peer) == b"back"
        ipc.close(gpu, mapping)


def test_memory_that_its_owner_closes_stays_a_peers_and_becomes_nobody_elses() -> None:
    """A4: a late write of a peer meets no data of this process."""
    with fake_gpu.installed():
        gpu = FakeGpu()
        mapping, peer = lent(gpu)
        ipc.close(gpu, mapping)
        other = gpu.allocate(NBYTES)
        gpu.write(other, bytes(NBYTES))
        assert found(peer) == b"back"
        assert gpu.read(other, NBYTES) == bytes(NBYTES)
        gpu.free(other)


def test_a_peer_that_is_killed_leaves_the_memory_as_it_is() -> None:
    with fake_gpu.installed():
        gpu = FakeGpu()
        mapping, peer = lent(gpu)
        peer.process.kill()
        peer.process.join(20)
        assert gpu.read(mapping.address + AT, 4) == b"back"
        ipc.close(gpu, mapping)


def test_a_device_without_access_to_the_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu.installed():
        gpu = FakeGpu()
        mapping, descriptor = ipc.create(gpu, NBYTES)
        monkeypatch.setenv("KVMIG_FAKE_NO_PEERS", "1")
        with pytest.raises(KvmigError, match="cuMemSetAccess: invalid device"):
            ipc.let(CudaDriver(1), mapping)
        os.close(descriptor)
        ipc.close(gpu, mapping)


def test_another_device_of_this_process_can_be_let_in(gpu: FakeGpu) -> None:
    mapping, descriptor = ipc.create(gpu, NBYTES)
    os.close(descriptor)
    other = FakeGpu(1)
    ipc.let(other, mapping)
    other.write(mapping.address, b"other")
    assert gpu.read(mapping.address, 5) == b"other"
    ipc.close(gpu, mapping)


def test_memory_of_this_process_is_not_mapped_a_second_time(gpu: FakeGpu) -> None:
    mapping, descriptor = ipc.create(gpu, NBYTES)
    with pytest.raises(KvmigError, match="cuMemImportFromShareableHandle"):
        ipc.open_descriptor(gpu, descriptor, SIZE)
    os.close(descriptor)
    ipc.close(gpu, mapping)


@pytest.mark.parametrize(
    "step",
    [
        *("cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle"),
        *("cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"),
    ],
)
def test_memory_that_cannot_be_made_leaves_nothing(gpu: FakeGpu, step: str) -> None:
    fake_gpu.fail(step)
    with pytest.raises(KvmigError, match=step):
        ipc.create(gpu, NBYTES)


def test_memory_that_goes_on_another_devices_thread_leaves_it_its_device(gpu: FakeGpu) -> None:
    """A finaliser runs anywhere, also in the middle of a step of an engine on another device."""
    mapping, descriptor = ipc.create(gpu, NBYTES)
    os.close(descriptor)
    FakeGpu(1).enter()
    ipc.close(gpu, mapping)
    assert current_device() == 1


def test_a_device_that_cannot_share_says_so(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "attribute", lambda number: 0)
    with pytest.raises(KernelUnavailable, match="GPU 0 can't share memory by file descriptors"):
        ipc.create(gpu, NBYTES)


def test_what_is_no_memory_of_a_gpu_is_refused(gpu: FakeGpu) -> None:
    with open("/dev/zero", "rb") as file, pytest.raises(KvmigError, match="cuMemImport"):  # noqa: PTH123
        ipc.open_descriptor(gpu, file.fileno(), SIZE)


# -- what a worker has allocated


def _allocate(pipe: Connection, device: int) -> None:
    """A worker: its memory, opened elsewhere; says what it finds there at the end."""
    with fake_gpu.installed():
        gpu = FakeGpu(device)
        address = gpu.allocate(NBYTES)
        gpu.write(address + AT, b"here")
        pipe.send(ipc.export_allocation(gpu, address + AT))
        pipe.recv()
        pipe.send(gpu.read(address + AT, 4))
        gpu.free(address)


@pytest.fixture(params=[0, 1])
def worker(request: pytest.FixtureRequest) -> Iterator[Connection]:
    """A process with memory on either device."""
    context = multiprocessing.get_context("forkserver")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_allocate, args=(theirs, request.param), daemon=True)
    process.start()
    yield pipe
    process.join(20)
    assert process.exitcode == 0


def test_one_device_reads_and_writes_what_workers_have_allocated(
    worker: Connection, gpu: FakeGpu
) -> None:
    assert worker.poll(20)
    exported = worker.recv()
    address = ipc.open_allocation(gpu, exported)
    assert gpu.read(address, 4) == b"here"
    gpu.write(address, b"back")
    ipc.close_allocation(gpu, exported, address)
    worker.send("go on")
    assert worker.recv() == b"back"


def test_a_worker_on_a_device_out_of_reach_is_named(
    worker: Connection, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.poll(20)
    exported = worker.recv()
    monkeypatch.setenv("KVMIG_FAKE_NO_PEERS", "1")
    other = FakeGpu(1 - exported.gpu)
    words = f"GPU {other.ordinal} can't open memory of GPU {exported.gpu}: .*peer access is not"
    with pytest.raises(KernelUnavailable, match=words):
        ipc.open_allocation(other, exported)
    worker.send("go on")


def test_memory_that_is_mapped_piece_by_piece_is_refused_by_name(gpu: FakeGpu) -> None:
    """As torch's expandable segments are."""
    mapping, descriptor = ipc.create(gpu, NBYTES)
    os.close(descriptor)
    with pytest.raises(KernelUnavailable, match="of GPU 0 that wasn't made by cudaMalloc"):
        ipc.export_allocation(gpu, mapping.address)
    ipc.close(gpu, mapping)


def test_devices_say_whether_they_reach_each_other(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu.reaches(1)
    monkeypatch.setenv("KVMIG_FAKE_NO_PEERS", "1")
    assert not gpu.reaches(1)
