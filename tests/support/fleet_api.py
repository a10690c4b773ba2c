"""The server's HTTP API over a store, without the rest of a fleet."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from kvmig.accounts.keys import KeyIndex
from kvmig.core.errors import ConfigError
from kvmig.core.storage_reads import SILENT_S, StorageReads
from kvmig.fleet.api import ApiBackend, make_app
from kvmig.fleet.catalogue import CatalogueReader
from kvmig.fleet.controller import ModelController
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.host_memory import MemoryBudget
from kvmig.fleet.model_folders import WatchedFolders
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.store import FleetStore
from kvmig.pages.session import PageSessions
from tests.support.fleet_stores import Place, idle_files


class Api:
    """Calls of the API."""

    def __init__(
        self, place: Place, sessions: PageSessions | None = None, silent_s: float = SILENT_S
    ) -> None:
        """silent_s: of users' storage, until it is given up."""
        settings = FleetSettings(data=str(place.folder))
        reads = StorageReads(silent_s=silent_s)
        self.folders = WatchedFolders(reads)
        self.folder = place.folder
        self.store = FleetStore(place.url, place.folder / "pepper", wait_s=0.2)
        self.keys = KeyIndex(b"")
        self.changes = 0
        memory = MemoryBudget(devices=DeviceBudget(folders=self.folders))
        self.models = ModelController(settings, lambda _: None, lambda _, __: 0, memory)
        self.backend = ApiBackend(
            settings,
            self.store,
            ThreadPoolExecutor(1),
            self.models,
            self._changed,
            self._check,
            lambda: self.keys,
            self._metrics,
            idle_files(settings, self.store, lambda *args: self.backend.stored(*args)),
            CatalogueReader("", time.monotonic),
            reads=reads,
        )
        self._http = self._client(sessions)

    def _client(self, sessions: PageSessions | None) -> httpx.AsyncClient:
        app = make_app(self.backend, sessions)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://x")

    async def restart(self, *, cookies: bool = True) -> None:
        """Go on with the next application. cookies: whether the client keeps its own."""
        kept = self._http.cookies
        await self._http.aclose()
        self._http = self._client(None)
        if cookies:
            self._http.cookies = kept

    async def _check(self, spec: ModelSpec, sizes: bool) -> None:
        """As an engine that knows no --nonsense."""
        if "--nonsense" in spec.flags:
            raise ConfigError(f"model {spec.name}: unrecognized arguments: --nonsense")

    async def _metrics(self) -> bytes:
        return b"kvmig_model_ready 1\n"

    async def _changed(self) -> None:
        self.changes += 1
        told = await self.backend.stored(self.store.key_changes)
        self.keys = KeyIndex(self.store.pepper, told.granted)

    async def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        answer = await self._http.request(
            method, f"/kvmig/v2/{path}", json=body, headers={**headers}
        )
        return answer.status_code, answer.json()

    async def browse(
        self, path: str, form: dict[str, str] | None = None, **headers: str
    ) -> httpx.Response:
        """A page, or what comes of a form. path: below /ui/."""
        sent = {"accept": "text/html", "x-forwarded-for": "10.0.0.9", **headers}
        method = "GET" if form is None else "POST"
        return await self._http.request(method, f"/ui/{path}", data=form, headers=sent)

    def model(self, **more: Any) -> dict[str, Any]:
        """A toy's specification."""
        return {"name": "a/b", "source": f"path:{self.folder}", "engine": "toy", **more}

    async def close(self) -> None:
        await self._http.aclose()
        await self.backend.stored(self.store.close)
        await self.models.close()
        self.backend.thread.shutdown()


def said(answer: tuple[int, dict[str, Any]]) -> tuple[int, str]:
    status, body = answer
    return status, body["error"]["message"]
