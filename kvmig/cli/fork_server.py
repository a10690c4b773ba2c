"""`python -m kvmig.cli.fork_server DESCRIPTOR ENGINE`: for the launcher only, see `forks`."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import setproctitle

from kvmig.cli import llumlet
from kvmig.cli.forks import ForkNews, ForkOrder
from kvmig.cli.process import begin_loading, end_loading, leave, quiet, say
from kvmig.controlplane.child import lead_group
from kvmig.engines.kind import kind_of

TITLE = "kvmig.cli.llumlet"
MESSAGE_BYTES = 4096


def main(argv: Sequence[str]) -> int:
    """Load, then fork as often as the launcher wants, until it is gone."""
    lead_group()
    quiet("fork server")
    begin_loading()
    kind = kind_of(argv[2])
    kind.prepare()
    kind.load()
    if why := unsafe():
        say(f"instances start without a fork server: {why}")
        return 1
    end_loading()
    with socket.socket(fileno=int(argv[1])) as sock:
        forked = serve(sock)
    if forked is None:
        return 0
    order, (stdin, announced) = forked
    return become_llumlet(order, stdin, announced)


def unsafe() -> str:
    """Why this process can't be forked any more; nothing if it can."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"loading has started {threads - 1} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "loading has initialized CUDA"
    return ""


def serve(sock: socket.socket) -> tuple[ForkOrder, list[int]] | None:
    """Take orders and tell of ends, until the launcher's end of the socket is closed.

    Returns in each fork, too, with what it shall be: whatever it raises later is its own.
    """
    hears, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        tell(sock, ForkNews())
        while True:
            readable, _, _ = select.select([sock.fileno(), hears], [], [])
            if hears in readable:
                os.read(hears, 4096)
                for news in ended():
                    tell(sock, news)
            if sock.fileno() in readable:
                message, descriptors, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, 2)
                if not message:
                    break
                order = msgspec.msgpack.decode(message, type=ForkOrder)
                pid = os.fork()
                if pid == 0:
                    return order, descriptors
                for one in descriptors:
                    os.close(one)
                tell(sock, ForkNews(pid))
    return None


def become_llumlet(order: ForkOrder, stdin: int, announced: int) -> int:
    """As if started by `python -m kvmig.cli.llumlet`; its exit code."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(stdin, 0)
    os.close(stdin)
    os.environ.update(order.environment)
    os.environ["SPT_NOENV"] = "1"  # setproctitle: leave what ps shows of our environment
    setproctitle.setproctitle(TITLE)
    logging.root.handlers.clear()  # lines get the llumlet's own name
    return llumlet.main([TITLE, str(announced)])


def ended() -> list[ForkNews]:
    """Children that have ended since."""
    news = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            news.append(ForkNews(pid, os.waitstatus_to_exitcode(status)))
    return news


def tell(sock: socket.socket, news: ForkNews) -> None:
    """One message. Raises OSError if the launcher is gone."""
    sock.send(msgspec.msgpack.encode(news))


if __name__ == "__main__":
    leave(main(sys.argv))
