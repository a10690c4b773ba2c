"""`python -m kvmig.sharing PATH --memory 1GiB`: the agent of a unit, whose instances share KV
cache.

It listens on the Unix socket PATH, to processes of its own user only, until SIGTERM or Ctrl-C.
`kvmig.serve --unit PATH` makes the instances of a deployment members. With --show it only prints
the state of the unit there.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Sequence

import uvloop

from kvmig.core.errors import ConfigError, KvmigError, TransportError
from kvmig.core.flag_parser import FlagParser
from kvmig.core.quantities import quantity
from kvmig.process.child import call_at_stdin_end, leave, quiet, say, send_heartbeats
from kvmig.process.sockets import listening_at
from kvmig.process.watchdog import notify_manager
from kvmig.sharing.agent import UnitAgent
from kvmig.sharing.lease_ledger import MIB, LeaseLedger
from kvmig.sharing.memory_quotas import RULES
from kvmig.sharing.messages import UnitState
from kvmig.sharing.policies import POLICIES
from kvmig.sharing.step_scheduler import StepScheduler
from kvmig.sharing.unit_state import fetch_unit


def main(argv: Sequence[str]) -> int:
    """Exit code 0 after a signal, 2 for what is wrong before it listens."""
    quiet("unit")
    try:
        flags = parser().parse_args(argv)
        if flags.show:
            print("\n".join(shown(asyncio.run(found(flags.path)))))
            return 0
        if flags.memory is None:
            raise ConfigError("--memory is missing, must be the KV cache of all members together")
        ledger = LeaseLedger(int(flags.memory), flags.quotas)
        turns = StepScheduler(flags.policy)
        with listening_at(flags.path, f"PATH {flags.path}", socket.SOCK_SEQPACKET) as sock:
            uvloop.run(serve(sock, ledger, turns, flags))
    except KvmigError as error:
        say(str(error))
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the flags."""
    made = FlagParser(prog="python -m kvmig.sharing", description=__doc__, allow_abbrev=False)
    made.add_argument("path", metavar="PATH", help="the Unix socket that members connect to")
    made.add_argument(
        "--memory",
        type=quantity("GiB"),
        help="KV cache of all members together, in GiB or with a unit (512MiB)",
    )
    made.add_argument(
        "--quotas", default="kvmig", help=f"how it is shared: {', '.join(RULES)} (default: kvmig)"
    )
    made.add_argument("--show", action="store_true", help="print the unit's present state")
    made.add_argument(
        "--policy",
        default="adbs",
        help=f"who computes next: {', '.join(POLICIES)} (default: adbs)",
    )
    made.add_argument(
        "--end-with-stdin", action="store_true", help="stop at the end of stdin as at a signal"
    )
    made.add_argument("--heartbeat-descriptor", type=int, default=-1, help=argparse.SUPPRESS)
    return made


async def found(path: str) -> UnitState:
    """The unit there. Raises ConfigError."""
    try:
        return await fetch_unit(path)
    except TransportError as error:
        raise ConfigError(f"PATH is {path}, must be a unit's socket: {error}") from error


def shown(unit: UnitState) -> list[str]:
    """One line each, in MiB."""
    leased = sum(one.lease for one in unit.shares)
    return [
        f"{unit.arena / MIB:.0f} MiB, {leased / MIB:.0f} leased, quotas by {unit.rule}",
        *(
            f"{one.instance} ({one.model}): lease {one.lease / MIB:.1f}, quota"
            f" {one.quota / MIB:.1f}, guaranteed {one.guarantee / MIB:.1f}, used"
            f" {one.used / MIB:.1f}, cached {one.cached / MIB:.1f}, wanted {one.wanted / MIB:.1f}"
            f"{'' if one.connected else ', not connected'}"
            for one in unit.shares
        ),
    ]


async def serve(
    sock: socket.socket, ledger: LeaseLedger, turns: StepScheduler, flags: argparse.Namespace
) -> None:
    """Serve until a signal."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    if flags.end_with_stdin:
        call_at_stdin_end(stop.set)
    running = asyncio.create_task(UnitAgent(sock, ledger, turns=turns).run())
    signs = [asyncio.create_task(notify_manager())]
    if flags.heartbeat_descriptor >= 0:
        signs.append(asyncio.create_task(send_heartbeats(flags.heartbeat_descriptor)))
    say(f"unit of {ledger.arena / 2**20:.0f} MiB at {flags.path} (Ctrl-C stops)")
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
    for one in (running, stopped, *signs):
        one.cancel()
    await asyncio.gather(running, stopped, *signs, return_exceptions=not running.done())


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
