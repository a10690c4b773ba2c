"""The driver's calls, against a driver of the tests' own that takes what the real one would."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_void_p

import numpy as np
import pytest

from kvmig.core.errors import KernelUnavailable, KvmigError
from kvmig.core.layout import BlockRegion
from kvmig.kernels import driver, select
from kvmig.kernels.api import BlockCopy
from kvmig.kernels.driver import CopyAttributes, CudaDriver
from kvmig.kernels.gpu import GpuKernels
from tests.support import fake_gpu
from tests.support.fake_gpu import DeviceCache, FakeGpu, FakeKernels
from tests.support.inside import forget_driver
from tests.support.kernel_backends import ORACLE
from tests.support.poisoned import make_cache

pytestmark = pytest.mark.usefixtures("gpus")

SIZE = 4096


def in_a_new_thread(call: Callable[[], object]) -> object:
    """Its result, or its error raised here: a new thread has no context."""
    outcomes: list[object] = []

    def run() -> None:
        try:
            outcomes.append(call())
        except KvmigError as error:
            outcomes.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    (outcome,) = outcomes
    if isinstance(outcome, KvmigError):
        raise outcome
    return outcome


def test_blocks_are_copied_through_all_of_the_gpus_path() -> None:
    device = FakeGpu()
    kernels = FakeKernels(device)
    stream = device.new_stream(priority=-5)
    host = [make_cache(seed, [48, 4096], [0, 16], 4) for seed in (1, 2)]
    source, target = (DeviceCache(device, one) for one in host)
    ids = np.array([1, 2], np.int64), np.array([3, 0], np.int64)
    blocks = BlockCopy(source.layout.regions, target.layout.regions, *ids)
    call = kernels.copy(blocks, checksums=True, stream=stream)
    assert call.wait() == ORACLE.checksum(host[0].layout.regions, ids[0]).wait()
    moved = {3: host[0].block(1), 0: host[0].block(2)}
    assert np.array_equal(target.memory(), target.expected(moved))
    for one in (source, target):
        one.free()
    kernels.close()
    device.destroy_stream(stream)


def test_every_call_enters_the_devices_context_itself() -> None:
    """A8: the engine's thread may have none, as before its first step that launches something."""
    device = CudaDriver()
    stream, event, memory = device.new_stream(), device.new_event(), device.allocate(SIZE)
    pinned = device.allocate_pinned(SIZE)
    in_a_new_thread(lambda: device.upload(memory, pinned, SIZE, stream))
    in_a_new_thread(lambda: device.clear(memory, SIZE, stream))
    in_a_new_thread(lambda: device.move(memory, memory + 512, 512, stream))
    in_a_new_thread(lambda: device.download(pinned, memory, SIZE, stream))
    in_a_new_thread(lambda: device.record(event, 0))
    in_a_new_thread(lambda: device.wait(stream, event))
    in_a_new_thread(lambda: device.happened(event))
    in_a_new_thread(lambda: device.free_pinned(pinned))
    in_a_new_thread(lambda: device.free(memory))
    in_a_new_thread(lambda: device.destroy_event(event))
    in_a_new_thread(lambda: device.destroy_stream(stream))


def test_a_stream_of_another_device_is_refused() -> None:
    first, second = CudaDriver(0), CudaDriver(1)
    stream, event, memory = first.new_stream(), second.new_event(), second.allocate(SIZE)
    with pytest.raises(KvmigError, match=r"cuMemsetD8Async: .*\(CUDA error 400\)"):
        second.clear(memory, SIZE, stream)
    with pytest.raises(KvmigError, match=r"cuEventRecord: .*\(CUDA error 400\)"):
        first.record(event, stream)
    first.destroy_stream(stream)
    second.destroy_event(event)
    second.free(memory)


def test_each_device_of_a_process_has_kernels_of_its_own() -> None:
    """A7: those of the first device would refuse the second one's streams."""
    for ordinal in (0, 1):
        device = FakeGpu(ordinal)
        device.enter()
        kernels = select.kernels("cuda")
        assert isinstance(kernels, GpuKernels)
        host = make_cache(1, [64], [0], 2)
        cache, stream = DeviceCache(device, host), device.new_stream()
        ids = np.array([1], np.int64)
        found = kernels.checksum(cache.layout.regions, ids, stream=stream).wait()
        assert found == ORACLE.checksum(host.layout.regions, ids).wait()
        cache.free()
        device.destroy_stream(stream)


def test_a_call_beside_a_capture_leaves_the_graph_whole() -> None:
    """Another engine of the process captures its graphs while blocks are copied."""
    engine, copies = FakeGpu(), FakeGpu()
    stream, graph = engine.new_stream(), c_void_p()
    handle, mode = c_void_p(stream), c_int(0)
    engine.call("cuStreamBeginCapture_v2", handle, mode)
    event = copies.new_event()
    assert in_a_new_thread(lambda: copies.happened(event))
    copies.free(copies.allocate(SIZE))
    engine.call("cuStreamEndCapture", handle, byref(graph))
    copies.destroy_event(event)
    engine.destroy_stream(stream)


def test_memory_of_the_host_that_is_not_pinned_is_refused() -> None:
    device, memory = CudaDriver(), ctypes.create_string_buffer(SIZE)
    there = device.allocate(SIZE)
    with pytest.raises(KvmigError, match="cuMemcpyHtoDAsync_v2: invalid argument"):
        device.upload(there, ctypes.addressof(memory), SIZE, 0)
    device.free(there)


@pytest.mark.parametrize("beyond", ["of the other device", "freed", "too far"])
def test_an_access_outside_of_its_memory_is_the_devices_end(beyond: str) -> None:
    device, other = FakeGpu(), FakeGpu(1)
    kernels, host = FakeKernels(device), make_cache(1, [64], [0], 2)
    cache, foreign = DeviceCache(device, host), DeviceCache(other, host)
    regions = foreign.layout.regions if "other" in beyond else cache.layout.regions
    foreign.free()
    if beyond == "freed":
        cache.free()
    ids = np.array([100 if beyond == "too far" else 1], np.int64)
    with pytest.raises(KvmigError, match=r"an illegal memory access .*\(CUDA error 700\)"):
        kernels.checksum(regions, ids).wait()
    with pytest.raises(KvmigError, match="CUDA error 700"):
        device.new_event()
    fake_gpu.library().fakegpu_mend()
    if beyond != "freed":
        cache.free()
    kernels.close()


TOUCH = """
import ctypes
from tests.support import fake_gpu
with fake_gpu.installed():
    gpu = fake_gpu.FakeGpu()
    print(ctypes.string_at(gpu.allocate(8), 8))
"""


def test_the_host_cannot_touch_the_devices_memory() -> None:
    fake_gpu.path()
    done = subprocess.run(
        [sys.executable, "-c", TOUCH], check=False, capture_output=True, timeout=60,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, b""), done.stderr


TAKEN_AWAY = """
import signal
import pytest
import numpy as np
from kvmig.core.errors import KvmigError
from tests.support import fake_gpu
from tests.support.fake_gpu import DeviceCache, FakeGpu, FakeKernels
from tests.support.poisoned import make_cache
with fake_gpu.installed():
    device = FakeGpu()
    kernels = FakeKernels(device)
    cache = DeviceCache(device, make_cache(1, [64], [0], 2))
    kernels.checksum(cache.layout.regions, np.array([1], np.int64)).wait()
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    with pytest.raises(KvmigError, match="CUDA error 700"):
        kernels.checksum(cache.layout.regions, np.array([100], np.int64)).wait()
    fake_gpu.library().fakegpu_mend()
    cache.free()
    kernels.close()
"""


def test_a_library_that_takes_the_signal_of_faults_hides_no_illegal_access() -> None:
    fake_gpu.path()
    done = subprocess.run(
        [sys.executable, "-c", TAKEN_AWAY], check=False, capture_output=True, timeout=60,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_end_of_a_call_may_be_awaited_by_another_thread() -> None:
    device = FakeGpu()
    stream, event = device.new_stream(), device.new_event()
    device.stick()
    device.record(event, stream)
    assert in_a_new_thread(lambda: device.happened(event)) is False
    device.stick(False)
    device.finish(stream)
    assert in_a_new_thread(lambda: device.happened(event)) is True
    device.destroy_event(event)
    device.destroy_stream(stream)


def test_the_device_says_what_it_is() -> None:
    device = CudaDriver()
    assert driver.version() == 13000
    assert device.multiprocessors == 2
    assert device.stream_priorities() == (0, fake_gpu.HIGHEST)
    CudaDriver(1).enter()
    assert driver.current_device() == 1


def test_memory_is_cleared_and_given_back() -> None:
    device = FakeGpu()
    address = device.allocate(16)
    device.write(address, b"\x01" * 16)
    device.clear(address, 15, 0)
    assert device.read(address, 16) == bytes(15) + b"\x01"
    device.free(address)
    with pytest.raises(KvmigError, match=r"cuMemFree_v2: invalid argument \(CUDA error 1\)"):
        device.free(address)


def test_memory_of_the_host_is_pinned_where_it_is() -> None:
    device, memory = CudaDriver(), ctypes.create_string_buffer(64)
    address = ctypes.addressof(memory)
    device.pin(address, 64, read_only=False)
    with pytest.raises(KvmigError, match="cuMemHostRegister_v2"):
        device.pin(address, 64, read_only=True)
    device.unpin(address)
    device.pin(address, 64, read_only=True)
    device.unpin(address)
    with pytest.raises(KvmigError, match="cuMemHostUnregister"):
        device.unpin(address)


def test_a_stream_waits_for_an_event_of_another() -> None:
    device, order = FakeGpu(), list[str]()
    first, second, event = device.new_stream(), device.new_stream(), device.new_event()
    gate = threading.Event()
    device.queue(first, lambda: gate.wait(20))
    device.queue(first, lambda: order.append("first"))
    device.record(event, first)
    device.wait(second, event)
    device.queue(second, lambda: order.append("second"))
    gate.set()
    device.finish(second)
    assert order == ["first", "second"]
    with pytest.raises(KvmigError, match="cuStreamWaitEvent: invalid resource handle"):
        device.wait(second, event + 8)
    device.destroy_event(event)
    device.destroy_stream(first)
    device.destroy_stream(second)


def test_a_call_that_fails_says_which() -> None:
    device = CudaDriver()
    fake_gpu.fail("cuMemHostAlloc")
    with pytest.raises(KvmigError, match="cuMemHostAlloc: invalid argument"):
        device.allocate_pinned(8)


def test_a_function_that_the_driver_lacks_makes_it_too_old() -> None:
    with pytest.raises(KernelUnavailable, match="driver is too old: it has no cuMemFly"):
        CudaDriver().call("cuMemFly")


def test_a_device_that_is_not_there_cannot_be_used() -> None:
    with pytest.raises(KernelUnavailable, match="GPU 7 can't be used: cuDeviceGet"):
        CudaDriver(7)


def test_a_driver_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_driver()
    with monkeypatch.context() as patch:
        patch.setenv("KVMIG_FAKE_NO_GPU", "1")
        with pytest.raises(KernelUnavailable, match=r"no NVIDIA GPU can be used: no CUDA-capable"):
            CudaDriver()


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_driver()
    with monkeypatch.context() as patch:
        patch.setattr(driver, "LIBRARY", "libcuda-that-is-nowhere.so.1")
        with pytest.raises(KernelUnavailable, match="no NVIDIA driver: libcuda-that-is-nowhere"):
            driver.version()


# -- the copy engines


def copied_by_the_engines(cache: DeviceCache, target: DeviceCache, gpu: FakeGpu) -> None:
    stream = gpu.new_stream()
    ids = np.array([3, 3, 1], np.int64), np.array([0, 2, 1], np.int64)
    try:
        gpu.copy_blocks(cache.layout.regions, target.layout.regions, *ids, stream)
        gpu.finish(stream)
    finally:
        gpu.destroy_stream(stream)


def test_the_copy_engines_copy_every_run_and_nothing_else() -> None:
    gpu = FakeGpu()
    host = [make_cache(seed, [48, 0, 7], [0, 8, 1], 4) for seed in (1, 2)]
    source, target = (DeviceCache(gpu, one) for one in host)
    copied_by_the_engines(source, target, gpu)
    blocks = {0: host[0].block(3), 2: host[0].block(3), 1: host[0].block(1)}
    assert np.array_equal(target.memory(), target.expected(blocks))
    source.free()
    target.free()


def test_the_copy_engines_are_asked_to_leave_the_sms_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A11."""
    gpu, asked = FakeGpu(), list[CopyAttributes]()
    monkeypatch.setattr(gpu, "call", lambda name, *given: asked.append(given[4]._obj))
    region, ids = [BlockRegion(4096, 16, 16)], np.zeros(1, np.int64)
    gpu.copy_blocks(region, region, ids, ids, stream=1)
    (how,) = asked
    assert (how.source_order, how.flags) == (1, 1)  # in the stream's order, beside kernels


def test_an_error_of_the_copy_engines_is_handed_on() -> None:
    gpu = FakeGpu()
    cache = DeviceCache(gpu, make_cache(1, [16], [0], 4))
    fake_gpu.fail("cuMemcpyBatchAsync")
    with pytest.raises(KvmigError, match="cuMemcpyBatchAsync: invalid argument"):
        copied_by_the_engines(cache, cache, gpu)
    cache.free()


def test_nothing_to_copy_is_no_call() -> None:
    none = np.zeros(0, np.int64)
    fake_gpu.fail("cuMemcpyBatchAsync")
    CudaDriver().copy_blocks((), (), none, none, stream=1)


def test_who_waits_for_the_device_waits_for_streams_that_were_destroyed_with_work_left() -> None:
    gpu, done = FakeGpu(), threading.Event()
    stream = gpu.new_stream()
    gpu.queue(stream, lambda: time.sleep(0.05))
    gpu.queue(stream, done.set)
    gpu.destroy_stream(stream)
    gpu.settle()
    assert done.is_set()
