"""`python -m bench.load.blaster PORT RATE`: a server that only writes, to find the client's limit.

Every connection gets the same event, RATE times a second in all, as fast as one process can.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time

SLICE_S = 0.01
EVENT = (
    "data: "
    + json.dumps(
        {
            "id": "cmpl-s1234.5678",
            "object": "text_completion",
            "created": 1700000000,
            "model": "count",
            "choices": [
                {"index": 0, "text": "~", "logprobs": None, "finish_reason": None,
                 "stop_reason": None, "prompt_token_ids": None, "token_ids": None}
            ],
            "usage": None,
        }
    )
    + "\n\n"
).encode()  # fmt: skip
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def main(argv: list[str]) -> None:
    port, rate = int(argv[1]), float(argv[2])
    poll = selectors.EpollSelector()
    streams: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", port), backlog=1024) as listening:
        poll.register(listening, selectors.EVENT_READ)
        sent, began, place = 0.0, time.monotonic(), 0
        while True:
            for key, _ in poll.select(SLICE_S):
                if key.fileobj is listening:
                    stream, _ = listening.accept()
                    poll.register(stream, selectors.EVENT_READ)
                    continue
                stream = key.fileobj  # type: ignore[assignment]
                poll.unregister(stream)
                if not stream.recv(1 << 16):
                    sys.exit(0)  # the client has ended
                stream.sendall(HEAD + CHUNK)
                streams.append(stream)
                sent, began = 0.0, time.monotonic()
            due = (time.monotonic() - began) * rate
            while streams and sent < due:
                try:
                    streams[place % len(streams)].send(CHUNK)
                except OSError:
                    sys.exit(0)
                place += 1
                sent += 1


if __name__ == "__main__":
    main(sys.argv)
