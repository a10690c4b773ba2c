"""Long lists of keys and users: a page shows a part of them, and finds the rest."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Table, insert, select

from kvmig.accounts.keys import KeyTerms
from kvmig.fleet.pages.accounts import ROWS
from kvmig.fleet.store import OrderActor
from kvmig.fleet.tables import api_keys, users
from tests.support.page_api import Pages, text_of

ANNA = OrderActor("anna")
MORE = 7
"""Rows that the first part of the list has no place for."""


def make_keys(pages: Pages, count: int = ROWS + MORE - 1) -> None:
    """More keys than a page shows, of one user: copies of one, but for its name."""
    pages.store.add_user("carl", "user", ANNA)
    made, _ = pages.store.create_key("carl", "job 0", KeyTerms(), ANNA)
    copied(pages, api_keys, made.key_id, [
        {"id": f"k{n}", "prefix": f"p{n:07}", "hash": f"{n}".encode(), "name": f"job {n}"}
        for n in range(1, count)
    ])  # fmt: skip


def make_users(pages: Pages) -> None:
    """More users than a page shows."""
    made = pages.store.add_user("user-0", "user", ANNA)
    named = [{"id": f"u{n}", "name": f"user-{n}"} for n in range(1, ROWS + MORE - 1)]
    copied(pages, users, made.user_id, named)


def copied(pages: Pages, table: Table, row_id: str, rows: list[dict[str, Any]]) -> None:
    with pages.store.database.transaction() as connection:
        found = connection.execute(select(table).where(table.c.id == row_id)).mappings().one()
        connection.execute(insert(table), [{**found, **row} for row in rows])


def rows_of(page: str) -> list[str]:
    """The heads of a table's rows."""
    found = re.findall(r'<th scope="row">(?:<code>)?(.*?)(?:</code>)?</th>', page)
    return [html.unescape(one) for one in found]


def links_of(page: str) -> dict[str, str]:
    """The links between parts of a list, by their words."""
    found = re.findall(r'<a class="button" href="/ui/([^"]*)" rel="\w+">(\w+)</a>', page)
    return {words: html.unescape(path) for path, words in found}


@pytest.fixture(autouse=True)
async def an_admin(pages: Pages) -> None:
    await pages.ask("POST", "models", pages.model(name="qwen"))
    await pages.log_in("bea", "admin")


@pytest.mark.parametrize(("path", "make"), [("keys", make_keys), ("users", make_users)])
async def test_a_long_list_is_shown_in_parts_of_which_none_lacks_a_row(
    pages: Pages, path: str, make: Callable[[Pages], None]
) -> None:
    await pages.backend.stored(make, pages)
    first = await pages.browse(path)
    assert links_of(first.text) == {"After": f"{path}?skip={ROWS}"}
    assert f"1 to {ROWS} of {ROWS + MORE}" in text_of(first)
    second = await pages.browse(links_of(first.text)["After"])
    assert links_of(second.text) == {"Before": path}
    shown = rows_of(first.text), rows_of(second.text)
    assert [len(one) for one in shown] == [ROWS, MORE]
    every = (await pages.ask("GET", path))[1]["data"]
    named = [one.get("prefix", one["name"]) for one in every]
    assert sorted(shown[0] + shown[1]) == sorted(named)


async def test_a_key_is_found_by_words_of_its_prefix_user_and_name(pages: Pages) -> None:
    await pages.backend.stored(make_keys, pages)
    found = await pages.browse("keys?find=CARL+job+10")
    (prefix, *others) = rows_of(found.text)
    assert len(others) == 6  # job 10, and 100 to 105
    assert rows_of((await pages.browse(f"keys?find={prefix}")).text) == [prefix]
    for nobody in ("50%25", "_", "nobody"):
        nothing = await pages.browse(f"keys?find={nobody}")
        assert "There is no such key." in text_of(nothing)


async def test_an_order_about_a_key_leads_back_to_the_part_of_the_list(pages: Pages) -> None:
    await pages.backend.stored(make_keys, pages)
    listed = await pages.browse(f"keys?find=job&skip={ROWS}")
    prefix = rows_of(listed.text)[0]
    part = {"find": "job", "skip": str(ROWS)}
    refused = await pages.send(f"keys/{prefix}/limit", period="day", rpm="-7", **part)
    assert (refused.status_code, rows_of(refused.text)) == (400, rows_of(listed.text))
    limited = await pages.send(f"keys/{prefix}/limit", period="day", rpm="7", **part)
    assert limited.headers["location"] == f"/ui/keys?find=job&skip={ROWS}"
    revoked = await pages.send(f"keys/{prefix}/revoke", **part)
    assert revoked.headers["location"] == f"/ui/keys?find=job&skip={ROWS}"


async def test_keys_that_are_revoked_come_after_those_that_hold(pages: Pages) -> None:
    await pages.backend.stored(make_keys, pages)
    newest = rows_of((await pages.browse("keys?find=carl")).text)[0]
    await pages.ask("DELETE", f"keys/{newest}")
    assert newest not in rows_of((await pages.browse("keys?find=carl")).text)
    last = await pages.browse(f"keys?find=carl&skip={ROWS}")
    assert rows_of(last.text)[-1] == newest


@pytest.mark.parametrize("query", ["skip=-1", "skip=x", "skip=" + "9" * 400, "find=" + "x" * 5000])
async def test_a_part_that_is_none_is_shown_as_a_list(pages: Pages, query: str) -> None:
    for path in ("keys", "users"):
        assert (await pages.browse(f"{path}?{query}")).status_code == 200


async def test_the_api_refuses_a_part_that_is_none(pages: Pages) -> None:
    for query in ("limit=0", "limit=-1", "skip=-1", "limit=x", "find=" + "x" * 201):
        status, body = await pages.ask("GET", f"keys?{query}")
        assert (status, query.partition("=")[0] in str(body)) == (400, True)
