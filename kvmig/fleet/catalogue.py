"""The fleet's catalogue of known models: the one that comes with kvmig, a file, or a URL."""

from __future__ import annotations

import asyncio
import logging
import math
from importlib import resources
from pathlib import Path

import httpx

from kvmig.core.background import BackgroundTasks
from kvmig.core.clock import TimeSource
from kvmig.core.errors import ConfigError
from kvmig.core.shown_urls import shown_url
from kvmig.core.storage_reads import StorageReads, StorageSilent
from kvmig.fleet.tables import StoreError
from kvmig.sources.catalogue import ModelCatalogue, read_catalogue

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Timeout of a catalogue's download, as a whole."""
KEPT_S = 300.0
"""Age at which a catalogue is read again; the old one is used until that is done."""
RETRY_S = 30.0
"""Pause after a reading that failed."""
MOST_BYTES = 4 << 20


class CatalogueReader:
    """Reads the catalogue on demand: callers that ask during a reading share it."""

    def __init__(self, where: str, clock: TimeSource, reads: StorageReads | None = None) -> None:
        """where: a file's whole path, or a URL; empty: the one that comes with kvmig. reads:
        threads that read the file."""
        self._where = where
        self._shown = shown_url(where)
        """The same for logs and answers, which say no password."""
        self._clock = clock
        self._reads = reads or StorageReads()
        self._found: ModelCatalogue | None = None
        self._failed: ConfigError | StoreError | None = None
        """Why it could not be read at last; None: it could."""
        self._next_at = 0.0
        """When it is read again, if it is asked for; nothing counts before the first reading."""
        self._tasks = BackgroundTasks("the catalogue")
        self._reading: asyncio.Task[None] | None = None
        self._named = set[str]()
        """Entries that were left out, each in the log once."""

    async def read(self) -> ModelCatalogue:
        """The catalogue; the last one that was read while there is no other. Raises ConfigError,
        StoreError."""
        known = self._found is not None or self._failed is not None
        if not known or self._clock() >= self._next_at:
            self._begin()
        if self._found is None:
            await self.settle()
        if self._found is not None:
            return self._found
        if self._failed is None:
            raise StoreError(self._refusal("the server ends"))
        left = max(1, math.ceil(self._next_at - self._clock()))
        raise type(self._failed)(f"{self._failed}; it is tried again in {left} s")

    async def settle(self) -> None:
        """Wait for the end of a reading that runs. Its time is limited."""
        if self._reading is not None:
            await asyncio.wait({self._reading})
            if not self._reading.cancelled():
                self._reading.result()  # raises what nobody has foreseen

    async def close(self) -> None:
        """End a reading that runs."""
        await self._tasks.close()

    def _begin(self) -> None:
        if self._reading is None or self._reading.done():
            self._reading = self._tasks.start(self._read_again(), "reading of the catalogue")

    async def _read_again(self) -> None:
        try:
            found = await self._read()
        except (ConfigError, StoreError) as error:
            self._failed, self._next_at = error, self._clock() + RETRY_S
            if self._found is not None:
                log.warning("the last catalogue stays: %s", error)
            return
        self._found, self._failed, self._next_at = found, None, self._clock() + KEPT_S
        for why in found.left_out:
            self._name(why)

    def _name(self, why: str) -> None:
        if why not in self._named:
            self._named.add(why)
            log.error(
                "an entry of the catalogue %s is left out: %s", self._shown or "of kvmig", why
            )

    async def _read(self) -> ModelCatalogue:
        if not self._where:
            own = resources.files("kvmig.sources") / "catalogue.toml"
            return read_catalogue(await asyncio.to_thread(own.read_text), "of kvmig")
        if self._where.startswith("https://"):
            return read_catalogue(await self._fetch(), self._shown)
        try:
            read = Path(self._where).read_text
            text = await self._reads.read("the catalogue", self._where, read)
        except StorageSilent as error:
            raise StoreError(str(error)) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the catalogue {self._where} can't be read: {error}") from error
        return read_catalogue(text, self._where)

    async def _fetch(self) -> str:
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                httpx.AsyncClient(timeout=TIMEOUT_S) as client,
                client.stream("GET", self._where) as answer,
            ):
                if not answer.is_success:
                    raise StoreError(self._refusal(_said_by(answer)))
                text = bytearray()
                async for piece in answer.aiter_bytes():
                    text += piece
                    if len(text) > MOST_BYTES:
                        said = f"can't be used: it has more than {MOST_BYTES} bytes"
                        raise ConfigError(f"the catalogue {self._shown} {said}")
            return text.decode()
        except httpx.InvalidURL as error:
            raise ConfigError(f"the catalogue {self._shown} is no URL: {error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the catalogue {self._shown} can't be used: {error}") from error
        except (httpx.TimeoutException, TimeoutError) as error:
            said = f"it was not there within {TIMEOUT_S:g} s"
            raise StoreError(self._refusal(said)) from error
        except httpx.HTTPError as error:
            raise StoreError(self._refusal(str(error) or type(error).__name__)) from error

    def _refusal(self, why: str) -> str:
        return f"the catalogue {self._shown} can't be read now: {why}"


def _said_by(answer: httpx.Response) -> str:
    """Why an answer is no catalogue. Redirects are not followed: the flag names the place."""
    if not answer.has_redirect_location:
        return f"its server answers {answer.status_code}"
    there = shown_url(answer.headers["location"])
    return f"its server answers {answer.status_code} and leads to {there!r:.200}, must not redirect"
