"""A hub of models that speaks the protocol of huggingface.co, and can be told to misbehave.

Weights are redirected to another origin, as the hub does with large files; it is the same server
under its other name, and counts whether a token gets there.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_rightrightright"
PIECE = 16 << 10


def git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class HubModel:
    """A repository: its newest commit, and files by commit."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    newest: str = ""
    gated: bool = False

    def commit(self, files: dict[str, bytes]) -> str:
        """Another revision; its commit."""
        text = json.dumps({name: git_digest(data) for name, data in sorted(files.items())})
        self.newest = hashlib.sha1(text.encode() + self.newest.encode()).hexdigest()
        self.commits[self.newest] = files
        return self.newest


@dataclass
class HubFaults:
    """What goes wrong."""

    statuses: list[int] = field(default_factory=list)
    """Of the next answers, in order, whatever is asked for."""
    cut_after: dict[str, list[int]] = field(default_factory=dict)
    """Bytes after which the next answers with a file break off, in order."""
    other_bytes: dict[str, bytes] = field(default_factory=dict)
    """What comes in place of a file's own bytes."""
    once: dict[str, list[bytes]] = field(default_factory=dict)
    """The same for the next answers, in order."""
    pause_s: float = 0.0
    """Before each piece of a file."""
    held: threading.Event = field(default_factory=threading.Event)
    """While it isn't set, files stop after `hold_after` bytes."""
    hold_after: int | None = None
    no_tags: bool = False
    """Web servers' answers have no ETag."""
    no_sizes: bool = False
    """Lists have names only, as those of some mirrors."""
    leads_to: str = ""
    """Where files are redirected to."""
    loops: bool = False
    """Redirects lead nowhere."""


class ModelHub:
    """Serves until the end of the block."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """host: address to listen on; this host's own has another name for large files."""
        self.models: dict[str, HubModel] = {}
        self.faults = HubFaults()
        self.asked: list[tuple[str, str, str]] = []
        """Method, path and range of each call."""
        self.sent = 0
        """Bytes of files."""
        self.page = 1000
        """Entries of a page of a tree."""
        self.leaked = 0
        """Calls at the other origin with a token."""
        hub = self

        class Handler(HubHandler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://{host}:{self.port}"
        self.large_files = f"http://{'localhost' if host == '127.0.0.1' else host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.faults.held.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def add(self, name: str, files: dict[str, bytes], *, gated: bool = False) -> HubModel:
        """A repository with one commit."""
        model = self.models[name] = HubModel(gated=gated)
        model.commit(files)
        return model

    def downloads(self, name: str) -> list[str]:
        """The ranges of the calls that asked for a file; empty: for all of it."""
        return [
            ranged
            for method, path, ranged in self.asked
            if method == "GET" and path.endswith(f"/{name}") and "/resolve/" in path
        ]


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ModelHub

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path, self.headers.get("range", "")))
        if hub.faults.statuses and (status := hub.faults.statuses.pop(0)) != 200:
            self._say(status, {}, b"")
            return
        words = path.strip("/").split("/")
        if words[0] == "cdn":
            hub.leaked += "authorization" in self.headers
            self._send(self._find(words[1]), words[1], words[2])
        elif words[0] == "web":
            self._web(words[1:], path)
        elif words[0] == "modelscope":
            asked = parse_qs(urlsplit(self.path).query)
            model, name = self.hub.models["/".join(words[4:6])], asked["FilePath"][0]
            data = model.commits[model.newest][name]
            self._send(data, hashlib.md5(data).hexdigest(), name)
        elif words[:2] == ["api", "models"] and "tree" in words:
            self._tree(words)
        elif words[:2] == ["api", "models"]:
            self._list(words)
        elif "resolve" in words:
            self._resolve(words)
        else:
            self._say(404, {}, b"")

    def _find(self, digest: str) -> bytes:
        every = (data for one in self._files() for data in one.values())
        return next(data for data in every if hashlib.sha256(data).hexdigest() == digest)

    def _files(self) -> Iterator[dict[str, bytes]]:
        for model in self.hub.models.values():
            yield from model.commits.values()

    # -- the hub's protocol

    def _model(self, name: str) -> HubModel | None:
        found = self.hub.models.get(name)
        if found is None:
            self._say(404, {"x-error-code": "RepoNotFound"}, b'{"error": "Repository not found"}')
        return found

    def _list(self, words: list[str]) -> None:
        at = words.index("revision") if "revision" in words else len(words)
        model = self._model("/".join(words[2:at]))
        if model is None:
            return
        revision = "/".join(words[at + 1 :]) or "main"
        commit = model.newest if revision == "main" else revision
        if commit not in model.commits:
            self._say(404, {"x-error-code": "RevisionNotFound"}, b'{"error": "Invalid rev id"}')
            return
        asked = parse_qs(urlsplit(self.path).query)
        sizes = asked.get("blobs", ["false"])[0].lower() == "true" and not self.hub.faults.no_sizes
        siblings = [
            {"rfilename": name, **(sibling(name, data) if sizes else {})}
            for name, data in model.commits[commit].items()
        ]
        name = "/".join(words[2:at])
        body = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []}
        self._say(200, {"content-type": "application/json"}, json.dumps(body).encode())

    def _tree(self, words: list[str]) -> None:
        """A list in pages, and the hashes by which clients of today would fetch files elsewhere."""
        at = words.index("tree")
        model = self._model("/".join(words[2:at]))
        if model is None:
            return
        commit = model.newest if words[at + 1] == "main" else words[at + 1]
        asked = parse_qs(urlsplit(self.path).query)
        begin = int(asked.get("cursor", ["0"])[0])
        files = list(model.commits[commit].items())
        page = files[begin : begin + self.hub.page]
        body = [
            {"type": "file", "path": name, "size": len(data), "oid": git_digest(data),
             "xetHash": "0" * 64, **tree_entry(name, data)}
            for name, data in page
        ]  # fmt: skip
        headers = {"content-type": "application/json"}
        if begin + self.hub.page < len(files):
            own = f"{self.hub.url}{urlsplit(self.path).path}"
            headers["link"] = f'<{own}?recursive=true&cursor={begin + self.hub.page}>; rel="next"'
        self._say(200, headers, json.dumps(body).encode())

    def _resolve(self, words: list[str]) -> None:
        at = words.index("resolve")
        model = self._model("/".join(words[:at]))
        if model is None:
            return
        commit, name = words[at + 1], "/".join(words[at + 2 :])
        commit = model.newest if commit == "main" else commit
        if model.gated and self.headers.get("authorization") != f"Bearer {TOKEN}":
            said = b"Access to model is restricted"
            self._say(401, {"x-error-code": "GatedRepo"}, said)
            return
        if name not in model.commits.get(commit, {}):
            self._say(404, {"x-error-code": "EntryNotFound"}, b"")
            return
        if self.hub.faults.loops:
            self._say(302, {"location": self.path}, b"")
            return
        data = model.commits[commit][name]
        own = {"x-repo-commit": commit}
        if not is_large(name):
            self._send(data, git_digest(data), name, own)
            return
        digest = hashlib.sha256(data).hexdigest()
        own |= {"x-xet-hash": digest, "link": '</api/xet>; rel="xet-auth"'}
        own |= {"x-linked-etag": f'"{digest}"', "x-linked-size": str(len(data))}
        there = f"{self.hub.large_files}/cdn/{digest}/{name}"
        own["location"] = self.hub.faults.leads_to or there
        self._say(302, own, b"")

    # -- a plain web server: /web/FOLDER/ lists, /web/FOLDER/NAME is a file of the newest commit

    def _web(self, words: list[str], path: str) -> None:
        files = self.hub.models[words[0]].commits[self.hub.models[words[0]].newest]
        below = "/".join(words[1:])
        if path.endswith("/"):
            prefix = f"{below}/" if below else ""
            own = [one.removeprefix(prefix) for one in files if one.startswith(prefix)]
            inside = sorted({one.partition("/")[0] + "/" * ("/" in one) for one in own})
            links = "".join(f'<a href="{one}">{one}</a>' for one in ("../", "?C=M", *inside))
            self._say(200, {"content-type": "text/html"}, f"<html>{links}</html>".encode())
        elif below in files and self.hub.faults.leads_to:
            self._say(302, {"location": self.hub.faults.leads_to}, b"")
        elif below in files:
            self._send(files[below], hashlib.md5(files[below]).hexdigest(), below)
        else:
            self._say(404, {}, b"")

    # -- answers

    def _say(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send(self, data: bytes, etag: str, name: str, own: dict[str, str] | None = None) -> None:
        faults, total = self.hub.faults, len(data)
        same = self.headers.get("if-range", f'"{etag}"') == f'"{etag}"'
        ranged = self.headers.get("range", "") if same else ""
        first, _, last = ranged.removeprefix("bytes=").partition("-")
        begin = int(first or 0)
        once = faults.once.get(name)
        data = once.pop(0) if once and self.command == "GET" else data
        data = faults.other_bytes.get(name, data)[begin : int(last) + 1 if last else None]
        self.send_response(206 if ranged else 200)
        for key, value in (own or {}).items():
            self.send_header(key, value)
        if not faults.no_tags:
            self.send_header("etag", f'"{etag}"')
        self.send_header("content-length", str(len(data)))
        if ranged:
            until = begin + len(data) - 1
            self.send_header("content-range", f"bytes {begin}-{until}/{total}")
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = faults.cut_after.get(name)
        until = cuts.pop(0) if cuts else len(data)
        for at in range(0, min(until, len(data)), PIECE):
            if faults.hold_after is not None and begin + at >= faults.hold_after:
                faults.held.wait(60)
            if faults.pause_s:
                time.sleep(faults.pause_s)
            piece = data[at : min(at + PIECE, until)]
            try:
                self.wfile.write(piece)
            except OSError:
                self.close_connection = True
                return
            self.hub.sent += len(piece)
        if until < len(data):
            self.close_connection = True


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


def tree_entry(name: str, data: bytes) -> dict[str, Any]:
    """What a tree says of a large file."""
    if not is_large(name):
        return {}
    lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return {"lfs": lfs}


def sibling(name: str, data: bytes) -> dict[str, Any]:
    """What a list says of a file."""
    blob = {"size": len(data), "blobId": git_digest(data)}
    if is_large(name):
        digest = hashlib.sha256(data).hexdigest()
        blob["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
    return blob


def small_model(weights: int = 300_000) -> dict[str, bytes]:
    """The files of a repository, with some that no engine reads."""
    pattern = bytes(range(256)) * (weights // 256 + 1)
    return {
        "config.json": b'{"model_type": "toy"}',
        "tokenizer.json": b"{}" * 500,
        "model.safetensors": pattern[:weights],
        "pytorch_model.bin": b"the same once more",
        "original/params.json": b"{}",
        "README.md": b"# A model",
    }
