"""A web server with TLS that has one catalogue of models."""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from tests.support.certificates import Authority

ONE = """
date = "2026-11-28"
[[models]]
name = "small"
source = "hf:org/small"
parameters = 1
gb = 2
licence = "MIT"
"""


@dataclass
class CatalogueSite:
    """A server with TLS that has one file."""

    folder: Path
    body: bytes = ONE.encode()
    status: int = 200
    leads_to: str = ""
    length: int | None = None
    """Bytes that it promises; None: those that come."""
    slow: threading.Event | None = None
    """What it waits for amid its answer."""
    asked: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        site = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                return

            def do_GET(self) -> None:
                site.asked.append(self.path)
                self.send_response(site.status)
                if site.leads_to:
                    self.send_header("location", site.leads_to)
                length = len(site.body) if site.length is None else site.length
                self.send_header("content-length", str(length))
                self.end_headers()
                try:
                    self.wfile.write(site.body[:10])
                    if site.slow is not None:
                        site.slow.wait(30)
                    self.wfile.write(site.body[10:])
                except OSError:  # of a client that has had enough
                    self.close_connection = True

        authority = Authority.make()
        files = authority.write(self.folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert, files.key)
        self.trusted = files.cert  # the authority's own is in it
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.place = f"127.0.0.1:{self._server.server_address[1]}/catalogue.toml"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.slow is not None:
            self.slow.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
