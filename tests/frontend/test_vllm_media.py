"""URLs in a call to vLLM's own application: whose they are, and what its client learns."""

from __future__ import annotations

import asyncio
import http.server
import os
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI
from PIL import Image, PngImagePlugin
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media.connector import MediaConnector

from bench.hostile_bodies import png
from kvmig.asgi.call import HttpCall
from kvmig.engines.vllm import flags
from kvmig.frontend.media_room import PLACES, MediaRoom
from kvmig.frontend.openai.media_fetch import NOT_FETCHED
from kvmig.frontend.openai.vllm.media import FILE_NOT_READ
from tests.support.environment import environment
from tests.support.http_calls import in_call
from tests.support.inside import media_loading
from tests.support.media_files import IMAGES, OTHERS
from tests.support.tiny_blip2 import make
from tests.support.vllm_application import MODEL, application, client_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PIXELS = "VLLM_MAX_IMAGE_PIXELS"
SMALL = IMAGES["PNG"]((64, 64))
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
            answer = await post(app, path, bodies(f"http://{host}:{port}/image")[path], 400)
            assert answer.json()["error"]["message"] == NOT_FETCHED
        assert asked == []


async def post(app: FastAPI, path: str, body: Any, status: int) -> httpx.Response:
    async with client_of(app) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer


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
    answer = await post(app, path, bodies(url)[path], 400)
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
    answer = await post(app, path, bodies(url)[path], 400)
    assert "64000000 pixels" in answer.json()["error"]["message"]
    assert str(flags.IMAGE_PIXELS) in answer.json()["error"]["message"]


# -- what a call's images may take together


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{b64encode(data).decode()}"


@pytest.mark.parametrize("path", bodies(""))
async def test_an_image_that_takes_too_much_is_refused_by_its_header(
    app: FastAPI, path: str
) -> None:
    url = data_url(IMAGES["PNG with alpha"]((3000, 3000)))
    answer = await post(app, path, bodies(url)[path], 400)
    said = answer.json()["error"]["message"]
    assert "PNG of 3000 x 3000 pixels" in said
    assert "allowed are 100.0 MB a call (--max-media)" in said


async def test_images_of_one_call_count_together_in_all_its_conversations(app: FastAPI) -> None:
    path, url = "/v1/chat/completions", data_url(IMAGES["PNG"]((2000, 1500)))
    one = bodies(url)[path]
    async with client_of(app) as client:
        many = one | {"messages": [one["messages"]] * 6}
        answer = await client.post(f"{path}/batch", json=many)
    assert answer.status_code == 400, answer.text
    assert "(--max-media)" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("app")
async def test_images_of_one_prompt_count_together() -> None:
    url = data_url(IMAGES["PNG"]((2000, 1500)))
    with in_call(HttpCall()) as call:
        loads = [MediaConnector().fetch_image_async(url) for _ in range(6)]
        found = await asyncio.gather(*loads, return_exceptions=True)
    refused = [one for one in found if isinstance(one, VLLMValidationError)]
    assert [one in refused for one in found] == [False] * 4 + [True] * 2
    assert refused[0].parameter == "image_url"
    assert media_loading().room.free == PLACES - 1
    call.end_call()
    assert media_loading().room.free == PLACES


@pytest.mark.parametrize("kind", IMAGES)
async def test_an_image_of_each_kind_is_read(app: FastAPI, kind: str) -> None:
    body = bodies(data_url(IMAGES[kind]((96, 64))))["/tokenize"]
    await post(app, "/tokenize", body, 200)


@pytest.mark.parametrize("kind", OTHERS)
async def test_an_image_of_another_format_is_refused_before_its_decoder_sees_it(
    app: FastAPI, kind: str
) -> None:
    body = bodies(data_url(OTHERS[kind]))["/v1/chat/completions"]
    answer = await post(app, "/v1/chat/completions", body, 400)
    error = answer.json()["error"]
    assert "must be PNG, JPEG, WEBP or GIF" in error["message"]
    assert error["param"] == "image_url"


async def test_a_photo_of_a_telephone_is_read(app: FastAPI) -> None:
    body = bodies(data_url(IMAGES["turned JPEG"]((4032, 3024))))["/tokenize"]
    await post(app, "/tokenize", body, 200)


async def test_texts_within_a_png_are_bounded(app: FastAPI) -> None:
    info = PngImagePlugin.PngInfo()
    for number in range(4):
        info.add_text(f"t{number}", "a" * 900_000, zip=True)
    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=info)
    await post(app, "/tokenize", bodies(data_url(file.getvalue()))["/tokenize"], 400)


@pytest.mark.parametrize("path", bodies(""))
@pytest.mark.parametrize(
    "field", [{"media_io_kwargs": {"video": {"num_frames": -1}}}, {"mm_processor_kwargs": {"a": 1}}]
)
async def test_a_client_may_not_say_how_media_are_loaded(
    app: FastAPI, path: str, field: dict[str, Any]
) -> None:
    if path == "/v1/messages":
        pytest.skip("it has no such fields, and ignores what it doesn't know")
    (name,) = field
    answer = await post(app, path, bodies(data_url(SMALL))[path] | field, 400)
    assert name in answer.json()["error"]["message"]


async def test_every_place_is_given_back(app: FastAPI) -> None:
    async with client_of(app) as client:
        for path in bodies(""):
            await client.post(path, json=bodies(data_url(SMALL))[path])
            await client.post(path, json=bodies("data:image/png;base64,abcd")[path])
    assert media_loading().room.free == PLACES


async def test_images_are_decoded_while_no_more_calls_do_than_there_are_places(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = MediaRoom(places=0, wait_s=0.05)
    monkeypatch.setattr(media_loading(), "room", room)
    answer = await post(app, "/tokenize", bodies(data_url(SMALL))["/tokenize"], 503)
    assert "try again" in answer.json()["error"]["message"]


# -- prompts that are made on a thread


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embeds(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FastAPI]:
    folder = tmp_path_factory.mktemp("embeds")
    template = folder / "template"
    template.write_text(TEMPLATE)
    chats = (f"--chat-template={template}", "--chat-template-content-format=openai")
    more = (*chats, "--runner=pooling", "--convert=embed")
    async with application(*more, model=make(folder), task="embed") as (made, _):
        yield made


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_images_of_embeddings_are_bounded_as_those_of_chats(
    embeds: FastAPI, path: str
) -> None:
    chat = bodies(data_url(IMAGES["PNG with alpha"]((3000, 3000))))["/v1/chat/completions"]
    body = {"model": MODEL, "messages": chat["messages"]}
    answer = await post(embeds, path, body, 400)
    assert "(--max-media)" in answer.json()["error"]["message"]
    assert media_loading().room.free == PLACES


async def test_an_image_of_an_embedding_is_decoded_in_its_calls_place(
    embeds: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = bodies(data_url(SMALL))["/v1/chat/completions"]
    body = {"model": MODEL, "messages": chat["messages"]}
    monkeypatch.setattr(media_loading(), "room", MediaRoom(places=0, wait_s=0.05))
    answer = await post(embeds, "/v1/embeddings", body, 503)
    assert "media of other calls" in answer.text
