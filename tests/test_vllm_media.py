"""URLs in a call to vLLM's own application: whose they are, and what its client learns."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio
from fastapi import FastAPI

from bench.hostile_bodies import png
from kvmig.engines.vllm import flags
from kvmig.openai_server.media_fetch import NOT_FETCHED
from kvmig.openai_server.vllm_media import FILE_NOT_READ
from tests.environment import environment
from tests.tiny_blip2 import make
from tests.vllm_application import MODEL, application, client_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PIXELS = "VLLM_MAX_IMAGE_PIXELS"
TEMPLATE = "{% for one in messages %}{% for part in one.content %}<image>{% endfor %}{% endfor %}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FastAPI]:
    folder = tmp_path_factory.mktemp("blip2")
    template = folder / "template"
    template.write_text(TEMPLATE)
    more = (f"--chat-template={template}", "--chat-template-content-format=openai")
    async with application(*more, model=make(folder)) as (made, _):
        yield made


@contextmanager
def listening() -> Iterator[tuple[int, list[str]]]:
    """A server of this machine's own: its port, and what it was asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()


def bodies(url: str) -> dict[str, dict[str, Any]]:
    """A call of each API with an image of the URL."""
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    source = {"type": "image", "source": {"type": "url", "url": url}}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "low"}]}
    return {
        "/v1/chat/completions": {"model": MODEL, "messages": chat, "max_tokens": 4},
        "/v1/messages": {
            "model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": [source]}],
        },
        "/v1/responses": {"model": MODEL, "input": [item], "max_output_tokens": 4},
        "/tokenize": {"model": MODEL, "messages": chat},
    }  # fmt: skip


@pytest.mark.parametrize("path", bodies(""))
async def test_an_image_of_this_machines_own_network_is_not_fetched(
    app: FastAPI, path: str
) -> None:
    with listening() as (port, asked):
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]"):
            async with client_of(app) as client:
                answer = await client.post(path, json=bodies(f"http://{host}:{port}/image")[path])
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["message"] == NOT_FETCHED
        assert asked == []


@pytest.mark.parametrize("path", bodies(""))
@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("file:///etc/passwd", FILE_NOT_READ),
        ("file:///no/such/file", FILE_NOT_READ),
        ("data:image/png,abc", "Only base64 data URLs are supported"),
        ("data:image/png;base64,abcd", "cannot identify image"),
        ("ftp://a.org/x", "must be either"),
        ("x", ""),
    ],
)
async def test_an_url_that_is_of_no_use_is_the_clients_mistake(
    app: FastAPI, path: str, url: str, sentence: str
) -> None:
    async with client_of(app) as client:
        answer = await client.post(path, json=bodies(url)[path])
    assert answer.status_code == 400, answer.text
    assert sentence in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", bodies(""))
async def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(
    app: FastAPI, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with environment({}):
        os.environ.pop(PIXELS, None)
        flags.set_environment()
        said = os.environ[PIXELS]
    monkeypatch.setenv(PIXELS, said)
    url = f"data:image/png;base64,{png(8000).decode()}"
    async with client_of(app) as client:
        answer = await client.post(path, json=bodies(url)[path])
    assert answer.status_code == 400, answer.text
    assert "64000000 pixels" in answer.json()["error"]["message"]
    assert str(flags.IMAGE_PIXELS) in answer.json()["error"]["message"]
