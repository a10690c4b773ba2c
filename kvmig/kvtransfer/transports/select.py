"""Which transport two llumlets use: the source offers, the destination takes what works."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmig.core.config import BY_NAME, IN_THE_CLEAR, MigrationConfig, Transport
from kvmig.core.errors import KernelUnavailable, TransportError
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.pinned import pins_read_only
from kvmig.kvtransfer.messages import TransportOffer
from kvmig.kvtransfer.transports import cuda_ipc, nccl, nixl, shm, tcp
from kvmig.kvtransfer.transports.base import KEPT, StagingPool, TransportInbox
from kvmig.rpc.codec import RefusalCounter

LOOK_S = 5.0
"""Pause between two looks for ended sources, whose inboxes may hold a GPU's memory."""

Ready = Callable[[memoryview], Awaitable[object]]
"""Does what copies from and to this memory want to be done once."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TransportSite:
    """The place of the transports' files and sockets."""

    folder: Path = shm.FOLDER
    """Folder of shared memory."""
    trusted: bool = True
    """Whether `auto` may take what is IN_THE_CLEAR."""
    refusals: RefusalCounter = field(default_factory=RefusalCounter)
    """Counts strangers at sockets of a transport's own."""
    gpu: int | None = None
    """The GPU of this process that the KV cache is on."""
    host: str | None = None
    """The address at which peers reach this process; None: its messages leave the process never,
    or no port but their own may be opened."""

    @property
    def pins_only_writable(self) -> bool:
        """Whether the GPU reaches a mapping of the host's only if it is mapped for writing; not
        where its driver can't be asked, for then nothing is pinned."""
        try:
            return self.gpu is not None and not pins_read_only(CudaDriver(self.gpu))
        except KernelUnavailable:
            return False

    def takes(self, name: str, allowed: Transport) -> bool:
        """Whether a transport may be used."""
        if allowed != "auto":
            return name == allowed
        return name not in BY_NAME and (self.trusted or name not in IN_THE_CLEAR)

    def refusal(self, name: str, allowed: Transport) -> str:
        """The reason why a transport may not be used."""
        if allowed != "auto":
            return f"this side takes {allowed} only"
        if name in BY_NAME:
            return f"this side takes it by name only (--transport {name})"
        return "this side takes encrypted ones only"


HERE = TransportSite()


def site_of(
    config: MigrationConfig,
    gpu: int | None,
    refusals: RefusalCounter,
    host: str | None = None,
) -> TransportSite:
    """The site of an instance."""
    return TransportSite(trusted=config.trust_network, refusals=refusals, gpu=gpu, host=host)


_INBOXES: Mapping[str, Callable[[TransportOffer, TransportSite], TransportInbox]] = {
    shm.NAME: lambda offer, site: shm.ShmInbox(offer, site.folder, site.pins_only_writable),
    tcp.NAME: lambda offer, site: tcp.open_inbox(offer, site.host, site.refusals),
    nixl.NAME: lambda offer, site: nixl.NixlInbox(offer, site.gpu),
    cuda_ipc.NAME: lambda offer, site: cuda_ipc.CudaIpcInbox(offer, site.gpu, site.refusals),
    nccl.NAME: lambda offer, site: nccl.NcclInbox(offer, site.gpu),
}


def open_staging(
    allowed: Transport,
    cluster: str,
    instance: str,
    slots: int,
    slot_bytes: int,
    site: TransportSite = HERE,
) -> dict[str, StagingPool]:
    """The pools of an instance by transport's name, the best first: offer them all.

    `auto` has CUDA IPC where the KV cache is on a GPU, shared memory, NIXL where there is an RDMA
    device and the network is trusted, and TCP, which always works.

    Raises TransportError if `allowed` is one transport that can't be had.
    """

    def open_one(name: str) -> StagingPool:
        match name:
            case shm.NAME:
                return shm.ShmStaging(cluster, instance, slots, slot_bytes, site.folder)
            case nixl.NAME:
                return nixl.NixlStaging(slots, slot_bytes, site.gpu)
            case cuda_ipc.NAME:
                return cuda_ipc.CudaIpcStaging(site.gpu, slots, slot_bytes, site.refusals)
            case nccl.NAME:
                return nccl.NcclStaging(site.gpu, slots, slot_bytes)
        return tcp.TcpStaging(slots, slot_bytes, lanes=site.host is not None)

    if allowed != "auto":
        return {allowed: open_one(allowed)}
    stagings: dict[str, StagingPool] = {}
    rdma = site.takes(nixl.NAME, allowed) and nixl.has_rdma()
    gpu = site.gpu is not None
    first, third = ((cuda_ipc.NAME,) if gpu else ()), ((nixl.NAME,) if rdma else ())
    for name in (*first, shm.NAME, *third, tcp.NAME):
        try:
            stagings[name] = open_one(name)
        except TransportError as error:
            log.warning("%s: KV blocks don't go over %s, %s", instance, name, error)
    return stagings


def open_offer(
    offers: Sequence[TransportOffer], allowed: Transport = "auto", site: TransportSite = HERE
) -> TransportInbox:
    """Open the first offer that works here. May block for some tenths of a second.

    Raises TransportError, with each offer's reason, if none does.
    """
    reasons: list[str] = []
    for offer in offers:
        if not site.takes(offer.transport, allowed):
            reasons.append(f"{offer.transport}: {site.refusal(offer.transport, allowed)}")
        elif offer.transport not in _INBOXES:
            reasons.append(f"{offer.transport}: unknown")
        else:
            try:
                return _INBOXES[offer.transport](offer, site)
            except TransportError as error:
                reasons.append(f"{offer.transport}: {error}")
    raise TransportError("; ".join(reasons) or "the source offered no transport")


class InboxCache:
    """One inbox a source, opened at its first migration and kept for the next ones, until it ends.

    No message reports a source's end, so this looks every LOOK_S. Of more than KEPT the one used
    longest ago is closed; a migration that still uses it is given up.
    """

    def __init__(
        self, allowed: Transport = "auto", site: TransportSite = HERE, ready: Ready | None = None
    ) -> None:
        """ready: to be called with each inbox's memory before its first chunk comes."""
        self._allowed = allowed
        self._site = site
        self._ready = ready
        self._open: OrderedDict[tuple[TransportOffer, ...], asyncio.Future[TransportInbox]] = (
            OrderedDict()
        )
        self._looking: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, offers: Sequence[TransportOffer]) -> TransportInbox:
        """The inbox for these offers. Raises TransportError if none works."""
        if self._closed:
            raise TransportError("this instance stops")
        key = tuple(offers)
        self._drop_ended()
        while len(self._open) > KEPT - (key not in self._open):
            _discard(self._open.popitem(last=False)[1])
        if key not in self._open:
            self._open[key] = asyncio.ensure_future(self._open_one(offers))  # nobody cancels it
        self._open.move_to_end(key)
        if self._looking is None:
            self._look_later()
        return await asyncio.shield(self._open[key])

    def close(self) -> None:
        """Free all of them."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        while self._open:
            _discard(self._open.popitem()[1])

    async def _open_one(self, offers: Sequence[TransportOffer]) -> TransportInbox:
        # In a thread: libraries take their time.
        inbox = await asyncio.to_thread(open_offer, offers, self._allowed, self._site)
        memory = inbox.memory
        if self._ready is not None and memory is not None:
            try:
                await self._ready(memory)
            except BaseException:
                inbox.close()
                raise
        return inbox

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = None
        self._drop_ended()
        if self._open:
            self._look_later()

    def _drop_ended(self) -> None:
        """Free what failed, and what sources that have ended left."""
        for key, opened in list(self._open.items()):
            if opened.done() and (opened.exception() or opened.result().stale):
                _discard(self._open.pop(key))


def _discard(opened: asyncio.Future[TransportInbox]) -> None:
    """Close the inbox, if there is one or as soon as there is."""

    def close(opened: asyncio.Future[TransportInbox]) -> None:
        if not opened.cancelled() and opened.exception() is None:
            opened.result().close()

    if opened.done():
        close(opened)
    else:
        opened.add_done_callback(close)
