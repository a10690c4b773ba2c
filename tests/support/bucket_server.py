"""moto's S3 server in a thread, and what can go wrong in front of it."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

KEY = "AKIAEXAMPLEEXAMPLE"
SECRET = "the-secret-of-the-bucket/tests"
TOKEN = "the-session-token-of-the-bucket/tests"
BUCKET = "models"
PIECE = 16 << 10

Environ = dict[str, Any]
StartResponse = Callable[..., Any]


@dataclass
class BucketFaults:
    """What goes wrong."""

    refused: str = ""
    """The status of all answers, such as `403 Forbidden`; empty: they are the server's own."""
    cut_after: list[int] = field(default_factory=list)
    """Bytes after which the next answers with a part of a file break off, in order."""
    pause_s: float = 0.0
    """Before each piece of a file."""
    held: threading.Event = field(default_factory=threading.Event)
    """While it isn't set, files stop after `hold_after` bytes."""
    hold_after: int | None = None


class BucketServer:
    """Serves until the end of the block."""

    def __init__(self) -> None:
        self.faults = BucketFaults()
        self.asked: list[tuple[str, str, str]] = []
        """Method, path and range of each call."""
        self.sent = 0
        """Bytes of answers to GET calls with a range."""
        self._inner = DomainDispatcherApplication(create_backend_app)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_SESSION_TOKEN": TOKEN,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def __enter__(self) -> Self:
        self._thread.start()
        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )
        self.client.create_bucket(Bucket=BUCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self.faults.held.set()
        self.client.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def forget(self) -> None:
        """Misbehave no more; forget what was asked for."""
        self.faults.held.set()
        self.faults = BucketFaults()
        self.asked.clear()
        self.sent = 0

    def put(self, folder: str, files: dict[str, bytes]) -> None:
        """Put files into a folder of the bucket."""
        for name, data in files.items():
            self.client.put_object(Bucket=BUCKET, Key=f"{folder}/{name}", Body=data)

    def put_in_parts(self, key: str, data: bytes, part: int = 5 << 20) -> str:
        """Put a file by a multipart upload; its ETag."""
        upload = self.client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
        own = {"Bucket": BUCKET, "Key": key, "UploadId": upload}
        parts = []
        for at, begin in enumerate(range(0, len(data), part), 1):
            sent = self.client.upload_part(**own, PartNumber=at, Body=data[begin : begin + part])
            parts.append({"ETag": sent["ETag"], "PartNumber": at})
        done = self.client.complete_multipart_upload(**own, MultipartUpload={"Parts": parts})
        return str(done["ETag"])

    def downloads(self, name: str) -> list[str]:
        """The ranges of the calls that asked for a file's bytes."""
        return [
            ranged
            for method, path, ranged in self.asked
            if method == "GET" and path.endswith(f"/{name}")
        ]

    def _answer(self, environ: Environ, start: StartResponse) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        ranged = environ.get("HTTP_RANGE", "")
        self.asked.append((method, path, ranged))
        if self.faults.refused:
            start(self.faults.refused, [("content-length", "0")])
            return ()
        found: Iterable[bytes] = self._inner(environ, start)
        if method != "GET" or not ranged:
            return found
        return self._misbehaving(found, environ["werkzeug.socket"])

    def _misbehaving(self, found: Iterable[bytes], connection: socket.socket) -> Iterator[bytes]:
        cut = self.faults.cut_after.pop(0) if self.faults.cut_after else None
        sent = 0
        for whole in found:
            for begin in range(0, len(whole), PIECE):
                piece = whole[begin : begin + PIECE]
                if cut is not None and sent + len(piece) > cut:
                    connection.shutdown(socket.SHUT_RDWR)
                    raise ConnectionResetError("cut for a test")
                hold = self.faults.hold_after
                if hold is not None and sent + len(piece) > hold:
                    self.faults.held.wait(60)
                time.sleep(self.faults.pause_s)
                yield piece
                sent += len(piece)
                self.sent += len(piece)
