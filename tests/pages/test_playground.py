"""The playground's routes, over a store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvmig.pages.words import move_text
from tests.support.fleet_api import Api
from tests.support.fleet_stores import Place
from tests.support.page_logins import key_of, log_in, token_on


@pytest.fixture
async def api(sqlite_place: Place) -> AsyncIterator[Api]:
    made = Api(sqlite_place)
    await made.backend.stored(made.store.open)
    yield made
    await made.close()


async def test_an_admin_may_move_a_stream_and_a_user_may_chat_only(api: Api) -> None:
    for scopes, moves in ((["infer"], False), (["infer", "admin"], True)):
        key, _ = await key_of(api, f"ann{moves}", *scopes)
        assert await log_in(api, key, "/ui/playground") == "/ui/playground"
        page = await api.browse("playground")
        assert page.status_code == 200
        assert ("Move to another instance" in page.text) == moves
        form = {"csrf": token_on(page.text), "model": "no/model", "request_id": "x"}
        answer = await api.browse("playground/move", form)
        assert answer.status_code == (404 if moves else 403)
        wanted = "no model" if moves else "has no scope 'admin'"
        assert wanted in answer.json()["sentence"]


async def test_a_move_needs_the_session_s_token(api: Api) -> None:
    key, _ = await key_of(api, "bea", "admin")
    await log_in(api, key)
    assert (await api.browse("playground/move", {"model": "m"})).status_code == 403


def test_a_move_is_told_in_words() -> None:
    report = {"state": "committed", "source": "i0", "destination": "i1", "reason": ""}
    assert move_text(report) == "The stream moved from i0 to i1"
    report |= {"state": "aborted", "reason": "i1 has no room"}
    assert move_text(report) == "The stream did not move: i1 has no room"
