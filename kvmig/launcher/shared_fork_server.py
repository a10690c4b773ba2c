"""`python -m kvmig.launcher.shared_fork_server ENGINE SOCKET [at-once]`: one fork server for all
servers of a host.

It loads what instances and front ends of that engine need, then listens on SOCKET until its stdin
ends, and serves until its last client has gone; with at-once it ends with its stdin. A
`kvmig.serve` with KVMIG_FORK_SERVER=SOCKET forks its instances there; a client that sends a
`ForkOrder` for `kvmig.serve` has that forked, too, and it serves within a second. Only the user who
started the fork server may connect. A process that a fork couldn't be like
(`fork_server.likeness`) is started in the usual way.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvmig.core.config import ENGINES, ClusterConfig
from kvmig.core.errors import KvmigError
from kvmig.engines.registry import kind_of
from kvmig.launcher.environment import gpus, llumlet_environment, worker_threads
from kvmig.process.child import leave, quiet, say
from kvmig.process.fork_server import (
    ENGINE,
    INSTANCES,
    SERVERS,
    ForkListener,
    ForkRefused,
    ForkServerLoaded,
    digest,
    likeness,
    load,
    send_news,
    serve,
)
from kvmig.process.sockets import listening_at, raise_open_files

FRONT_END = (
    "kvmig.serve", "kvmig.frontend.process_main", "kvmig.frontend.app", "kvmig.frontend.metrics",
    "kvmig.frontend.router",
)  # fmt: skip
API = {"vllm": "kvmig.frontend.openai.vllm.server"}
"""Module of a front end, by engine; others' is `token_server`."""
AT_ONCE = "at-once"
ASKED_S = 30.0
"""Time for a client to connect where nothing can be forked."""


def main(words: Sequence[str]) -> int:
    """Exit code 0 after the end of stdin, 2 for what is wrong before it forks."""
    at_once = words[2:3] == [AT_ONCE]
    own = [*words[:2], *words[3 if at_once else 2 :]]
    if not 2 <= len(own) <= 3 or own[0] not in ENGINES:
        say(
            "usage: python -m kvmig.launcher.shared_fork_server ENGINE SOCKET [at-once];"
            f" ENGINE is one of {', '.join(ENGINES)}"
        )
        return 2
    engine, address = own[:2]
    if len(own) == 2:
        start_again(engine)
    try:
        quiet(f"fork server of {engine}")
        raise_open_files()
        kind_of(engine).prepare()
        # Before it loads: what is on disk now, and the environment as launchers have it then.
        alike = {**likeness(), ENGINE: engine, SERVERS: own[2], INSTANCES: digest(os.environ)}
        why = load(engine, [*FRONT_END, API.get(engine, "kvmig.frontend.openai.token_server")])
        with listening_at(address, f"SOCKET {address}", socket.SOCK_SEQPACKET) as sock:
            if why:
                refuse(sock, sys.stdin.fileno(), f"{engine} can't be forked: {why}")
                return 2
            loaded = ForkServerLoaded(alike)
            return serve([], ForkListener(sock, sys.stdin.fileno(), loaded, at_once))
    except KvmigError as error:
        say(str(error))
        return 2


def refuse(sock: socket.socket, lifeline: int, why: str) -> None:
    """Let the first client know why nothing is forked here, or people if none comes.

    lifeline: ends when none will.
    """
    poll = select.poll()
    for one in (sock.fileno(), lifeline):
        poll.register(one, select.POLLIN)
    ready = [number for number, _ in poll.poll(ASKED_S * 1e3)]
    if sock.fileno() not in ready:
        say(why)
        return
    with contextlib.suppress(OSError):  # the client has gone
        client, _ = sock.accept()
        with client:
            send_news(client, ForkRefused(why))


def start_again(engine: str) -> NoReturn:
    """Start in an instance's environment, knowing that of servers: libraries read it at once."""
    threads = worker_threads([1] * ClusterConfig().instances)
    environment = llumlet_environment(engine, gpus(), threads, os.environ)
    command = [sys.executable, *sys.orig_argv[1:], digest(os.environ)]
    os.execve(sys.executable, command, environment)  # noqa: S606


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
