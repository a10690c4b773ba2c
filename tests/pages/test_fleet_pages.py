"""The fleet's pages over a store, without the rest of a fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmig.pages.session import PagePerson
from tests.support.fleet_api import Api
from tests.support.fleet_stores import Place
from tests.support.page_people import FixedPerson


class Pages(Api):
    """The API, and somebody who looks at its pages."""

    def __init__(self, place: Place) -> None:
        self.sessions = FixedPerson(None)
        super().__init__(place, self.sessions)

    async def log_in(self, name: str, *scopes: str, **more: object) -> str:
        """Be a new user with a key of these scopes; the key's prefix."""
        role = "admin" if "admin" in scopes else "user"
        assert (await self.ask("POST", "users", {"name": name, "role": role}))[0] == 201
        body = {"user": name, "scopes": list(scopes), **more}
        status, key = await self.ask("POST", "keys", body)
        assert status == 201
        self.sessions.person = PagePerson(name, role == "admin", str(key["prefix"]))
        return str(key["prefix"])


@pytest.fixture
async def pages(tmp_path: Path) -> AsyncIterator[Pages]:
    made = Pages(Place(f"sqlite:///{tmp_path}/fleet.db", tmp_path))
    await made.backend.stored(made.store.open)
    yield made
    await made.close()


async def test_without_a_session_the_page_asks_for_a_log_in(pages: Pages) -> None:
    answer = await pages.browse("")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/login?next=/ui/")


async def test_the_first_page_shows_an_admin_the_models(pages: Pages) -> None:
    await pages.log_in("bea", "admin")
    await pages.ask("POST", "models", pages.model(name="qwen"))
    answer = await pages.browse("")
    assert answer.status_code == 200
    assert "qwen" in answer.text


async def test_the_page_calls_the_api_with_the_rights_of_the_key_alone(pages: Pages) -> None:
    """Whatever a session says of its person."""
    prefix = await pages.log_in("tom", "infer", "read")
    pages.sessions.person = PagePerson("tom", admin=True, key=prefix)
    answer = await pages.browse("")
    assert answer.status_code == 403
    assert "has no scope" in answer.text


async def test_a_key_that_is_revoked_ends_what_its_session_may_see(pages: Pages) -> None:
    prefix = await pages.log_in("bea", "admin")
    assert (await pages.ask("DELETE", f"keys/{prefix}"))[0] == 200
    assert (await pages.browse("")).status_code == 401


async def test_a_key_for_another_network_shows_nothing_here(pages: Pages) -> None:
    await pages.log_in("bea", "admin", cidrs=["192.0.2.0/24"])
    assert (await pages.browse("")).status_code == 403


async def test_a_client_cannot_name_the_grant_of_a_page_in_a_header(pages: Pages) -> None:
    prefix = await pages.log_in("bea", "admin")
    headers = {"kvmig.grant": prefix, "x-forwarded-for": "10.0.0.9"}
    assert (await pages.ask("GET", "models", **headers))[0] == 401
