from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from kvmig.core.errors import PeerError, TransportError
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Chunk, TransportOffer
from kvmig.kvtransfer.transports import nixl, select, shm
from kvmig.kvtransfer.transports.base import KEPT, BufferShape, StagingPool, TransportInbox
from kvmig.kvtransfer.transports.cuda_ipc import ExportedMemory, IpcOrigin, host_identity
from kvmig.kvtransfer.transports.descriptors import DescriptorTicket
from kvmig.kvtransfer.transports.select import InboxCache, TransportSite, open_offer, open_staging
from kvmig.kvtransfer.transports.shm import ShmInbox, ShmStaging, ShmToken, sweep
from kvmig.kvtransfer.transports.tcp import TcpStaging
from kvmig.rpc.codec import Frame
from tests.support.waiting import until

CLUSTER = f"test{os.getpid()}"
SIZE = 4096


def files() -> list[str]:
    return [path.name for path in shm.FOLDER.glob(f"kvmig-{CLUSTER}-*")]


def mappings(pid: int | None = None) -> int:
    maps = Path(f"/proc/{pid or 'self'}/maps").read_text()
    return sum(f"kvmig-{CLUSTER}-" in line for line in maps.splitlines())


def descriptors() -> int:
    links = (str(link.resolve()) for link in Path("/proc/self/fd").iterdir())
    return sum(f"kvmig-{CLUSTER}-" in link for link in links)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert files() == []
    assert mappings() == 0
    assert descriptors() == 0


@pytest.fixture
def shared() -> Iterator[ShmStaging]:
    staging = ShmStaging(CLUSTER, "a", 2, SIZE)
    yield staging
    staging.close()


@pytest.fixture(params=["shm", "tcp"])
def staging(request: pytest.FixtureRequest) -> Iterator[StagingPool]:
    transport = request.param
    (staging,) = open_staging(transport, CLUSTER, "a", 2, SIZE).values()
    assert staging.transport == transport
    yield staging
    staging.close()


def chunk(slot: int, nbytes: int) -> Chunk:
    return Chunk("m", stage=0, first=0, slot=slot, nbytes=nbytes, checksums=[])


async def send(staging: StagingPool, slot: int, inbox: TransportInbox, nbytes: int) -> memoryview:
    sent: list[tuple[Chunk, bytes | memoryview | None]] = []

    def announce(payload: Sequence[Frame] = (), number: int = 0) -> None:
        wire_slot = PAYLOAD_SLOT if payload else slot
        frame = memoryview(payload[0]) if payload else None
        sent.append((replace(chunk(wire_slot, nbytes), number=number), frame))

    await staging.channel(inbox.token).push(chunk(slot, nbytes), announce)
    ((said, payload),) = sent
    return await inbox.receive(said, payload)


async def test_what_is_gathered_at_the_source_is_seen_at_the_destination(
    staging: StagingPool,
) -> None:
    inbox = open_offer([staging.offer()])
    slots = [await staging.acquire(1.0) for _ in range(2)]
    for slot, text in zip(slots, (b"one", b"second"), strict=True):
        (await staging.channel(inbox.token).buffer(slot))[: len(text)] = text
    assert bytes(await send(staging, slots[0], inbox, 3)) == b"one"
    assert bytes(await send(staging, slots[1], inbox, 6)) == b"second"
    inbox.close()


async def test_the_destination_cannot_write_what_it_sees(staging: StagingPool) -> None:
    inbox = open_offer([staging.offer()])
    slot = await staging.acquire(1.0)
    assert (await send(staging, slot, inbox, 8)).readonly
    inbox.close()


async def test_a_slot_time_out_says_so_and_keeps_the_pool_whole(staging: StagingPool) -> None:
    held = [await staging.acquire(1.0) for _ in range(2)]
    with pytest.raises(TransportError, match=r"no free staging slot of 2 within 0.01 s"):
        await staging.acquire(0.01)
    for slot in held:
        staging.release(slot)
    assert sorted([await staging.acquire(1.0), await staging.acquire(1.0)]) == sorted(held)


async def test_a_released_slot_wakes_the_one_who_waits(staging: StagingPool) -> None:
    held = [await staging.acquire(1.0) for _ in range(2)]
    waiter = asyncio.create_task(staging.acquire(5.0))
    await asyncio.sleep(0)
    staging.release(held[0])
    assert await waiter == held[0]
    assert staging.held == 2


async def test_a_cancelled_wait_loses_no_slot(staging: StagingPool) -> None:
    held = [await staging.acquire(1.0) for _ in range(2)]
    waiter = asyncio.create_task(staging.acquire(5.0))
    await asyncio.sleep(0)
    staging.release(held[0])
    waiter.cancel()
    await asyncio.wait([waiter])
    assert await staging.acquire(1.0) == held[0]


async def test_a_slot_is_released_once(staging: StagingPool) -> None:
    slot = await staging.acquire(1.0)
    staging.release(slot)
    with pytest.raises(ValueError, match="not acquired"):
        staging.release(slot)


async def test_close_fails_everyone_who_waits(staging: StagingPool) -> None:
    held = [await staging.acquire(1.0) for _ in range(2)]
    channel = staging.channel("")
    waiters = [asyncio.create_task(staging.acquire(5.0)) for _ in range(2)]
    await asyncio.sleep(0)
    staging.close()
    for waiter in waiters:
        with pytest.raises(TransportError, match="closed"):
            await waiter
    staging.release(held[0])
    staging.close()
    with pytest.raises(TransportError, match="closed"):
        await channel.buffer(held[0])


async def test_a_view_in_use_outlives_close(shared: ShmStaging) -> None:
    inbox = ShmInbox(shared.offer())
    slot = await shared.acquire(1.0)
    shared.buffer(slot)[:4] = b"kept"
    view = await send(shared, slot, inbox, 4)
    inbox.close()
    shared.close()
    assert bytes(view) == b"kept"


async def test_auto_takes_shared_memory_first_and_tcp_when_the_memory_is_not_the_same() -> None:
    stagings = open_staging("auto", CLUSTER, "a", 1, SIZE)
    offers = [staging.offer() for staging in stagings.values()]
    assert [offer.transport for offer in offers] == ["shm", "tcp"]
    inbox = open_offer(offers)
    assert inbox.transport == "shm"
    inbox.close()
    forged = TransportOffer("shm", offers[0].token.replace(_nonce(offers[0]), "00" * 16))
    assert open_offer([forged, offers[1]]).transport == "tcp"
    for staging in stagings.values():
        staging.close()


def _nonce(offer: TransportOffer) -> str:
    return offer.token.split('"nonce":"')[1].split('"')[0]


def test_a_side_that_forces_a_transport_refuses_the_other(shared: ShmStaging) -> None:
    with pytest.raises(TransportError, match="shm: this side takes tcp only"):
        open_offer([shared.offer()], "tcp")


@pytest.mark.parametrize(
    "offer",
    [
        TransportOffer("shm", "not json"),
        TransportOffer("shm", '{"file":"../etc/passwd","nonce":"","slots":1,"slot_bytes":1}'),
        TransportOffer("shm", '{"file":"kvmig-gone-a-1","nonce":"","slots":1,"slot_bytes":1}'),
        TransportOffer("pigeon"),
    ],
)
def test_an_offer_that_does_not_work_is_refused_with_a_reason(offer: TransportOffer) -> None:
    with pytest.raises(TransportError, match=offer.transport):
        open_offer([offer])


def test_a_file_of_another_size_is_not_mapped(shared: ShmStaging) -> None:
    token = shared.offer().token.replace('"slots":2', '"slots":3')
    with pytest.raises(TransportError, match="is not the source's memory"):
        open_offer([TransportOffer("shm", token)])


@pytest.mark.parametrize(("slot", "nbytes"), [(2, 8), (-1, 8), (0, SIZE + 1), (0, -1)])
async def test_a_chunk_outside_the_shared_slots_is_the_peers_error(
    shared: ShmStaging, slot: int, nbytes: int
) -> None:
    inbox = ShmInbox(shared.offer())
    with pytest.raises(PeerError):
        await inbox.receive(chunk(slot, nbytes), None)
    inbox.close()


@pytest.mark.parametrize("payload", [None, b"short"])
async def test_a_chunk_without_all_its_bytes_is_the_peers_error(payload: bytes | None) -> None:
    inbox = open_offer([TransportOffer("tcp")])
    with pytest.raises(PeerError):
        await inbox.receive(chunk(PAYLOAD_SLOT, 8), payload)


async def test_a_source_is_mapped_once_and_unmapped_after_its_end() -> None:
    inboxes = InboxCache()
    first, second = (ShmStaging(CLUSTER, name, 1, SIZE) for name in "ab")
    assert await inboxes.open([first.offer()]) is await inboxes.open([first.offer()])
    first.close()
    await inboxes.open([second.offer()])
    assert len(inboxes) == 1
    second.close()
    inboxes.close()
    assert len(inboxes) == 0


async def test_an_inbox_that_nobody_can_copy_from_is_closed(shared: ShmStaging) -> None:
    async def fail(memory: memoryview) -> None:
        assert memory.nbytes >= SIZE
        raise TransportError("no")

    inboxes = InboxCache(ready=fail)
    with pytest.raises(TransportError, match="no"):
        await inboxes.open([shared.offer()])
    inboxes.close()


async def test_what_is_held_for_a_source_that_has_ended_is_freed_though_no_other_one_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(select, "LOOK_S", 0.01)
    inboxes = InboxCache()
    stays, ends = (ShmStaging(CLUSTER, name, 1, SIZE) for name in "ab")
    for one in (stays, ends):
        await inboxes.open([one.offer()])
    ends.close()
    await until(lambda: len(inboxes) == 1)
    stays.close()
    await until(lambda: len(inboxes) == 0)
    inboxes.close()


def test_the_file_is_its_owners_alone(shared: ShmStaging) -> None:
    (name,) = files()
    assert (shm.FOLDER / name).stat().st_mode & 0o777 == 0o600
    assert name.startswith(f"kvmig-{CLUSTER}-a-")


def test_without_its_folder_auto_goes_over_tcp_and_shm_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stagings = open_staging("auto", CLUSTER, "a", 1, SIZE, TransportSite(tmp_path / "none"))
    assert list(stagings) == ["tcp"]
    assert "No such file" in caplog.text
    with pytest.raises(TransportError, match="none: No such file"):
        open_staging("shm", CLUSTER, "a", 1, SIZE, TransportSite(tmp_path / "none"))


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_folder_makes_auto_go_over_tcp_and_shm_fail(tiny: Path) -> None:
    assert list(open_staging("auto", CLUSTER, "a", 4, 1 << 20, TransportSite(tiny))) == ["tcp"]
    with pytest.raises(TransportError, match=r"bytes of shared memory.*No space left"):
        open_staging("shm", CLUSTER, "a", 4, 1 << 20, TransportSite(tiny))
    assert list(tiny.iterdir()) == []


def test_more_than_the_folder_holds_is_refused_at_the_start() -> None:
    with pytest.raises(TransportError, match=r"bytes of shared memory"):
        ShmStaging(CLUSTER, "a", 1, 1 << 50)


# -- real processes

SOURCE = """
import asyncio, pathlib, sys
from kvmig.kvtransfer.transports.shm import ShmStaging
staging = ShmStaging(sys.argv[1], "src", 1, 4096, pathlib.Path(sys.argv[2]))
staging.buffer(asyncio.run(staging.acquire(1.0)))[:5] = b"alive"
print(staging.offer().token, flush=True)
sys.stdin.read()
"""
DESTINATION = """
import asyncio, sys
from kvmig.kvtransfer.messages import Chunk, TransportOffer
from kvmig.kvtransfer.transports.shm import ShmInbox
inbox = ShmInbox(TransportOffer("shm", sys.argv[1]))
view = asyncio.run(inbox.receive(Chunk("m", 0, 0, 0, 5, []), None))
print(bytes(view).decode(), flush=True)
sys.stdin.read()
"""
Process = subprocess.Popen[str]


@pytest.fixture
def spawn() -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(program: str, *arguments: str) -> Process:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=10)


def first_line(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: Process) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)


async def test_a_killed_destination_leaves_nothing_and_the_source_goes_on(
    spawn: Callable[..., Process], shared: ShmStaging
) -> None:
    slot = await shared.acquire(1.0)
    shared.buffer(slot)[:5] = b"hello"
    destination = spawn(DESTINATION, shared.offer().token)
    assert first_line(destination) == "hello"
    assert mappings(destination.pid) == 1
    kill(destination)
    assert len(files()) == 1
    shared.release(slot)
    inbox = open_offer([shared.offer()])
    assert bytes(await inbox.receive(chunk(slot, 5), None)) == b"hello"
    inbox.close()


async def test_a_killed_sources_file_is_swept_and_only_that(
    spawn: Callable[..., Process], tmp_path: Path
) -> None:
    alive = ShmStaging(CLUSTER, "a", 1, SIZE, tmp_path)
    source = spawn(SOURCE, CLUSTER, str(tmp_path))
    offer = TransportOffer("shm", first_line(source))
    inbox = ShmInbox(offer, tmp_path)
    assert sweep(folder=tmp_path) == []
    kill(source)
    assert bytes(await inbox.receive(chunk(0, 5), None)) == b"alive"
    assert sweep(folder=tmp_path) == [ShmToken.from_offer(offer).file]
    assert inbox.stale
    inbox.close()
    assert os.listdir(tmp_path) == [ShmToken.from_offer(alive.offer()).file]  # noqa: PTH208
    alive.close()


def test_sweeping_a_cluster_removes_its_files_and_no_other_clusters(shared: ShmStaging) -> None:
    other = ShmStaging(f"{CLUSTER}x", "a", 1, SIZE)
    assert sweep(CLUSTER) == [ShmToken.from_offer(shared.offer()).file]
    ShmInbox(other.offer()).close()
    other.close()


def test_a_pool_of_private_memory_leaves_no_file() -> None:
    staging = TcpStaging(2, SIZE)
    assert files() == []
    staging.close()


# -- those that are had by name


def test_what_needs_a_gpu_says_so_at_the_door() -> None:
    with pytest.raises(TransportError, match="needs a KV cache in an NVIDIA GPU's memory"):
        open_staging("cuda-ipc", CLUSTER, "a", 1, SIZE)
    exported = ExportedMemory(DescriptorTicket("nowhere", "00"), SIZE)
    origin = IpcOrigin(host_identity(), BufferShape(1, SIZE), exported, "00")
    token = msgspec.json.encode(origin).decode()
    with pytest.raises(TransportError, match=r"cuda-ipc: .* needs a KV cache in an NVIDIA GPU's"):
        open_offer([TransportOffer("cuda-ipc", token)])


def test_nixl_without_its_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MODULES", ("nixl_of_nobody._api",))
    with pytest.raises(TransportError, match=r"not installed \(kvmig\[nixl\]\)"):
        open_staging("nixl", CLUSTER, "a", 1, SIZE)


def test_nixl_is_offered_where_there_is_rdma_and_only_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl, "MODULES", ("nixl_of_nobody._api",))
    monkeypatch.setattr(nixl, "RDMA", tmp_path)
    assert not nixl.has_rdma()
    (tmp_path / "mlx5_0").mkdir()
    stagings = open_staging("auto", CLUSTER, "a", 1, SIZE)
    assert list(stagings) == ["shm", "tcp"]
    assert "KV blocks don't go over nixl" in caplog.text
    for one in stagings.values():
        one.close()


@pytest.mark.parametrize(
    "token", ["no json", '{"slots":0,"slot_bytes":8}', '{"slots":1000000,"slot_bytes":1000000}']
)
@pytest.mark.parametrize("transport", ["nixl"])
def test_an_offer_of_buffers_that_cannot_be_is_refused(transport: str, token: str) -> None:
    with pytest.raises(TransportError, match=f"{transport}: (not a token|the source offers)"):
        open_offer([TransportOffer(transport, token)])


def test_memory_of_another_host_is_not_mapped() -> None:
    exported = ExportedMemory(DescriptorTicket("nowhere", "00"), SIZE)
    token = msgspec.json.encode(IpcOrigin("another", BufferShape(1, 8), exported, "00")).decode()
    with pytest.raises(TransportError, match="the source is on another host"):
        open_offer([TransportOffer("cuda-ipc", token)])


async def test_the_inboxes_of_too_many_sources_are_closed_the_oldest_first() -> None:
    inboxes = InboxCache()
    stagings = [ShmStaging(CLUSTER, "a", 1, SIZE) for _ in range(KEPT + 1)]
    first = await inboxes.open([stagings[0].offer()])
    for one in stagings[1:]:
        await inboxes.open([one.offer()])
    assert len(inboxes) == KEPT
    with pytest.raises(TransportError, match="was given up"):
        await first.receive(chunk(0, 8), None)
    inboxes.close()
    with pytest.raises(TransportError, match="stops"):
        await inboxes.open([stagings[0].offer()])
    for one in stagings:
        one.close()


async def test_an_inbox_that_is_opened_while_all_are_closed_is_closed_too(
    shared: ShmStaging,
) -> None:
    inboxes = InboxCache()
    opening = asyncio.create_task(inboxes.open([shared.offer()]))
    await asyncio.sleep(0)
    inboxes.close()
    await asyncio.wait([opening])
    if not opening.cancelled() and opening.exception() is None:
        assert opening.result().stale
