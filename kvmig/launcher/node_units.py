"""The units of one node of a Ray cluster: their agents, which the node's agent starts and ends.

Instances of several models share a unit's KV cache on one node (`kvmig.sharing`). A unit's agent
ends with the node's agent, and the next one starts it again: instances keep what they have leased,
and join it by themselves. The GPU of a unit is taken from Ray before its agent starts, and stays
taken while agents of the node come and go (`kvmig.launcher.unit_gpus`). A unit whose instances have
KV cache of their own has GPUs only, and no agent.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from msgspec.structs import replace

from kvmig.core.clock import TimeSource
from kvmig.core.errors import ConfigError, StartupError, TransportError
from kvmig.core.killed import kill_and_wait
from kvmig.launcher.node_files import WantedUnit
from kvmig.launcher.node_forks import node_folder
from kvmig.launcher.node_reports import UnitReport
from kvmig.launcher.unit_gpus import GpuWish, UnitGpu, UnitGpus
from kvmig.process.supervisor import how_it_ended
from kvmig.rpc.unix_peer import credentials
from kvmig.sharing.messages import UnitState
from kvmig.sharing.unit_state import fetch_unit

MODULE = "kvmig.sharing"
ANSWER_S = 1.0
"""Longest wait for the answer of a unit's agent."""
STABLE_S = 60.0
"""A unit's agent that ends later is the first one again that has ended."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0
END_S = 5.0
"""Time for a unit's agent to end, then it is killed."""
HANG_S = 30.0
"""An agent that listens and has not answered for this time hangs, and is killed."""
STARTS = "its agent starts"

log = logging.getLogger(__name__)


def unit_word(fleet: str, path: str) -> str:
    """The name of a unit on all nodes: two fleets may have the same path, on machines of their own.
    fleet: its word. path: the unit's on the machine of the fleet's server."""
    return "unit-" + blake2b(f"{fleet} {path}".encode(), digest_size=8).hexdigest()


def unit_address(node: str, word: str) -> str:
    """The path of a unit's socket on a node. node: Ray's id of it. word: see `unit_word`. Raises
    StartupError."""
    return str(node_folder(node) / f"{word}.sock")


def gpu_of_unit(address: str) -> str:
    """UUID of the GPU of the unit there; empty: its instances run on CPUs. Raises StartupError."""
    try:
        return _gpu_file(address).read_text()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StartupError(f"the GPU of the unit can't be read: {error}") from error


def _gpu_file(address: str) -> Path:
    return Path(f"{address}.gpu")


def state_of(address: str) -> UnitState:
    """The state of the unit there. Raises TransportError or ConfigError."""
    return asyncio.run(fetch_unit(address, ANSWER_S))


def listener_at(address: str) -> int:
    """The id of the process that listens there; 0: none does. Raises TransportError for one that
    hangs, and has as many clients waiting as it can have."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(address)
        if code == errno.EAGAIN:
            raise TransportError(f"who listens at {address} takes no more clients")
        return 0 if code else credentials(probe)[0]


def pause_after(deaths: int) -> float:
    """Seconds until an agent is started again that has ended so often in a row."""
    return min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(deaths - 1, 30))


class UnitProcess:
    """The agent of one unit; another one each time that it ends."""

    def __init__(self, wanted: WantedUnit, address: str, clock: TimeSource) -> None:
        self.wanted = wanted
        self.gpu = ""
        """UUID of its GPU; empty: its instances run on CPUs."""
        self._address = address
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._since = 0.0
        self._silent_since: float | None = None
        """When it did not answer first, though it listens; None: it has answered since."""
        self._deaths = 0
        """Ends in a row."""
        self._again_at = 0.0
        self._why = ""

    def keep(self) -> None:
        """Start the agent if none runs and the pause after its last end is over. Raises OSError."""
        now = self._clock()
        if self._process is None:
            self._write_gpu()
        elif self._silent_since is not None and now - self._silent_since >= HANG_S:
            self._silent_since = now  # one that the kernel keeps is killed again later
            log.warning("unit at %s: its agent hangs, and is killed", self._address)
            kill_and_wait(self._process, f"the agent of {self.wanted.path}")
        if self._process is not None and (code := self._process.poll()) is not None:
            stable = now - self._since >= STABLE_S
            self._deaths = 1 if stable else self._deaths + 1
            self._again_at = now + pause_after(self._deaths)
            self._why = f"its agent has ended: {how_it_ended(code)}"
            log.warning("unit at %s: %s", self._address, self._why)
            self._close_stdin(self._process)
            self._process = None
        if self._process is None and now >= self._again_at:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, self._address,
                 f"--memory={self.wanted.memory}B", "--end-with-stdin"],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
            self._since, self._silent_since = now, None

    def _write_gpu(self) -> None:
        """Let instances on the node know the unit's GPU, before its agent answers them."""
        file = _gpu_file(self._address)
        if not self.gpu:
            file.unlink(missing_ok=True)
            return
        begun = file.with_name(f"{file.name}.new")
        begun.write_text(self.gpu)
        begun.replace(file)

    def report(self, look: Callable[[str], UnitState]) -> UnitReport:
        """The state of the unit. look: asks the agent at an address."""
        if self._process is None:
            return UnitReport(path=self.wanted.path, why=self._why)
        try:
            if listener_at(self._address) != self._process.pid:  # of an agent before, which ends
                return UnitReport(path=self.wanted.path, why=STARTS)
            found = look(self._address)
        except (TransportError, ConfigError) as error:
            if self._silent_since is None:
                self._silent_since = self._clock()
            return UnitReport(path=self.wanted.path, why=str(error))
        self._silent_since = None
        leased: dict[str, int] = {}
        for one in found.shares:
            leased[one.model] = leased.get(one.model, 0) + one.lease
        return UnitReport(path=self.wanted.path, leased=leased)

    def end(self) -> None:
        """Close the agent's stdin, which ends it."""
        if self._process is not None:
            self._close_stdin(self._process)

    def await_end(self) -> None:
        """Return once it is gone; one that does not end is killed."""
        if self._process is None:
            return
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            kill_and_wait(self._process, f"the agent of {self.wanted.path}")
        self._process = None

    @staticmethod
    def _close_stdin(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()


class NodeUnits:
    """The unit agents of a node. Only one thread at a time may call its methods; they may block."""

    def __init__(
        self,
        node: str,
        clock: TimeSource = time.monotonic,
        look: Callable[[str], UnitState] = state_of,
        gpus: UnitGpus | None = None,
    ) -> None:
        """node: Ray's id of it. look: asks the agent at an address. gpus: takes the node's GPUs;
        None: none is taken."""
        self._gpus = gpus
        self._node = node
        self._clock = clock
        self._look = look
        self._units: dict[str, UnitProcess] = {}

    def keep_units(self, wanted: Sequence[WantedUnit], fleet: str = "") -> tuple[UnitReport, ...]:
        """Have these units and no others; how each of them stands. fleet: the word of theirs."""
        named: Mapping[str, WantedUnit] = {one.path: one for one in wanted}
        leaving = [
            one
            for one in self._units.values()
            if (then := named.get(one.wanted.path)) is None or then.memory != one.wanted.memory
        ]
        self._end(leaving)
        gpus = self._hold_gpus(wanted, fleet)
        return tuple(self._keep_unit(one, gpus[one.path], fleet) for one in wanted)

    def _keep_unit(self, one: WantedUnit, has: UnitGpu, fleet: str) -> UnitReport:
        unit = self._units.get(one.path)
        if not one.memory or (has.why and unit is None):
            return UnitReport(path=one.path, why=has.why, gpus=has.uuids)
        try:
            if unit is None:
                address = unit_address(self._node, unit_word(fleet, one.path))
                unit = self._units[one.path] = UnitProcess(one, address, self._clock)
            unit.gpu = next(iter(has.uuids), unit.gpu)  # members have what they have
            unit.keep()
        except (OSError, StartupError) as error:
            return UnitReport(path=one.path, why=f"its agent can't start: {error}")
        found = unit.report(self._look)
        return replace(found, gpus=has.uuids, why=has.why or found.why)

    def close(self) -> None:
        """End all unit agents. Their GPUs stay taken, for the node's next agent."""
        self._end(list(self._units.values()))
        if self._gpus is not None:
            self._gpus.forget_all()

    def _hold_gpus(self, wanted: Sequence[WantedUnit], fleet: str) -> dict[str, UnitGpu]:
        """The GPUs of all units, by their paths."""
        if self._gpus is not None:
            wishes = {one.path: GpuWish(one.gpus, one.count) for one in wanted}
            return self._gpus.hold_gpus(wishes, fleet)
        lacks = "its GPU can't be taken here"
        return {one.path: UnitGpu(why=lacks if one.gpus else "") for one in wanted}

    def _end(self, leaving: Sequence[UnitProcess]) -> None:
        for one in leaving:
            one.end()
        for one in leaving:
            one.await_end()
            del self._units[one.wanted.path]
