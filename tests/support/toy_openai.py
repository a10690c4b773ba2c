"""A toy server of the OpenAI API, of nobody's engine: a program of its own, over real HTTP.

`python -m tests.support.toy_openai --port N` or `--uds PATH`. It counts: the answer's token k is
" k" with four digits. Files in `--script FOLDER` change what all of its instances do:

hold     text: the number of tokens at which answers stand still until the file is gone; speech and
         images do before they begin
mute     it says nothing of usage
drawing  text: tokens that it says of each image
deaf     it answers /health with 500
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socketserver
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = 5
"""Bytes of a token of its answers."""


def tokens_of(text: str) -> int:
    """What it says that a text takes."""
    return len(text.split())


class ToyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script = Path()
    name = "toy"
    step_s = 0.0

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        pass

    def address_string(self) -> str:
        return "client"

    def _file(self, name: str) -> str | None:
        try:
            return (self.script / name).read_text()
        except OSError:
            return None

    def do_GET(self) -> None:
        if self.path == "/health":
            self._json({}, 500 if self._file("deaf") is not None else 200)
        else:
            self._json({"error": {"message": f"no path {self.path}"}}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        with (self.script / f"asked-{os.getpid()}").open("ab") as file:
            file.write(body + b"\n")
        path = self.path.partition("?")[0]
        if path == "/v1/audio/transcriptions":
            self._json({"text": " 0001 0002", "usage": {"type": "duration", "seconds": 7}})
            return
        asked = json.loads(body)
        match path:
            case "/v1/completions" | "/v1/chat/completions":
                self._generate(asked, chat="chat" in path)
            case "/v1/embeddings":
                texts = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
                used = sum(map(tokens_of, texts))
                rows = [{"object": "embedding", "index": 0, "embedding": [0.5]} for _ in texts]
                self._told({"object": "list", "data": rows}, prompt_tokens=used, total_tokens=used)
            case "/v1/rerank":
                rows = [{"index": 0, "relevance_score": 1.0}]
                used = sum(map(tokens_of, [asked["query"], *asked["documents"]]))
                self._told({"results": rows}, total_tokens=used)
            case "/v1/score":
                self._told({"data": [{"index": 0, "score": 0.5}]}, prompt_tokens=3, total_tokens=3)
            case "/v1/audio/speech":
                self._wait()
                self._begin("audio/wav")
                for _ in range(3):
                    self._chunk(b"\0" * 1000)
                self._chunk(b"")
            case "/v1/images/generations":
                self._wait()
                self._draw(asked.get("n", 1))
            case _:
                self._json({"error": {"message": f"no path {path}"}}, 404)

    def _wait(self) -> None:
        while self._file("hold") is not None:
            time.sleep(0.02)

    def _draw(self, images: int) -> None:
        answer = {"created": 1, "data": [{"b64_json": "AAAA"}] * images}
        if each := self._file("drawing"):
            self._told(answer, input_tokens=5, output_tokens=int(each) * images)
        else:
            self._json(answer)

    def _told(self, answer: dict[str, Any], **usage: int) -> None:
        self._json(answer if self._file("mute") is not None else {**answer, "usage": usage})

    def _generate(self, asked: dict[str, Any], *, chat: bool) -> None:
        if asked.get("model") != self.name:
            self._json({"error": {"message": f"The model {asked.get('model')} is none"}}, 404)
            return
        prompt = json.dumps(asked["messages"]) if chat else asked["prompt"]
        most = asked.get("max_tokens") or asked.get("max_completion_tokens") or 16
        usage = {"prompt_tokens": tokens_of(prompt), "completion_tokens": most}
        usage["total_tokens"] = sum(usage.values())
        if not asked.get("stream"):
            text = "".join(self._tokens(most))
            part = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            self._told({"choices": [{"index": 0, "finish_reason": "length", **part}]}, **usage)
            return
        self._begin("text/event-stream")
        for text in self._tokens(most):
            part = {"delta": {"content": text}} if chat else {"text": text}
            self._event({"choices": [{"index": 0, **part}]})
        wanted = (asked.get("stream_options") or {}).get("include_usage")
        if wanted and self._file("mute") is None:
            self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _tokens(self, most: int) -> Any:
        for number in range(most):
            while (hold := self._file("hold")) and number >= int(hold):
                time.sleep(0.02)
            time.sleep(self.step_s)
            yield f" {number:04}"

    def _json(self, answer: Any, status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def _event(self, data: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


class TcpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--uds")
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--name", default="toy")
    parser.add_argument("--step-ms", type=float, default=0.0)
    flags, _ = parser.parse_known_args()
    ToyHandler.script, ToyHandler.name = flags.script, flags.name
    ToyHandler.step_s = flags.step_ms / 1e3
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if flags.uds:
        with UnixServer(flags.uds, ToyHandler) as server:
            server.serve_forever()
    with TcpServer(("127.0.0.1", flags.port), ToyHandler) as tcp:
        tcp.serve_forever()


if __name__ == "__main__":
    main()
