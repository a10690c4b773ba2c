"""The fleet's pages over a store, without the rest of a fleet: who sees what."""

from __future__ import annotations

import re

import pytest

from kvmig.pages.session import PagePerson
from tests.support.page_api import Pages, text_of

ADMINS = ("", "workers", "users", "audit", "models/qwen", "why/qwen?instance=i0", "why-not/qwen")
EVERYBODYS = ("models", "usage", "keys")
XSS = '"><img src=x onerror=alert(1)>'


@pytest.fixture(autouse=True)
async def a_model(pages: Pages) -> None:
    await pages.ask("POST", "models", pages.model(name="qwen"))


async def test_without_a_session_the_page_asks_for_a_log_in(pages: Pages) -> None:
    for path in (*EVERYBODYS, "workers"):
        answer = await pages.browse(path)
        wanted = f"/ui/login?next=/ui/{path}"
        assert (answer.status_code, answer.headers["location"]) == (303, wanted)


@pytest.mark.parametrize("path", ["", "models", "workers", "usage", "keys", "users", "audit"])
async def test_an_admin_sees_every_page_of_the_navigation(pages: Pages, path: str) -> None:
    await pages.log_in("bea", "admin")
    answer = await pages.browse(path)
    assert answer.status_code == 200
    assert f'href="/ui/{path}"' in answer.text


async def test_a_user_is_led_to_the_models_and_sees_no_page_of_admins(pages: Pages) -> None:
    await pages.log_in("tom", "infer", "read")
    answer = await pages.browse("")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/models")
    for path in ADMINS[1:]:
        assert (await pages.browse(path)).status_code == 403, path


async def test_a_user_sees_the_names_that_the_key_may_use(pages: Pages) -> None:
    await pages.ask("POST", "models", pages.model(name="secret"))
    await pages.ask("PUT", "aliases/fast", {"targets": {"secret": 1}})
    await pages.log_in("tom", "infer", "read", models=["qwen", "fast"])
    seen = text_of(await pages.browse("models"))
    assert "qwen" in seen
    assert "fast" in seen
    assert "secret" not in seen
    assert str(pages.folder) not in seen


async def test_a_key_without_the_scope_read_shows_its_names_and_no_usage(pages: Pages) -> None:
    await pages.log_in("tom", "infer")
    assert "qwen" in text_of(await pages.browse("models"))
    for path in ("usage", "keys"):
        answer = await pages.browse(path)
        assert (answer.status_code, "has no scope" in text_of(answer)) == (403, True)


async def test_a_user_sees_the_users_own_keys_only_and_gives_no_orders(pages: Pages) -> None:
    other = await pages.log_in("bea", "admin")
    own = await pages.log_in("tom", "infer", "read")
    answer = await pages.browse("keys")
    assert own in answer.text
    assert other not in answer.text
    assert "revoke" not in answer.text
    assert (await pages.send(f"keys/{other}/revoke")).status_code == 403
    assert (await pages.send("models", name="m", source="path:/x")).status_code == 403


async def test_the_page_calls_the_api_with_the_rights_of_the_key_alone(pages: Pages) -> None:
    """Whatever a session says of its person."""
    prefix = await pages.log_in("tom", "infer", "read")
    pages.sessions.person = PagePerson("tom", admin=True, key=prefix)
    answer = await pages.browse("workers")
    assert answer.status_code == 403
    assert "has no scope" in answer.text


async def test_a_key_that_is_revoked_ends_what_its_session_may_see(pages: Pages) -> None:
    prefix = await pages.log_in("bea", "admin")
    assert (await pages.ask("DELETE", f"keys/{prefix}"))[0] == 200
    assert (await pages.browse("workers")).status_code == 401


async def test_a_key_for_another_network_shows_nothing_here(pages: Pages) -> None:
    await pages.log_in("bea", "admin", cidrs=["192.0.2.0/24"])
    assert (await pages.browse("workers")).status_code == 403


async def test_a_client_cannot_name_the_grant_of_a_page_in_a_header(pages: Pages) -> None:
    prefix = await pages.log_in("bea", "admin")
    headers = {"kvmig.grant": prefix, "x-forwarded-for": "10.0.0.9"}
    assert (await pages.ask("GET", "models", **headers))[0] == 401


async def test_names_with_html_are_shown_as_they_are(pages: Pages) -> None:
    await pages.log_in("bea", "admin")
    made = await pages.send("keys", user="bea", name=XSS, scope="infer")
    refused = await pages.send("users", name=XSS, role="user")
    for answer in (made, refused, await pages.browse("keys"), await pages.browse("audit")):
        assert "<img" not in answer.text
    assert "&lt;img src=x onerror=alert(1)&gt;" in made.text


async def test_a_form_without_the_token_changes_nothing(pages: Pages) -> None:
    await pages.log_in("bea", "admin")
    answer = await pages.browse("users", {"name": "eve", "role": "admin"})
    assert answer.status_code == 403
    users = (await pages.ask("GET", "users"))[1]["data"]
    assert "eve" not in {one["name"] for one in users}


@pytest.mark.parametrize("path", ["", "keys/", "users//", "models/", "models/qwen/"])
async def test_a_slash_at_the_end_of_an_address_changes_nothing_and_leads_nowhere(
    pages: Pages, path: str
) -> None:
    """Behind HTTPS a redirect would lead to HTTP."""
    await pages.log_in("bea", "admin")
    assert (await pages.ask("GET", "models/qwen/"))[1]["name"] == "qwen"
    assert (await pages.ask("POST", "models/", pages.model()))[0] == 201
    answer = await pages.browse(path)
    assert answer.status_code == 200
    assert "<h1>" in answer.text


@pytest.mark.parametrize("path", [*ADMINS, *EVERYBODYS])
async def test_all_that_the_tab_key_leads_to_has_a_name_for_screen_readers(
    pages: Pages, path: str
) -> None:
    await pages.log_in("bea", "admin")
    pages.run_here()
    text = (await pages.browse(path)).text
    reached = re.findall(r'<\w+[^>]*tabindex="0"[^>]*>', text)
    assert [one for one in reached if not re.search(r'aria-label(ledby)?="[^"]+"', one)] == []


async def test_a_refusal_and_a_new_key_are_where_the_keyboard_goes_on(pages: Pages) -> None:
    await pages.log_in("bea", "admin")
    refused = await pages.send("users", name="", role="user")
    assert '<p role="alert" tabindex="-1" autofocus>' in refused.text
    made = await pages.send("keys", user="bea", scope="infer")
    assert '<div role="status" tabindex="-1" autofocus>' in made.text
    assert "autofocus" not in (await pages.browse("keys")).text
