"""`python -m bench.proxy.upstream ADDRESS RATE`: a deployment that only writes.

ADDRESS: a port, or the path of a Unix socket. Every stream gets the event of `bench.load.blaster`,
RATE times a second over all, until its client leaves; one that asks for one token gets one. What a
stream can't take waits, so that the pace is at most that of whoever relays.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import signal
import socket
import sys
import time

from bench.load.blaster import CHUNK, HEAD

SLICE_S = 0.002
BACKLOG = 4096
AT_ONCE = 1000
"""Events between two looks at what comes."""
ONE = re.compile(rb'"max_tokens": ?1[,}]')
"""In the body of a request that wants one token."""
LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def listen(address: str) -> socket.socket:
    """At a port of this machine, or at a path."""
    if address.isdecimal():
        return socket.create_server(("127.0.0.1", int(address)), backlog=BACKLOG)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(BACKLOG)
    return listening


class Upstream:
    """One epoll loop."""

    def __init__(self, listening: socket.socket, rate: float) -> None:
        self._listening = listening
        self._rate = rate
        self._poll = selectors.EpollSelector()
        self._poll.register(listening, selectors.EVENT_READ)
        self._streams: list[socket.socket] = []
        self._streaming: set[socket.socket] = set()
        """The same: thousands are found in it at once."""
        self._asked: dict[socket.socket, bytes] = {}

    def run(self) -> None:
        sent, place, began = 0.0, 0, time.monotonic()
        while True:
            if self._take():
                sent, began = 0.0, time.monotonic()
            due = (time.monotonic() - began) * self._rate
            sent = max(sent, due - AT_ONCE)  # what can't be kept up with is left out
            while self._streams and sent < due:
                stream = self._streams[place % len(self._streams)]
                try:
                    stream.send(CHUNK)
                except OSError:
                    self._drop(stream)
                place += 1
                sent += 1

    def _take(self) -> bool:
        """New connections, requests and ends; whether there is a new stream."""
        news = False
        for key, _ in self._poll.select(SLICE_S if self._rate else 1.0):
            if key.fileobj is self._listening:
                made, _ = self._listening.accept()
                self._poll.register(made, selectors.EVENT_READ)
                continue
            stream = key.fileobj
            assert isinstance(stream, socket.socket)
            try:
                asked = stream.recv(1 << 16)
            except OSError:
                asked = b""
            if not asked:
                self._drop(stream)
            elif stream not in self._streaming:
                asked = self._asked.pop(stream, b"") + asked
                head, _, body = asked.partition(b"\r\n\r\n")
                length = LENGTH.search(head)
                if length is None or len(body) < int(length[1]):
                    self._asked[stream] = asked
                else:
                    news = self._answer(stream, asked) or news
        return news

    def _answer(self, stream: socket.socket, asked: bytes) -> bool:
        with contextlib.suppress(OSError):
            if ONE.search(asked):
                stream.sendall(HEAD + CHUNK + END)
                if b"connection: close" in asked.lower():
                    self._drop(stream)
            else:
                stream.sendall(HEAD + CHUNK)
                self._streams.append(stream)
                self._streaming.add(stream)
                return True
        return False

    def _drop(self, stream: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._poll.unregister(stream)
        if stream in self._streaming:
            self._streams.remove(stream)
            self._streaming.discard(stream)
        self._asked.pop(stream, None)
        stream.close()


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Upstream(listen(argv[1]), float(argv[2])).run()


if __name__ == "__main__":
    main(sys.argv)
