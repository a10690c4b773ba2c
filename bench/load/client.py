"""`python -m bench.load.client PORT`: many streams from one process, read and hardly looked at.

It is told what to do in lines of JSON on its stdin, and answers each with one on its stdout. One
epoll loop; of what comes it counts the tokens only (`bench.load.pace.TOKEN` is in no other place
of an answer) and, of some streams, when they came.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

BUFFER = 1 << 18
PATIENCE_S = 60.0
"""Without a byte while streams are being opened."""


@dataclass(eq=False)
class Stream:
    """One connection. seen, of a watched one: (tokens before, tokens then, when) of each read."""

    sock: socket.socket
    label: str
    tokens: int = 0
    seen: list[tuple[int, int, float]] | None = None


@dataclass
class Counts:
    """Of everything since it was made. reads: system calls that brought something."""

    tokens: int = 0
    events: int = 0
    reads: int = 0
    size: int = 0
    ended: int = 0
    began: float = field(default_factory=time.monotonic)
    began_cpu: float = field(default_factory=time.process_time)

    def told(self) -> dict[str, float]:
        """With how long it was, and how much of a core this process took."""
        seconds = time.monotonic() - self.began
        return {
            "seconds": seconds,
            "tokens": self.tokens,
            "events": self.events,
            "reads": self.reads,
            "bytes": self.size,
            "ended": self.ended,
            "client_cpu": (time.process_time() - self.began_cpu) / seconds if seconds else 0.0,
        }


class Client:
    """All streams to one server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._poll = select.epoll()
        self._by_descriptor: dict[int, Stream] = {}
        self._buffer = bytearray(BUFFER)
        self._counts = Counts()
        self._waiting = 0
        self._streams: list[Stream] = []
        self._errors: list[str] = []
        self._made = 0

    def open(
        self, streams: int, watched: int, in_flight: int, body: dict[str, Any], key: str = ""
    ) -> dict[str, Any]:
        """Open so many, at most `in_flight` of which wait for their first token at once.

        watched: of so many, spread among them, it is noted when tokens come. key: of the API.
        """
        self._counts = counts = Counts()
        text = json.dumps(body).encode()
        left, heard = streams, time.monotonic()
        every = max(1, streams // watched) if watched else streams + 1
        while left or self._waiting:
            while left and self._waiting < in_flight:
                left -= 1
                self._connect(text, left % every == 0, key)
            if self._take(1.0):
                heard = time.monotonic()
            elif time.monotonic() - heard > PATIENCE_S:
                self._errors.append(f"{self._waiting + left} streams did not begin")
                break
        return {**counts.told(), "errors": self._errors[:5]}

    def measure(self, seconds: float) -> dict[str, Any]:
        """Read for so long."""
        self._counts = counts = Counts()
        for stream in self._streams:
            if stream.seen is not None:
                stream.seen = []
        end = counts.began + seconds
        while (left_s := end - time.monotonic()) > 0:
            self._take(left_s)
        seen = {stream.label: stream.seen for stream in self._streams if stream.seen is not None}
        return {**counts.told(), "errors": self._errors[:5], "seen": seen}

    def quiet(self, seconds: float, at_most: float) -> dict[str, Any]:
        """Read until nothing has come for so long."""
        self._counts = counts = Counts()
        while counts.began + at_most > time.monotonic() and self._take(seconds):
            pass
        return {**counts.told(), "errors": self._errors[:5]}

    def close(self) -> dict[str, Any]:
        """Leave all streams."""
        for stream in self._streams:
            self._drop(stream)
        self._streams.clear()
        return {}

    def _connect(self, body: bytes, watched: bool, key: str) -> None:
        label = f"s{os.getpid()}.{self._made}"
        self._made += 1
        sock = socket.create_connection(("127.0.0.1", self._port), PATIENCE_S)
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %s\r\nX-Request-Id: %s\r\nContent-Length: %d\r\n\r\n%s"
            % (key.encode(), label.encode(), len(body), body)
        )
        sock.setblocking(False)
        stream = Stream(sock, label, seen=[] if watched else None)
        self._streams.append(stream)
        self._by_descriptor[sock.fileno()] = stream
        self._poll.register(sock.fileno(), select.EPOLLIN)
        self._waiting += 1

    def _take(self, timeout_s: float) -> int:
        """What has come, or the first that comes within the time; how many reads that were."""
        counts, buffer = self._counts, self._buffer
        ready = self._poll.poll(timeout_s)
        for descriptor, _ in ready:
            stream = self._by_descriptor[descriptor]
            try:
                size = stream.sock.recv_into(buffer)
            except BlockingIOError:
                continue
            except OSError as error:
                self._failed(stream, str(error))
                continue
            if not size:
                counts.ended += 1
                self._failed(stream, "the connection was closed")
                continue
            tokens = buffer.count(b"~", 0, size)
            counts.tokens += tokens
            counts.events += buffer.count(b"data: {", 0, size)
            counts.size += size
            counts.reads += 1
            if not stream.tokens:
                if b" 200 " not in buffer[:16] and buffer.startswith(b"HTTP/1.1"):
                    self._failed(stream, bytes(buffer[:size]).decode(errors="replace")[-200:])
                    continue
                self._waiting -= tokens > 0
            if stream.seen is not None:
                now = stream.tokens + tokens
                stream.seen.append((stream.tokens, now, time.monotonic()))
            stream.tokens += tokens
        return len(ready)

    def _failed(self, stream: Stream, why: str) -> None:
        self._errors.append(why)
        if not stream.tokens:
            self._waiting -= 1
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        if self._by_descriptor.pop(stream.sock.fileno(), None) is not None:
            self._poll.unregister(stream.sock.fileno())
            stream.sock.close()


def main(argv: list[str]) -> None:
    client = Client(int(argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(client, order.pop("do"))(**order)), flush=True)


if __name__ == "__main__":
    main(sys.argv)
