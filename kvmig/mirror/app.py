"""The mirror's HTTP server: the hub's protocol for clients, and a few calls between mirrors."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any, cast
from urllib.parse import parse_qs

import httpx
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from kvmig.core.background import cancel_tasks
from kvmig.core.clock import TimeSource
from kvmig.mirror.addresses import FileAddress, ListAddress, address_of, is_plain
from kvmig.mirror.blob_folder import is_digest
from kvmig.mirror.errors import ContentRejected, DiskRefusal, HubRefusal, PlaceGone
from kvmig.mirror.facts import FileFacts
from kvmig.mirror.hub_mirror import FileContent, HubMirror
from kvmig.mirror.peer_client import BLOB, HOLDER, PEER
from kvmig.mirror.peers import HolderBook
from kvmig.mirror.ranges import asked_range

MIRROR = "x-kvmig-mirror"
"""Header of answers: where a file came from, or that the hub is gone."""
PASSED_TO_HUB = (
    b"accept", b"accept-encoding", b"authorization", b"content-length", b"content-type",
    b"if-range", b"range", b"user-agent",
)  # fmt: skip
PASSED_TO_CLIENT = (
    "accept-ranges", "content-encoding", "content-length", "content-range", "content-type", "etag",
    "location", "retry-after", "x-error-code", "x-error-message", "x-linked-etag", "x-linked-size",
    "x-repo-commit", "x-request-id",
)  # fmt: skip

Headers = dict[str, str]

log = logging.getLogger(__name__)


def words_of(secret: str) -> tuple[str, str]:
    """What clients have in their HF_ENDPOINT, and what mirrors send each other; empty without a
    secret. Both are of it and a purpose (HMAC-SHA256, its first 16 bytes): neither gives the other
    away, nor anything else that is made of the same secret."""
    if not secret:
        return "", ""
    client, peer = (
        hmac.new(secret.encode(), b"kvmig mirror, the word of " + whose, sha256).hexdigest()[:32]
        for whose in (b"clients", b"mirrors")
    )
    return client, peer


class MirrorApp:
    """The ASGI application."""

    def __init__(
        self, mirror: HubMirror, holders: HolderBook, own: str, secret: str, clock: TimeSource
    ) -> None:
        """own: the address under which other mirrors reach this one. secret: of the cluster."""
        self._mirror = mirror
        self._holders = holders
        self._own = own
        self._client_word, self._peer_word = words_of(secret)
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = MirrorAnswer(send, scope["method"] == "HEAD")
        try:
            await self._route(scope, receive, answer)
        except HubRefusal as error:
            await answer.whole(error.status, dict(error.headers), error.body)
        except ContentRejected as error:
            await answer.fail(502, str(error))
        except PlaceGone as error:
            await answer.fail(504, str(error))
        except DiskRefusal as error:  # another mirror reads it elsewhere
            await answer.fail(503, str(error))
        except OSError as error:
            log.exception("a call of the mirror")
            await answer.fail(500, f"the mirror's disk: {error.strerror}")

    async def _route(self, scope: Scope, receive: Receive, answer: MirrorAnswer) -> None:
        path = cast("bytes", scope["raw_path"]).decode("ascii", "replace")
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if not is_plain(path):
            await answer.fail(400, "the path has parts that are no names")
            return
        if path == "/-/health":
            await answer.whole(200, {}, b"")
            return
        if path.startswith("/-/"):
            await self._answer_peer(path, scope, headers, receive, answer)
            return
        if self._client_word:
            word, _, rest = path[1:].partition("/")
            if not secrets.compare_digest(word.encode(), self._client_word.encode()):
                await answer.fail(404, "there is no mirror at this address")
                return
            path = f"/{rest}"
        query = scope["query_string"].decode("ascii", "replace")
        reads = scope["method"] in ("GET", "HEAD")
        address = address_of(path, query) if reads else None
        if path == "/metrics" and reads:
            kind = {"content-type": CONTENT_TYPE_LATEST}
            await answer.whole(200, kind, self._mirror.metrics.text())
        elif isinstance(address, FileAddress):
            await self._answer_file(address, scope, headers, receive, answer)
        elif isinstance(address, ListAddress) and scope["method"] == "GET":
            await self._answer_list(address, headers, answer)
        else:
            await self._pass_on(path, query, scope, receive, answer)

    # -- clients

    async def _answer_file(
        self, address: FileAddress, scope: Scope, headers: Headers, receive: Receive,
        answer: MirrorAnswer,
    ) -> None:  # fmt: skip
        authorization = headers.get("authorization", "")
        facts, stale = await self._mirror.find_file(address, authorization)
        if facts is None:
            await self._pass_on(address.path, "", scope, receive, answer)
            return
        told = headers_of(facts)
        if stale:
            told[MIRROR] = "stale"
        part = asked_range(headers.get("range", ""), facts.size)
        if headers.get("if-range", f'"{facts.etag}"') != f'"{facts.etag}"':
            part = None
        if scope["method"] == "HEAD":
            await answer.whole(200, {**told, "content-length": str(facts.size)}, b"")
        elif part is not None and part.begin == part.end:
            await answer.whole(416, {**told, "content-range": f"bytes */{facts.size}"}, b"")
        elif not facts.size:
            await answer.whole(200, told, b"")
        else:
            content = await self._mirror.read_file(address, authorization, facts, part)
            self._mirror.metrics.files.labels(content.way).inc()
            told = {MIRROR: content.way, **told}
            await answer.stream(content, facts.size, told, receive)

    async def _answer_list(
        self, address: ListAddress, headers: Headers, answer: MirrorAnswer
    ) -> None:
        facts, stale = await self._mirror.find_list(address, headers.get("authorization", ""))
        if facts is None:
            raise PlaceGone("the hub has no such list")
        told = {"content-type": "application/json"}
        if facts.link:  # the next page is to be read here
            host = headers.get("host", "")
            prefix = f"/{self._client_word}" if self._client_word else ""
            told["link"] = facts.link.replace(self._mirror.hub.endpoint, f"http://{host}{prefix}")
        if stale:
            told[MIRROR] = "stale"
        await answer.whole(200, told, facts.body)

    async def _pass_on(
        self, path: str, query: str, scope: Scope, receive: Receive, answer: MirrorAnswer
    ) -> None:
        """Have the hub answer a call that is for no file."""
        target = f"{path}?{query}" if query else path
        headers = [(name, value) for name, value in scope["headers"] if name in PASSED_TO_HUB]
        content = None if scope["method"] in ("GET", "HEAD") else body_of(receive)
        async with self._mirror.hub.pass_on(scope["method"], target, headers, content) as came:
            told = {one: came.headers[one] for one in PASSED_TO_CLIENT if one in came.headers}
            await answer.begin(came.status_code, told)
            try:
                async for piece in came.aiter_raw():
                    await answer.send(piece)
            except httpx.HTTPError as error:
                raise PlaceGone("the hub has broken off") from error
            await answer.end()

    # -- other mirrors

    async def _answer_peer(
        self, path: str, scope: Scope, headers: Headers, receive: Receive, answer: MirrorAnswer
    ) -> None:
        word = headers.get(PEER, "")
        known = secrets.compare_digest(word.encode(), self._peer_word.encode())
        if not (self._peer_word and known):
            await answer.fail(404, "there is no such page")
            return
        etag = path.rpartition("/")[2]
        if not is_digest(etag):
            await answer.fail(400, "a digest is asked for")
        elif path.startswith(HOLDER):
            asked = parse_qs(scope["query_string"].decode("ascii", "replace"))
            asker, failed = asked.get("asker", [""])[0], asked.get("failed", [])
            here = self._mirror.folder.has(etag) and self._own not in failed
            found = self._own if here else self._holders.find(etag, asker, failed, self._clock())
            await answer.whole(200, {"content-type": "text/plain"}, found.encode())
        elif path.startswith(BLOB):
            blob = self._mirror.read_blob(etag, headers.get("range", ""))
            if blob is None:
                await answer.fail(404, "it isn't here")
            else:
                size, content = blob
                await answer.stream(content, size, {}, receive)
        else:
            await answer.fail(404, "there is no such page")


class MirrorAnswer:
    """One answer. One that has begun and doesn't end is broken off by uvicorn."""

    def __init__(self, send: Send, head: bool) -> None:
        """head: whether the client wants no body."""
        self._send = send
        self._head = head
        self._begun = False

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the status and the headers."""
        self._begun = True
        # Some hubs say in UTF-8 what is wrong; httpx has decoded it.
        raw = [(name.encode("latin-1"), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def send(self, piece: bytes) -> None:
        """Send some of the body."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """The body ends."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer; one that has begun is left as it is, and so broken off."""
        if self._begun:
            log.warning("an answer is broken off: %s", body.decode(errors="replace"))
            return
        length = {"content-length": str(len(body)), **headers}
        await self.begin(status, length)
        await self._send(
            {"type": "http.response.body", "body": b"" if self._head else body, "more_body": False}
        )

    async def fail(self, status: int, why: str) -> None:
        """Send the reason for which there is no answer."""
        said = "".join(one if one.isprintable() and ord(one) < 256 else " " for one in why)
        headers = {"content-type": "text/plain; charset=utf-8", "x-error-message": said[:500]}
        await self.whole(status, headers, why.encode())

    async def stream(
        self, content: FileContent, size: int, headers: Headers, receive: Receive
    ) -> None:
        """Send a file, or a part of it, as long as the client is there. The first bytes are awaited
        before the status."""
        sending = asyncio.create_task(self._send_content(content, size, headers))
        leaving = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await cancel_tasks(sending, leaving)

    async def _send_content(self, content: FileContent, size: int, headers: Headers) -> None:
        part = content.part
        length = size if part is None else part.end - part.begin
        told = {
            "content-type": "application/octet-stream",
            "content-length": str(length),
            **headers,
        }
        if part is not None:
            told["content-range"] = f"bytes {part.begin}-{part.end - 1}/{size}"
        pieces = content.pieces
        async with contextlib.aclosing(cast("Any", pieces)):
            first = await anext(pieces)
            await self.begin(200 if part is None else 206, told)
            await self.send(first)
            async for piece in pieces:
                await self.send(piece)
            await self.end()


def headers_of(facts: FileFacts) -> Headers:
    """The headers of an answer with a file, as the hub has them."""
    return {
        "x-repo-commit": facts.commit,
        "etag": f'"{facts.etag}"',
        "x-linked-etag": f'"{facts.etag}"',
        "x-linked-size": str(facts.size),
        "accept-ranges": "bytes",
    }


async def until_gone(receive: Receive) -> None:
    """Wait for the end of a client."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def body_of(receive: Receive) -> AsyncIterator[bytes]:
    """The body of a call. Raises PlaceGone where its client has gone."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise PlaceGone("the client has gone")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
