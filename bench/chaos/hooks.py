"""Faults inside a llumlet: at a state of the handshake, and on what it tells other llumlets.

`bench.chaos.worker.ChaosWorker` brings them into the process; kvmig has none of it.
What shall happen is in files of a folder (`FOLDER`):

- `armed/source.committing`, content `kill`, `stop` or `squeeze`: the first machine of the
  handshake that enters this state does so, and moves the file to `fired/` under its process id;
- `now/cut`, `now/slow` (content: seconds), `now/corrupt`: messages to other llumlets are dropped
  or late, blocks that arrive are changed, for as long as the file is there.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from kvmig.kvtransfer.machine import StateMachine
from kvmig.kvtransfer.messages import Chunk, PeerMessage
from kvmig.kvtransfer.transports.shm import ShmInbox
from kvmig.kvtransfer.transports.tcp import TcpInbox
from kvmig.rpc.codec import Frame
from kvmig.rpc.messages import Hello, RpcMessage
from kvmig.rpc.zmq_sockets import RpcClient, RpcServer

FOLDER = "KVMIG_CHAOS"
"""Environment variable: the folder."""
ARMED, FIRED, NOW = "armed", "fired", "now"
Receive = Callable[[Any, Chunk, Any], Awaitable[memoryview]]
PEER_MESSAGES = tuple(one for one in get_args(PeerMessage) if one is not Hello)
"""Without Hello a connection would be of no use for ever, which no network does."""


def install(folder: Path) -> None:
    """Let things go wrong from now on, as the folder's files say."""
    go = StateMachine.apply_event
    wires = {RpcClient: Wire(folder, RpcClient.send), RpcServer: Wire(folder, RpcServer.send)}

    def entering(machine: StateMachine, event: Any) -> None:
        go(machine, event)
        strike(folder, f"{side(machine)}.{machine.state}")

    mock.patch.object(StateMachine, "apply_event", entering).start()
    for inbox in (ShmInbox, TcpInbox):
        mock.patch.object(
            inbox, "receive", garbled(inbox.receive, folder / NOW / "corrupt")
        ).start()
    for kind, wire in wires.items():
        mock.patch.object(kind, "send", wire.method()).start()


def garbled(receive: Receive, corrupt: Path) -> Receive:
    """An inbox's `receive` that flips a bit of every chunk while that file is there."""

    async def received(inbox: Any, chunk: Chunk, payload: Any) -> memoryview:
        return changed(await receive(inbox, chunk, payload))

    def changed(view: memoryview) -> memoryview:
        if not corrupt.exists() or not len(view):
            return view
        other = bytearray(view)
        other[len(other) // 2] ^= 0x40
        return memoryview(other).toreadonly()

    return received


def side(machine: StateMachine) -> str:
    """source or destination."""
    return type(machine).__name__.removesuffix("Machine").lower()


def strike(folder: Path, state: str) -> None:
    """Do what is armed for this state, once among all processes. Raises MemoryError."""
    armed = folder / ARMED / state
    if not armed.exists():
        return
    fired = folder / FIRED / f"{state}.{os.getpid()}"
    try:
        deed = armed.read_text()
        armed.rename(fired)
    except FileNotFoundError:
        return  # another one was first
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise MemoryError(f"bench.chaos, in state {state}")


class Wire:
    """One kind of socket's `send`, when its messages to other llumlets are late or lost."""

    def __init__(self, folder: Path, send: Callable[..., None]) -> None:
        self._now = folder / NOW
        self._send = send
        self._free_at = 0.0
        """When the last late message leaves: none overtakes another."""

    def method(self) -> Callable[..., None]:
        """To be the class's own."""

        def send(link: Any, *args: Any) -> None:
            if any(isinstance(one, PEER_MESSAGES) for one in args):
                self._pass_on(link, args)
            else:
                self._send(link, *args)

        return send

    def _pass_on(self, link: Any, args: Sequence[RpcMessage | bytes | Sequence[Frame]]) -> None:
        if (self._now / "cut").exists():
            return
        loop = asyncio.get_running_loop()
        slow = self._now / "slow"
        late_s = float(slow.read_text() or 0) if slow.exists() else 0.0
        due = max(self._free_at, loop.time() + late_s)
        if due <= loop.time():
            self._send(link, *args)
            return
        self._free_at = due
        # By then the staging buffers that payload frames show may hold something else.
        kept = [list(map(bytes, one)) if isinstance(one, list | tuple) else one for one in args]
        loop.call_at(due, self._late, link, kept)

    def _late(self, link: Any, args: Sequence[RpcMessage | bytes | Sequence[Frame]]) -> None:
        if link._socket.closed:
            return  # the connection did not live so long
        self._send(link, *args)
