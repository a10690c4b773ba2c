"""A unit's agent: the process that decides for the instances of a host how much KV cache each may
have, and which of them computes next.

The decisions are those of `kvmig.sharing.lease_ledger` and `kvmig.sharing.step_scheduler`. The
agent holds no memory of theirs, so its end stops no instance: members keep what they have, connect
again, and report it to the next agent, which leases nothing more, and takes no new member, until
all whose processes live have. A member that is connected no more keeps its lease until its process
is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from dataclasses import dataclass

import msgspec

from kvmig.core.background import BackgroundTasks
from kvmig.core.errors import ConfigError, PeerError, TransportError
from kvmig.core.open_files import NO_FILE_S, lacks_descriptor
from kvmig.engines.gate import ComputeShares, StepRequest
from kvmig.rpc.unix_packets import UnixPackets
from kvmig.rpc.unix_peer import credentials
from kvmig.sharing.lease_ledger import LeaseLedger, MemberClaim, MemberReport
from kvmig.sharing.member_locks import MemberLocks
from kvmig.sharing.messages import (
    MOST_BYTES,
    VERSION,
    AskUnit,
    GuaranteeRequest,
    GuaranteeSet,
    HeldMemory,
    MemberHello,
    MemberRefused,
    MemberShare,
    MemoryLease,
    StepDone,
    ToAgent,
    UnitState,
    encode,
    tag_of,
    to_agent,
)
from kvmig.sharing.step_grants import UnitTurns
from kvmig.sharing.step_scheduler import StepScheduler

log = logging.getLogger(__name__)

SETTLE_S = 1.0
"""Least time from the agent's start until it leases what no member has claimed: members of an agent
that has died are back by then (`kvmig.sharing.member.RETRY_S`), except one that is stopped."""
TICK_S = 0.5
"""Pause between two looks at the rule while no member reports."""


@dataclass(eq=False)
class MemberConnection:
    """A member's process. packets: None while it isn't connected."""

    process: int
    ended: int
    """A descriptor that is readable once the process is gone."""
    packets: UnixPackets | None


class UnitAgent:
    """The agent of a unit; make it inside a running event loop.

    sock: the caller's socket of packets on which it listens.
    """

    def __init__(
        self,
        sock: socket.socket,
        ledger: LeaseLedger,
        settle_s: float = SETTLE_S,
        turns: StepScheduler | None = None,
    ) -> None:
        """turns: None: by ADBS."""
        self._sock = sock
        self._ledger = ledger
        self._turns = UnitTurns(turns or StepScheduler())
        self._tenants: dict[str, MemberConnection] = {}
        self._tasks = BackgroundTasks("agent")
        self._again: asyncio.TimerHandle | None = None
        """Lets clients in again, after there was no file for one."""
        self._loop = asyncio.get_running_loop()
        self._settled_at = self._loop.time() + settle_s
        self._settled = asyncio.Event()
        """Set once all that may hold memory have reported how much."""
        self._roll = MemberLocks(sock.getsockname())
        self._refused: set[int] = set()
        """Processes of members that may not join; they have what they have."""
        self._new: set[int] = set()
        """Processes of members that have no lease, and join once all that have one are back."""

    async def run(self) -> None:
        """Serve until it is cancelled."""
        self._sock.setblocking(False)
        self._listen()
        try:
            while True:
                if self._all_known():
                    self._settled.set()
                self._tell()
                await asyncio.sleep(TICK_S if self._settled.is_set() else SETTLE_S / 20)
        finally:
            if self._again is not None:
                self._again.cancel()
            self._loop.remove_reader(self._sock.fileno())
            await self._tasks.close()
            for name in list(self._tenants):
                self._forget(name)
            self._turns.close()
            self._roll.close()

    @property
    def unit(self) -> UnitState:
        """How it is now."""
        guarantees = self._ledger.guarantees()
        shares = [
            MemberShare(
                instance=name,
                model=one.claim.model,
                process=self._tenants[name].process,
                guarantee=guarantees[name],
                quota=one.due,
                lease=one.lease,
                used=one.used,
                cached=one.cached,
                wanted=one.wanted,
                connected=self._tenants[name].packets is not None,
            )
            for name, one in self._ledger.members.items()
        ]
        return UnitState(self._ledger.arena, self._ledger.rule, shares)

    # -- connections

    def _listen(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            log.warning("a connection could not be accepted: %s", error)
            if lacks_descriptor(error):  # who waits would come again at once
                self._loop.remove_reader(self._sock.fileno())
                self._again = self._loop.call_later(NO_FILE_S, self._listen)
            return
        _, user = credentials(sock)
        if user != os.geteuid():
            log.warning("user %d may not join", user)
            sock.close()
            return
        self._tasks.start(self._serve(UnixPackets(sock, MOST_BYTES)))

    async def _serve(self, packets: UnixPackets) -> None:
        """One connection, to its end. An error in it ends no other one."""
        name = ""
        try:
            while packet := await packets.recv():
                message = _decoded(packet)
                if isinstance(message, MemberHello) and message.lease < message.floor:
                    await self._let_others_come(packets.process)
                name = self._handle(packets, name, message) or name
        except (ConfigError, PeerError) as error:
            self._refused.add(packets.process)
            with contextlib.suppress(TransportError):  # it has gone
                packets.send(encode(MemberRefused(str(error))))
        except TransportError as error:
            log.warning("%s: %s", name or "somebody", error)
        finally:
            packets.close()
            tenant = self._tenants.get(name)
            if tenant is not None and tenant.packets is packets:
                tenant.packets = None
                self._turns.remove_member(name)

    def _handle(self, packets: UnixPackets, name: str, message: ToAgent) -> str:
        """name: of the member whose connection it is; empty before Hello. The same, afterwards.

        Raises ConfigError, PeerError or TransportError, which end the connection.
        """
        match message:
            case AskUnit():
                _check_version(message.version)
                packets.send(encode(self.unit))
            case MemberHello() if not name:
                _check_version(message.version)
                self._join(packets, message)
                self._tell()
                return message.instance
            case HeldMemory() if name:
                told = MemberReport(*msgspec.structs.astuple(message))
                self._ledger.record_report(name, told, self._loop.time())
                self._tell()
            case GuaranteeRequest() if name:
                packets.send(encode(self._guarantee(name, message)))
                self._tell()
            case ComputeShares() | StepRequest() | StepDone() if name:
                self._turns.handle(name, message, packets.send)
            case _:
                raise PeerError(f"{tag_of(message)} isn't expected now")
        return name

    # -- members

    async def _let_others_come(self, process: int) -> None:
        """A new member's process waits: one that has memory would be refused in its favour."""
        self._new.add(process)
        try:
            await self._settled.wait()
        finally:
            self._new.discard(process)

    def _join(self, packets: UnixPackets, hello: MemberHello) -> None:
        """Raises ConfigError."""
        name, known = hello.instance, self._tenants.get(hello.instance)
        if known is not None and known.process != packets.process:
            if _lives(known):
                raise ConfigError(f"instance {name} is in the unit already, as another process")
            self._forget(name)
        claim = MemberClaim(
            hello.model, hello.floor, hello.capacity, hello.granule, hello.guarantee, hello.lease
        )
        self._ledger.join(name, claim, self._loop.time())
        if known is not None and known.process == packets.process:
            if known.packets is not None:
                known.packets.close()
            known.packets = packets
            return
        try:
            ended = os.pidfd_open(packets.process)
        except OSError as error:
            self._ledger.remove_member(name, self._loop.time())
            what = "can't be watched now" if lacks_descriptor(error) else "is gone"
            raise ConfigError(f"the process of {name} {what}: {error}") from error
        self._tenants[name] = MemberConnection(packets.process, ended, packets)
        self._loop.add_reader(ended, self._left, name)

    def _guarantee(self, name: str, wanted: GuaranteeRequest) -> GuaranteeSet:
        try:
            self._ledger.guarantee(name, wanted.size, self._loop.time())
        except ConfigError as error:
            return GuaranteeSet(wanted.number, wanted.size, str(error))
        return GuaranteeSet(wanted.number, wanted.size)

    def _left(self, name: str) -> None:
        """Forget a member whose process is gone."""
        self._forget(name)
        self._tell()

    def _forget(self, name: str) -> None:
        tenant = self._tenants.pop(name)
        self._turns.remove_member(name)
        self._loop.remove_reader(tenant.ended)
        os.close(tenant.ended)
        if tenant.packets is not None:
            tenant.packets.close()
        self._ledger.remove_member(name, self._loop.time())

    def _all_known(self) -> bool:
        if self._settled.is_set():
            return True
        known = {one.process for one in self._tenants.values()} | self._refused | self._new
        return self._loop.time() >= self._settled_at and self._roll.processes() <= known

    def _tell(self) -> None:
        """Let the rule look, and send what follows. A member that isn't connected gets it once it
        is."""
        self._ledger.adapt(self._loop.time())
        for name, order in self._ledger.orders(grow=self._settled.is_set()):
            packets = self._tenants[name].packets
            if packets is None:
                continue
            try:
                packets.send(encode(MemoryLease(*order, arena=self._ledger.arena)))
            except TransportError as error:
                log.warning("%s: %s", name, error)
                packets.close()  # it connects again, and says what it has


def _lives(tenant: MemberConnection) -> bool:
    try:
        os.kill(tenant.process, 0)
    except ProcessLookupError:
        return False
    return True


def _decoded(packet: bytes) -> ToAgent:
    try:
        return to_agent.decode(packet)
    except msgspec.DecodeError as error:
        raise PeerError(f"a packet can't be read: {error}", "unreadable") from error


def _check_version(version: int) -> None:
    if version != VERSION:
        raise PeerError(f"version {version} of the unit's messages isn't known, only {VERSION}")
