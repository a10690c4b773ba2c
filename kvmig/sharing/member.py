"""An instance's end of its unit: it joins, reports what it holds, has its engine resized, and asks
for its steps.

The agent's end isn't the instance's: it keeps the lease that it has, and joins again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable

from kvmig.core.background import cancel_tasks
from kvmig.core.errors import ConfigError, StartupError, TransportError
from kvmig.engines.base import KVUse
from kvmig.engines.gate import ComputeShares, StepGrant
from kvmig.rpc.unix_packets import UnixPackets
from kvmig.sharing.lease_ledger import MemberClaim
from kvmig.sharing.member_locks import MemberLocks
from kvmig.sharing.messages import (
    MOST_BYTES,
    VERSION,
    GrantRecalled,
    GuaranteeRequest,
    GuaranteeSet,
    HeldMemory,
    InUnit,
    MemberCount,
    MemberHello,
    MemberRefused,
    MemoryLease,
    StepDone,
    ToAgent,
    encode,
)
from kvmig.sharing.step_gate import UnitGate
from kvmig.sharing.unit_state import decoded

log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Pause between two tries to join again."""
REPORT_S = 0.01
"""Least pause between two reports of what the engine holds."""
JOIN_S = 10.0
"""Time for the agent to lease the floor to a new member."""
ANSWER_S = 5.0
"""Time for the agent to answer whether it grants a reservation."""

Resize = Callable[[int, int], Awaitable[None]]
"""(bytes to have at most from now on, bytes to have if all others gave)."""


class UnitMember:
    """One instance in its unit. Make it inside a running event loop."""

    def __init__(
        self,
        path: str,
        instance: str,
        claim: MemberClaim,
        use: Callable[[], KVUse],
        watch: Callable[[Callable[[], None]], None],
        resize: Resize,
        shares: ComputeShares | None = None,
    ) -> None:
        """use: what the engine holds now, cheap; watch: have something called, from any thread,
        when that has changed; resize: returns at once, the engine gives as soon as it can, which
        `use` shows. shares: of its steps; None: it asks for none."""
        self.gate = UnitGate(self._say, self._done)
        """Gate for its engine; alone as long as no agent says otherwise."""
        self._shares = shares
        self._sending = threading.Lock()
        """Held while a packet goes out on the engine's thread: it isn't closed meanwhile."""
        self._path = path
        self._instance = instance
        self._claim = claim
        self._use = use
        self._resize = resize
        self._seq = 0
        self._quota = 0
        """The newest quota that came."""
        self._guarantee = claim.guarantee
        self._told: HeldMemory | None = None
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        """Set while there may be more to report."""
        self._leased = asyncio.Event()
        self._packets: UnixPackets | None = None
        self._numbers = itertools.count()
        self._wanted: dict[int, asyncio.Future[str]] = {}
        """Guarantees that the agent hasn't answered, by number: why not, or empty."""
        self._said = ""
        watch(self._changed)

    async def join(self) -> None:
        """Wait for the first lease. Raises StartupError: refused, or no agent there."""
        try:
            MemberLocks(self._path).enter()
            async with asyncio.timeout(JOIN_S):
                self._packets = packets = self._hello()
                while not self._leased.is_set():
                    await self._heard(packets, await packets.recv())
        except (ConfigError, TransportError) as error:
            self.close()
            raise StartupError(f"unit {self._path}: {error}") from error
        except TimeoutError as error:
            self.close()
            floor = self._claim.floor
            raise StartupError(
                f"unit {self._path}: no lease of {floor} bytes within {JOIN_S:g} s"
            ) from error

    @property
    def connected(self) -> bool:
        """Whether an agent knows of it now."""
        return self._packets is not None

    async def guarantee(self, size: int) -> None:
        """Get `size` bytes back from now on whenever it wants them; 0: a fair part.

        Raises ConfigError with the agent's message, TransportError where no agent answers.
        """
        if self._packets is None:
            raise TransportError(f"the agent of unit {self._path} isn't there")
        number, answer = next(self._numbers), self._loop.create_future()
        self._wanted[number] = answer
        try:
            self._packets.send(encode(GuaranteeRequest(number, size)))
            async with asyncio.timeout(ANSWER_S):
                refused = await answer
        except TimeoutError as error:
            raise TransportError(
                f"the agent of unit {self._path} doesn't answer within {ANSWER_S:g} s"
            ) from error
        finally:
            del self._wanted[number]
        if refused:
            raise ConfigError(refused)

    @property
    def state(self) -> InUnit:
        """The member's state, for load reports."""
        use = self._use()
        return InUnit(
            lease=use.lease,
            wanted=use.wanted,
            guarantee=self._guarantee,
            waited_s=self.gate.waited_s,
            connected=self.connected,
            used=use.used,
            asked=self._claim.guarantee,
            decode_parts=0 if self._shares is None else self._shares.decode,
        )

    def close(self) -> None:
        """Leave; the agent frees the lease at the end of this process."""
        if self._packets is not None:
            with self._sending:
                self._packets.close()
                self._packets = None
        for answer in self._wanted.values():
            if not answer.done():
                answer.set_exception(TransportError(f"the agent of unit {self._path} has gone"))
        self.gate.close()

    def _changed(self) -> None:
        """Report a change; callable on any thread."""
        if not self._news.is_set() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    # -- on the engine's thread: a packet that can't be sent is one that nobody answers

    def _done(self, number: int) -> None:
        self._say(StepDone(number))

    def _say(self, message: ToAgent) -> None:
        with self._sending:
            if self._packets is None:
                return
            try:
                self._packets.send(encode(message))
            except TransportError as error:
                log.debug("unit %s: %s", self._path, error)

    # -- on the event loop

    async def run(self) -> None:
        """Send and receive until cancelled, and join again; call it after `join`."""
        while True:
            assert self._packets is not None
            reports = asyncio.create_task(self._report(self._packets))
            try:
                while packet := await self._packets.recv():
                    await self._heard(self._packets, packet)
            except (ConfigError, TransportError) as error:
                self._warn(str(error))
            finally:
                self.close()
                await cancel_tasks(reports)
            self._packets = await self._again()

    def _warn(self, why: str) -> None:
        """Once, not five times a second."""
        if why != self._said:
            log.warning("unit %s: %s", self._path, why)
        self._said = why

    async def _again(self) -> UnixPackets:
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                return self._hello()
            except TransportError as error:
                log.info("unit %s: %s", self._path, error)

    def _hello(self) -> UnixPackets:
        """Raises TransportError."""
        packets = UnixPackets.connect(self._path, MOST_BYTES)
        self._seq, self._told = 0, None
        claim = self._claim._replace(lease=max(self._quota, self._use().lease))
        try:
            packets.send(encode(MemberHello(VERSION, self._instance, *claim)))
            if self._shares is not None:
                packets.send(encode(self._shares))
        except TransportError:
            packets.close()
            raise
        return packets

    async def _heard(self, packets: UnixPackets, packet: bytes) -> None:
        """Raises ConfigError where the agent refuses, TransportError where it has gone."""
        message = decoded(packet)
        if isinstance(message, MemberRefused):
            raise ConfigError(message.why)
        if isinstance(message, StepGrant):
            self.gate.receive_grant(message)
        if isinstance(message, GrantRecalled):
            self.gate.recall_grant(message.number)
        if isinstance(message, MemberCount):
            self.gate.crowd(alone=message.members < 2)
        if isinstance(message, GuaranteeSet):
            self._settled(message)
        if isinstance(message, MemoryLease):
            self._quota, self._guarantee = message.quota, message.guarantee
            await self._resize(message.quota, message.limit)
            self._seq = message.seq
            self._tell(packets)
            if message.quota >= self._claim.floor:
                self._leased.set()

    def _settled(self, answer: GuaranteeSet) -> None:
        """Keep the guarantee for the next agent, too, whether or not a caller still waits."""
        if not answer.refused:
            self._claim = self._claim._replace(guarantee=answer.size)
            self._guarantee = answer.size or self._guarantee
        waiting = self._wanted.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.refused)

    async def _report(self, packets: UnixPackets) -> None:
        while True:
            self._news.clear()  # before it looks: what changes then is told next time
            try:
                self._tell(packets)
            except TransportError as error:  # the reader sees the same
                log.info("unit %s: %s", self._path, error)
            await asyncio.sleep(REPORT_S)
            await self._news.wait()

    def _tell(self, packets: UnixPackets) -> None:
        """What it holds, if that is news."""
        use = self._use()
        told = HeldMemory(self._seq, use.lease, use.used, use.cached, use.wanted)
        if told != self._told:
            packets.send(encode(told))
            self._told = told
