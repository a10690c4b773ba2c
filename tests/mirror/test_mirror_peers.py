"""Several mirrors of one cluster: one download, whoever of them dies or has wrong files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download

from kvmig.mirror.peers import ranked
from tests.support.mirrors import SECRET, MirrorProcess, MirrorThread, free_port
from tests.support.model_hub import TOKEN, ModelHub, small_model

NAME, WEIGHTS = "org/small", "model.safetensors"
LARGE = 6_000_000


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with ModelHub() as made:
        made.add(NAME, small_model(LARGE))
        yield made


def snapshot(url: str, cache: Path, name: str = NAME, token: Any = False) -> dict[str, bytes]:
    root = Path(snapshot_download(name, endpoint=url, cache_dir=cache, token=token))
    return {
        str(one.relative_to(root)): one.read_bytes() for one in root.rglob("*") if one.is_file()
    }


@pytest.mark.long
def test_three_mirrors_download_each_file_once_and_go_on_without_one_of_them(
    hub: ModelHub, tmp_path: Path
) -> None:
    ports = [free_port() for _ in range(3)]
    peers = [f"http://127.0.0.1:{port}" for port in ports]
    mirrors = [
        MirrorProcess(hub, tmp_path / f"m{port}", own, peers)
        for port, own in zip(ports, peers, strict=True)
    ]
    try:
        for one in mirrors:
            one.wait_ready()
        with ThreadPoolExecutor(3) as threads:
            places = [(one.url, tmp_path / f"c{at}") for at, one in enumerate(mirrors)]
            found = list(threads.map(lambda place: snapshot(*place), places))
        assert found == [small_model(LARGE)] * 3
        assert {one: hub.downloads(one) for one in small_model()} == {
            one: [""] for one in small_model()
        }
        kept = [len(list((tmp_path / f"m{port}" / "whole").iterdir())) for port in ports]
        assert kept == [len(small_model())] * 3

        hub.add("org/other", small_model(LARGE + 1))
        mirrors[0].kill()
        assert snapshot(mirrors[1].url, tmp_path / "d1", "org/other") == small_model(LARGE + 1)
        before = hub.sent
        assert snapshot(mirrors[2].url, tmp_path / "d2", "org/other") == small_model(LARGE + 1)
        assert hub.sent == before
    finally:
        for one in mirrors:
            one.end()


class FalsePeer:
    """A mirror of the cluster that says that it has each file, and sends other bytes."""

    def __init__(self, content: bytes) -> None:
        self.headers: list[dict[str, str]] = []
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                return

            def do_GET(self) -> None:
                peer.headers.append({key.lower(): value for key, value in self.headers.items()})
                body = peer.url.encode() if "/holder/" in self.path else content
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture
def false_peer() -> Iterator[FalsePeer]:
    made = FalsePeer(b"x" * LARGE)
    yield made
    made.close()


def beside(peer: FalsePeer, digest: str) -> dict[str, Any]:
    """Settings of a mirror whose peer is asked for that blob first."""
    port = free_port()
    while ranked(digest, [own := f"http://127.0.0.1:{port}", peer.url])[0] == own:
        port = free_port()
    return {"port": port, "url": own, "peers": (peer.url,), "secret": SECRET}


def test_what_another_mirror_sends_wrong_is_not_kept_and_comes_from_the_hub(
    hub: ModelHub, tmp_path: Path, false_peer: FalsePeer
) -> None:
    digest = hashlib.sha256(small_model(LARGE)[WEIGHTS]).hexdigest()
    more = beside(false_peer, digest)
    with MirrorThread(hub, tmp_path / "m", **more) as mirror:
        assert snapshot(mirror.url, tmp_path / "c") == small_model(LARGE)
        assert mirror.blobs[digest] == small_model(LARGE)[WEIGHTS]
        assert mirror.figure("kvmig_hub_rejected_total") >= 1
    assert hub.downloads(WEIGHTS) == [""]


def test_no_token_goes_to_another_mirror(
    hub: ModelHub, tmp_path: Path, false_peer: FalsePeer
) -> None:
    hub.models[NAME].gated = True
    more = beside(false_peer, hashlib.sha256(small_model(LARGE)[WEIGHTS]).hexdigest())
    with MirrorThread(hub, tmp_path / "m", **more) as mirror:
        assert snapshot(mirror.url, tmp_path / "c", token=TOKEN) == small_model(LARGE)
    assert false_peer.headers, "it was asked"
    assert not any("authorization" in one for one in false_peer.headers)
    assert not any(TOKEN in str(one) or SECRET in str(one) for one in false_peer.headers)
