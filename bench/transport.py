"""How fast KV blocks travel between two processes, by transport and size.

Each transport that this machine has moves 128 KB to 256 MB from memory of this process into
memory of another one: copied into staging slots, brought over in chunks, announced on the
llumlets' own (CURVE) socket, copied out, acknowledged; as a migration does it, with plain
copies in place of gather and scatter. Times are from the start to the last acknowledgement.
memcpy is one copy of as many bytes in this process in the same run: a transport does at least
two of them. What arrived is compared with what was sent. `tcp-messages` is TCP without a lane, the
bytes in the messages, as it was before there were lanes; `tcp-large` is a lane in chunks of 32 MiB,
which instances on GPUs send. The processor time of either end says what a core could do by itself,
also where this machine has less to give.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, cast, get_args

from msgspec.structs import replace
from rich.table import Table

from bench import report
from bench.transport_peer import serve
from kvmig.core.config import MigrationConfig, Transport
from kvmig.core.errors import KvmigError, TransportError
from kvmig.kvtransfer.measured import CHUNK_BYTES, CHUNK_BYTES_ON_GPU
from kvmig.kvtransfer.messages import (
    PAYLOAD_SLOT,
    Chunk,
    ChunkDone,
    PeerMessage,
    Refused,
    Reserve,
    Reserved,
)
from kvmig.kvtransfer.transports.base import StagingPool, TransportChannel
from kvmig.kvtransfer.transports.select import TransportSite, open_staging
from kvmig.rpc.codec import Frame
from kvmig.rpc.zmq_sockets import RpcClient

KB = 1 << 10
SIZES = [128 * KB << 2 * step for step in range(6)] + [256 * KB * KB]
"""128 KB, 512 KB, 2 MB, 8 MB, 32 MB, 128 MB, 256 MB."""
REPEATS = 9
"""Of each size; as many seconds at most."""
TIMEOUT_S = 60.0
LINK_GB_S = 2.5
"""80 % of a link of 25 Gbit/s: what one core at either end should carry over TCP."""
LONG_RUN = ("tcp_*_gb_per_core_s",)
"""The largest size of a quick run takes less than a tick of the clock of processor time."""
MESSAGES, LARGE = "tcp-messages", "tcp-large"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """One transfer of `nbytes`; transport "memcpy" is the copy."""

    transport: str
    nbytes: int
    ms: float
    source_ms: float = 0.0
    """Processor time of the source, the mean of all transfers of the size."""
    destination_ms: float = 0.0


class Road:
    """One transport to the other process, open."""

    def __init__(self, client: RpcClient, staging: StagingPool, channel: TransportChannel) -> None:
        self._client = client
        self._staging = staging
        self._channel = channel
        self._sent: list[int] = []

    async def carry(self, source: memoryview) -> float:
        """Move `source` to the start of the other process's memory; returns milliseconds."""
        began = time.perf_counter()
        chunks = -(-len(source) // self._staging.slot_bytes)
        acknowledged = asyncio.ensure_future(self._acknowledge(chunks))
        for first in range(0, len(source), self._staging.slot_bytes):
            part = source[first : first + self._staging.slot_bytes]
            slot = await self._staging.acquire(TIMEOUT_S)
            (await self._channel.buffer(slot))[: len(part)] = part
            self._sent.append(slot)
            chunk = Chunk("bench", 0, first, slot, len(part), [])
            async with asyncio.timeout(TIMEOUT_S):
                await self._channel.push(chunk, partial(self._announce, chunk))
        await acknowledged
        return (time.perf_counter() - began) * 1e3

    def _announce(self, chunk: Chunk, payload: Sequence[Frame] = (), number: int = 0) -> None:
        slot = PAYLOAD_SLOT if payload else chunk.slot
        self._client.send(replace(chunk, slot=slot, number=number), payload)

    async def _acknowledge(self, count: int) -> None:
        for _ in range(count):
            async with asyncio.timeout(TIMEOUT_S):
                message, _ = await self._client.recv()
            if not isinstance(message, ChunkDone):
                raise TransportError(f"unexpected {message}")
            self._staging.release(self._sent.pop(0))


async def measure(
    name: str, endpoint: str, secret: bytes, source: memoryview, sizes: Sequence[int], peer: int
) -> list[Sample]:
    """All sizes over one transport, to process `peer`. Raises KvmigError if there is no such."""
    config, transport = MigrationConfig(), transport_of(name)
    site = TransportSite(host=None if name == MESSAGES else "127.0.0.1")
    slot, slots = CHUNK_BYTES_ON_GPU if name == LARGE else CHUNK_BYTES, config.staging_buffers
    stagings = open_staging(transport, "bench", "source", slots, slot, site)
    ((_, staging),) = stagings.items()
    client = RpcClient(endpoint, secret, "peer", f"source-{transport}", PeerMessage)
    try:
        client.send(Reserve("bench", "r", 0, 0, 0, offers=[staging.offer()]))
        async with asyncio.timeout(TIMEOUT_S):
            answer, _ = await client.recv()
        if isinstance(answer, Refused) or not isinstance(answer, Reserved):
            raise TransportError(f"{transport} was not taken: {answer}")
        road = Road(client, staging, staging.channel(answer.token))
        await road.carry(source[: sizes[0]])  # connections are made
        samples: list[Sample] = []
        for size in sizes:
            before = time.process_time(), processor_s(peer)
            times = await _repeat(partial(road.carry, source[:size]))
            after = time.process_time(), processor_s(peer)
            spent = [(b - a) * 1e3 / len(times) for a, b in zip(before, after, strict=True)]
            samples += [Sample(name, size, ms, *spent) for ms in times]
        return samples
    finally:
        client.close()
        staging.close()


def transport_of(name: str) -> Transport:
    """The transport by its name here."""
    return cast("Transport", "tcp" if name in (MESSAGES, LARGE) else name)


def processor_s(process: int) -> float:
    """Processor time that another process has taken, in the kernel's ticks."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def _repeat(carry: Callable[[], Any]) -> list[float]:
    until = time.perf_counter() + REPEATS
    found = [await carry()]
    while len(found) < REPEATS and time.perf_counter() < until:
        found.append(await carry())
    return found


def copies(source: memoryview, sizes: Sequence[int]) -> list[Sample]:
    """memcpy of each size into memory that has been touched."""
    target = memoryview(bytearray(len(source)))
    target[:] = source
    samples = []
    for size in sizes:
        for _ in range(REPEATS):
            began = time.perf_counter()
            target[:size] = source[:size]
            samples.append(Sample("memcpy", size, (time.perf_counter() - began) * 1e3))
    return samples


def run(names: Sequence[str], sizes: Sequence[int]) -> list[Sample]:
    """Every transport in turn, each with a destination of its own."""
    source = memoryview(bytearray(os.urandom(sizes[-1] // 64) * 64))
    samples = copies(source, sizes)
    for name in names:
        try:
            samples += _between_processes(name, source, sizes)
        except KvmigError as error:
            report.say(f"{name} is left out: {error}")
    return samples


def _between_processes(name: str, source: memoryview, sizes: Sequence[int]) -> list[Sample]:
    secret, context = secrets.token_bytes(32), multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, secret, len(source)), daemon=True)
    process.start()
    try:
        samples = asyncio.run(measure(name, _hear(pipe), secret, source, sizes, process.pid or 0))
        pipe.send(sizes[-1])
        if _hear(pipe) != blake2b(source[: sizes[-1]]).digest():
            raise RuntimeError(f"{name}: what arrived is not what was sent")
        pipe.send(None)
        process.join(TIMEOUT_S)
        return samples
    finally:
        process.kill()
        process.join()


def _hear(pipe: Connection) -> Any:
    if not pipe.poll(TIMEOUT_S):
        raise TransportError("the destination says nothing")
    return pipe.recv()


def middle(samples: Sequence[Sample]) -> dict[tuple[str, int], float]:
    """Median milliseconds of each transport and size."""
    found: dict[tuple[str, int], list[float]] = {}
    for one in samples:
        found.setdefault((one.transport, one.nbytes), []).append(one.ms)
    return {key: median(values) for key, values in found.items()}


def gb_s(nbytes: int, ms: float) -> float:
    """10^9 bytes a second."""
    return nbytes / ms / 1e6


def summarise(samples: Sequence[Sample]) -> tuple[dict[str, float], dict[str, report.Target]]:
    """Latency of the smallest size, GB/s of the biggest, and that over memcpy's."""
    times = middle(samples)
    least, most = min(size for _, size in times), max(size for _, size in times)
    copy = gb_s(most, times["memcpy", most])
    summary = {"memcpy_gb_s": copy}
    for name in dict.fromkeys(name for name, _ in times if name != "memcpy"):
        speed = gb_s(most, times[name, most])
        summary |= {
            f"{name}_latency_ms": times[name, least],
            f"{name}_gb_s": speed,
            f"{name}_over_memcpy": speed / copy,
        }
    # What `auto` prefers should be the faster one.
    summary["shm_over_tcp"] = summary["shm_gb_s"] / summary["tcp_gb_s"]
    targets: dict[str, report.Target] = {"shm_over_tcp": {"min": 1.0}}
    for name in ("tcp", LARGE, MESSAGES):
        largest = [one for one in samples if one.transport == name and one.nbytes == most]
        for end in ("source", "destination") if largest else ():
            spent = max(1e-3, median(getattr(one, f"{end}_ms") for one in largest))
            figure = f"{name}_{end}_gb_per_core_s"
            summary[figure] = gb_s(most, spent)
            if name != MESSAGES:
                targets[figure] = {"min": LINK_GB_S}
    return summary, targets


def tables(samples: Sequence[Sample]) -> list[Table]:
    """Milliseconds and GB/s, a row for each size."""
    times = middle(samples)
    names = list(dict.fromkeys(name for name, _ in times))
    rows = [
        [_size(size), *(_cell(size, times[name, size]) for name in names)]
        for size in dict.fromkeys(size for _, size in times)
    ]
    return [report.table("Median ms (GB/s)", ("size", *names), rows)]


def _size(nbytes: int) -> str:
    return f"{nbytes // KB} KB" if nbytes < KB * KB else f"{nbytes // KB // KB} MB"


def _cell(nbytes: int, ms: float) -> str:
    return f"{ms:.3g} ({gb_s(nbytes, ms):.2f})"


def draw(result: report.Result, file: Path) -> None:
    """GB/s over size, a line for each transport."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    times = middle([Sample(**one) for one in result.samples])
    figure, axis = pyplot.subplots(figsize=(6, 4))
    for name in dict.fromkeys(name for name, _ in times):
        sizes = [size for one, size in times if one == name]
        speeds = [gb_s(size, times[name, size]) for size in sizes]
        style = "--" if name == "memcpy" else "-"
        axis.plot([size / KB / KB for size in sizes], speeds, style, marker="o", label=name)
    axis.set(xscale="log", yscale="log", xlabel="MB", ylabel="GB/s")
    axis.grid(visible=True, alpha=0.3)
    axis.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    options = report.parser(__doc__, LONG_RUN).parse_args(argv)
    sizes = SIZES[:4] if options.quick else SIZES
    names = [*(name for name in get_args(Transport) if name != "auto"), MESSAGES, LARGE]
    config = MigrationConfig()
    settings = {"slots": config.staging_buffers, "slot_bytes": CHUNK_BYTES}
    result = report.begin("transport", settings)
    samples = run(names, sizes)
    result.samples = [asdict(one) for one in samples]
    result.summary, result.targets = summarise(samples)
    return report.finish(result, options, tables(samples), draw)


if __name__ == "__main__":
    sys.exit(main())
