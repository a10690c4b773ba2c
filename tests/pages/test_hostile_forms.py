"""Queries and forms with values that nobody types: each is refused in words, and none is an error
of the server."""

from __future__ import annotations

import pytest

from tests.support.page_api import Pages

pytestmark = pytest.mark.long

VALUES = (
    "", " ", "\0", "NaN", "-1", "1e999", "9" * 400, "x" * 5000, "../..", "a/b/c", "{}", "[" * 4000,
    "<script>alert(1)</script>", "'; DROP TABLE users; --", "\u202e\ud7ff", "null", "0001-01-01",
    "9999-12-31", "model,user", "%00%ff",
)  # fmt: skip
QUERIES = (
    "usage?by=", "usage?since=", "usage?until=", "usage?since=0001-01-01&until=", "usage?what=",
    "usage.csv?by=", "audit?limit=", "keys?find=", "keys?skip=", "users?find=", "users?skip=",
    "why/qwen?instance=", "why-not/qwen?x=",
)  # fmt: skip
FORMS = {
    "models": ("name", "source", "engine", "flags", "min", "max", "target", "zero_after_s"),
    "evaluate": ("name", "source", "flags"),
    "aliases": ("alias", "targets"),
    "aliases/remove": ("alias",),
    "models/qwen/scale": ("min", "max"),
    "models/qwen/change": ("spec", "canary", "hold_s", "deadline_s"),
    "models/qwen/rollout": ("action", "revision"),
    "models/qwen/drain": ("instance", "deployment"),
    "keys": ("user", "name", "scope", "models", "cidrs", "classes", "days", "rpm", "quotas"),
    "keys/nonsense/limit": ("rpm", "period", "quotas", "had_quotas"),
    "keys/nonsense/rotate": ("keep_s",),
    "users": ("name", "role"),
    "users/bea/change": ("rpm", "period"),
    "workers/local/drain": ("deadline_s",),
    "workers/local/labels": ("label", "value"),
    "workers/local/nonsense": ("x",),
}


@pytest.fixture(autouse=True)
async def an_admin(pages: Pages) -> None:
    await pages.ask("POST", "models", pages.model(name="qwen"))
    await pages.log_in("bea", "admin")
    pages.run_here()


async def test_no_value_of_a_query_is_an_error_of_the_server(pages: Pages) -> None:
    for query in QUERIES:
        for value in VALUES:
            answer = await pages.browse(query + value.replace("%", "%25").replace("\0", "%00"))
            assert answer.status_code < 500, (query, value)
            assert "<script>alert" not in answer.text


async def test_no_value_of_a_form_is_an_error_of_the_server(pages: Pages) -> None:
    for path, fields in FORMS.items():
        for value in VALUES:
            answer = await pages.send(path, **dict.fromkeys(fields, value))
            assert answer.status_code < 500, (path, value)
            assert "<script>alert" not in answer.text


async def test_a_form_with_files_or_hundreds_of_fields_is_refused(pages: Pages) -> None:
    fields = {f"field-{number}": "x" for number in range(500)}
    assert (await pages.send("users", **fields)).status_code == 400
