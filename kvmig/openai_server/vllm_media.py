"""vLLM's connector for media fetches by our rules, and says whose mistake it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from vllm.connections import HTTPConnection, _get_response_size_limit
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.multimodal.media.connector import MediaConnector

from kvmig.gateway.media_rules import MediaRefused, MediaRules
from kvmig.openai_server.media_fetch import MOST_BYTES, MOST_REDIRECTS, fetch_media

_load_as_vllm = MediaConnector.load_from_url
_load_async_as_vllm = MediaConnector.load_from_url_async
_rules = MediaRules()
FILE_NOT_READ = "a file: URL must be of media below --allowed-local-media-path, if there is one"


def fetch_by(rules: MediaRules) -> None:
    """From now on nothing is fetched for a client but by these rules."""
    global _rules
    _rules = rules
    HTTPConnection.async_get_bytes = _get_bytes
    HTTPConnection.get_bytes = _get_bytes_at_once
    MediaConnector._assert_url_in_allowed_media_domains = _leave_to_rules
    MediaConnector.load_from_url = _load
    MediaConnector.load_from_url_async = _load_async


async def _get_bytes(
    self: HTTPConnection,
    url: str,
    *,
    timeout: float | None = None,  # noqa: ASYNC109 - the name is vLLM's
    allow_redirects: bool = True,
    max_bytes: int | None = None,
) -> bytes:
    limit, _ = _get_response_size_limit(max_bytes)
    try:
        return await fetch_media(
            _rules,
            url,
            timeout_s=timeout,
            redirects=MOST_REDIRECTS if allow_redirects else 0,
            most_bytes=min(limit or MOST_BYTES, MOST_BYTES),
        )
    except MediaRefused as error:
        raise VLLMValidationError(str(error)) from None


def _get_bytes_at_once(self: HTTPConnection, url: str, **options: Any) -> bytes:
    """For callers without an event loop, or in the midst of one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(_get_bytes(self, url, **options))).result()


def _leave_to_rules(self: MediaConnector, url_spec: object) -> None:
    """They look at the host that is connected to, as the client of HTTP understands the URL."""


def _load(self: MediaConnector, url: str, *args: Any, **options: Any) -> Any:
    with _blaming(url):
        return _load_as_vllm(self, url, *args, **options)


async def _load_async(self: MediaConnector, url: str, *args: Any, **options: Any) -> Any:
    with _blaming(url):
        return await _load_async_as_vllm(self, url, *args, **options)


@contextmanager
def _blaming(url: str) -> Iterator[None]:
    """What can't be read is the client's mistake, whatever the library raises that reads it."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if url[:5].lower() == "file:":  # its errors would tell which files are there
            raise VLLMValidationError(FILE_NOT_READ) from error
        if isinstance(error, (VLLMError, ValueError)):
            raise
        raise VLLMValidationError(f"the media can't be read: {error}") from error
