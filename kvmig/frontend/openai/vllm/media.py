"""vLLM's connector for media: fetches by our rules, and decodes within what a call may take.

Every image, recording and video of a call comes through here, whichever API it has. All that must
be fetched is fetched at once; then one after the other is decoded, in the call's place among those
that decode at the same time.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from vllm.connections import HTTPConnection, _get_response_size_limit
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError
from vllm.multimodal.media import connector as vllm_connector
from vllm.multimodal.media.base import MediaIO
from vllm.multimodal.media.connector import MediaConnector
from vllm.renderers import base as vllm_renderers

from kvmig.asgi.call import HttpCall, current_call
from kvmig.core.config import HttpConfig
from kvmig.frontend.media_budget import MediaBudget, MediaCost, MediaTooLarge
from kvmig.frontend.media_room import CallMedia, MediaRoom, NoPlace
from kvmig.frontend.media_rules import MediaRefused, MediaRules
from kvmig.frontend.openai.media_fetch import MOST_BYTES, MOST_REDIRECTS, fetch_media
from kvmig.frontend.openai.vllm.decoding import bound_decoding, decode_within, field_of
from kvmig.frontend.openai.vllm.tensors import bound_tensors

_load_as_vllm = MediaConnector.load_from_url
_load_async_as_vllm = MediaConnector.load_from_url_async
_submit_as_vllm = vllm_renderers._SwappableExecutor.submit
FILE_NOT_READ = "a file: URL must be of media below --allowed-local-media-path, if there is one"
LONGEST_S = 120.0
"""Timeout of one medium whose prompt is made on a thread: to be fetched, to wait, to be decoded."""


class _Loading:
    """How media are loaded in this process."""

    def __init__(
        self,
        rules: MediaRules,
        most: int,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.rules = rules
        self.most = most
        self.room = MediaRoom()
        self.loop = loop
        self.thread = threading.get_ident()

    def of_call(self) -> CallMedia:
        """The media of the call that this task works for."""
        call = current_call.get()
        if call is None:
            return CallMedia(self.room, "", MediaBudget(self.most))
        if not isinstance(call.media, CallMedia):
            # The body is there as it came, and once more in what was read out of it.
            body = 0 if call.body is None else 2 * call.body.size
            call.media = CallMedia(self.room, call.tenant, MediaBudget(self.most, body))
        return call.media


_loading = _Loading(MediaRules(), HttpConfig().max_media)


def load_media_by(rules: MediaRules, most: int) -> None:
    """Fetch for clients by these rules only, and decode nothing that takes more than
    the given bytes of a call, from now on. Within the event loop that serves.
    """
    global _loading
    _loading = _Loading(rules, most, asyncio.get_running_loop())
    HTTPConnection.async_get_bytes = _get_bytes
    HTTPConnection.get_bytes = _get_bytes_at_once
    MediaConnector._assert_url_in_allowed_media_domains = _leave_to_rules
    MediaConnector.load_from_url = _load
    MediaConnector.load_from_url_async = _load_async
    vllm_renderers._SwappableExecutor.submit = _submit_in_context
    bound_decoding()
    bound_tensors()


# -- fetching


async def _get_bytes(
    self: HTTPConnection,
    url: str,
    *,
    timeout: float | None = None,  # noqa: ASYNC109 - the name is vLLM's
    allow_redirects: bool = True,
    max_bytes: int | None = None,
    request_budget: object = None,
) -> bytes:
    """request_budget: vLLM 0.33's own of what a call fetches; ours is smaller."""
    limit, _ = _get_response_size_limit(max_bytes)
    try:
        return await fetch_media(
            _loading.rules,
            url,
            timeout_s=timeout,
            redirects=MOST_REDIRECTS if allow_redirects else 0,
            most_bytes=min(limit or MOST_BYTES, MOST_BYTES),
            count=partial(_count_fetched, current_call.get(), _loading.of_call().budget),
        )
    except MediaRefused as error:
        raise VLLMValidationError(str(error)) from None


def _count_fetched(call: HttpCall | None, budget: MediaBudget, size: int) -> None:
    """What comes is kept, and copied once it is complete; it takes of the room for bodies."""
    budget.count_media("what is fetched", MediaCost(2 * size))
    full = "" if call is None or call.body is None else call.body.count_bytes(size)
    if full == "account":
        sentence = "the bodies and media of this key's other calls take all of its room, try again"
        raise GracefulHTTPError(sentence, HTTPStatus.TOO_MANY_REQUESTS)
    if full:
        sentence = "the bodies and media of other calls take all of the room, try again"
        raise GracefulHTTPError(sentence, HTTPStatus.SERVICE_UNAVAILABLE)


def _get_bytes_at_once(self: HTTPConnection, url: str, **options: Any) -> bytes:
    """Fetch for callers without an event loop, or within one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(_get_bytes(self, url, **options))).result()


def _leave_to_rules(self: MediaConnector, url_spec: object) -> None:
    """Do nothing: the rules look at the host that is connected to, as the client of HTTP
    understands the URL."""


class _AsItComes(MediaIO[bytes]):
    """What is fetched, not decoded yet. wanted: what decodes it."""

    def __init__(self, wanted: MediaIO[Any]) -> None:
        super().__init__()
        self._wanted = wanted

    def get_max_bytes(self) -> int | None:
        most: int | None = self._wanted.get_max_bytes()
        return most

    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        raise NotImplementedError

    def load_file(self, filepath: Path) -> bytes:
        if filepath.stat().st_size > MOST_BYTES:
            raise ValueError(f"the file is larger than {MOST_BYTES} bytes")
        return filepath.read_bytes()


# -- loading


async def _load_async(
    self: MediaConnector, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None
) -> Any:
    media = _loading.of_call()
    with _blaming(url, media_io):
        inline = url[:5].lower() == "data:"
        if inline:
            decode = partial(self._load_data_url, url, media_io)
        else:
            with media.fetching():
                raw = _AsItComes(media_io)
                data = await _load_async_as_vllm(self, url, raw, fetch_timeout=fetch_timeout)
            decode = partial(media_io.load_bytes, data)
        async with media.decoding():
            return await _decode(media.budget, decode, inline=inline)


async def _decode(budget: MediaBudget, decode: Callable[[], Any], *, inline: bool) -> Any:
    counted = budget.copy()
    before = counted.kept
    made = await asyncio.get_running_loop().run_in_executor(
        vllm_connector.global_thread_pool, partial(decode_within, counted, decode, inline=inline)
    )
    budget.kept += counted.kept - before
    return made


def _load(
    self: MediaConnector, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None
) -> Any:
    """Load for prompts that are made on a thread, such as those of embeddings."""
    loop = _loading.loop
    if loop is None or loop.is_closed() or threading.get_ident() == _loading.thread:
        with _blaming(url, media_io):
            budget = MediaBudget(_loading.most)
            load = partial(_load_as_vllm, self, url, media_io, fetch_timeout=fetch_timeout)
            return decode_within(budget, load, inline=url[:5].lower() == "data:")
    coming = asyncio.run_coroutine_threadsafe(
        _load_async(self, url, media_io, fetch_timeout=fetch_timeout), loop
    )
    try:
        return coming.result(LONGEST_S)
    except TimeoutError:
        coming.cancel()
        sentence = f"the media of the call were not there within {LONGEST_S:g} s, try again"
        raise GracefulHTTPError(sentence, HTTPStatus.SERVICE_UNAVAILABLE) from None


def _submit_in_context(
    self: vllm_renderers._SwappableExecutor, work: Callable[..., Any], /, *args: Any, **named: Any
) -> Future[Any]:
    """Let the thread know whose call it works for."""
    run = contextvars.copy_context().run
    future: Future[Any] = _submit_as_vllm(self, run, work, *args, **named)
    return future


@contextmanager
def _blaming(url: str, media_io: MediaIO[Any]) -> Iterator[None]:
    """Make any error of a library that reads media the client's mistake."""
    try:
        yield
    except MemoryError:
        raise
    except MediaTooLarge as error:
        field = field_of(media_io)
        raise VLLMValidationError(str(error), parameter=field, value=error.size) from None
    except NoPlace as error:
        raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from None
    except Exception as error:
        if url[:5].lower() == "file:":  # its errors would tell which files are there
            raise VLLMValidationError(FILE_NOT_READ) from error
        if isinstance(error, (VLLMError, ValueError)):
            raise
        raise VLLMValidationError(f"the media can't be read: {error}") from error
