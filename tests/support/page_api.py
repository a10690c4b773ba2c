"""The fleet's API over a store, and somebody who looks at its pages."""

from __future__ import annotations

import re
from typing import Any

import httpx

from kvmig.fleet.managed_model import CatalogEntry
from kvmig.fleet.spec import ModelSpec
from kvmig.pages.session import PagePerson
from tests.support.fleet_api import Api
from tests.support.fleet_stores import Place
from tests.support.page_people import TOKEN, FixedPerson


class Pages(Api):
    """Pages of whoever has logged in last."""

    def __init__(self, place: Place) -> None:
        self.sessions = FixedPerson(None)
        super().__init__(place, self.sessions)

    async def log_in(self, name: str, *scopes: str, **more: Any) -> str:
        """Be a new user with a key of these scopes; the key's prefix."""
        role = "admin" if "admin" in scopes else "user"
        assert (await self.ask("POST", "users", {"name": name, "role": role}))[0] == 201
        body = {"user": name, "scopes": list(scopes), **more}
        status, key = await self.ask("POST", "keys", body)
        assert status == 201
        self.sessions.person = PagePerson(name, role == "admin", str(key["prefix"]))
        return str(key["prefix"])

    def run_here(self) -> None:
        """A round of the fleet with one model, qwen."""
        spec = ModelSpec(name="qwen", source=f"path:{self.folder}", engine="toy")
        self.models.take_catalogue([CatalogEntry("m1", "qwen", 1, True, spec)])
        self.models.reconcile()

    async def send(self, path: str, **form: str) -> httpx.Response:
        """Send a form with the session's token."""
        return await self.browse(path, {"csrf": TOKEN, **form})


def text_of(answer: httpx.Response) -> str:
    """What a reader sees of a page, on one line."""
    return " ".join(re.sub(r"<[^>]+>", " ", answer.text).split())


def alert_of(answer: httpx.Response) -> str:
    """What a page says went wrong."""
    found = re.search(r'<p role="alert"[^>]*>(.*?)</p>', answer.text, re.DOTALL)
    return found[1] if found else ""
