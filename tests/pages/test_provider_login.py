"""Log-in to the pages by an identity provider that speaks the real protocol."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.accounts.login_attempts import LoginAttempts
from kvmig.accounts.people import LoginTerms
from kvmig.core.clock import monotonic
from kvmig.fleet.identity_provider import IdentityProvider
from tests.support.fleet_api import Api
from tests.support.fleet_stores import Place
from tests.support.provider_site import CLIENT, ProviderSite, provider_site


@pytest.fixture
def provider() -> Iterator[ProviderSite]:
    with provider_site() as site:
        yield site


@pytest.fixture
async def api(sqlite_place: Place, provider: ProviderSite) -> AsyncIterator[Api]:
    made = Api(sqlite_place)
    await made.backend.stored(made.store.open)
    terms = LoginTerms(issuer=provider.issuer, client_id=CLIENT, user_groups=("staff",))
    made.backend.provider = IdentityProvider(terms, monotonic, time.time)
    await made.restart()
    yield made
    await made.backend.provider.close()
    await made.close()


async def begin(api: Api) -> str:
    """The path of the way back from the provider, where the person has logged in."""
    away = await api.browse("login/provider?next=/ui/keys")
    assert away.status_code == 303
    async with httpx.AsyncClient() as browser:
        back = (await browser.get(away.headers["location"])).headers["location"]
    assert back.startswith("http://x/ui/login/callback?")
    return back.removeprefix("http://x/ui/")


async def test_a_person_logs_in_at_the_provider_and_is_a_user_here(
    api: Api, provider: ProviderSite
) -> None:
    assert "/ui/login/provider?next=" in (await api.browse("login")).text
    there = await api.browse(await begin(api))
    assert (there.status_code, there.headers["refresh"]) == (200, "0; url=/ui/keys")
    page = await api.browse("keys")
    assert page.status_code == 200
    assert "bea" in page.text
    (row,) = await api.backend.stored(api.store.keys, "bea")
    assert (row.name, row.terms.scopes) == ("page", ("infer", "read"))
    assert row.terms.expires is not None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"person": {"sub": "u-2", "groups": ["other"]}}, "names no group that may log in"),
        ({"claims": {"nonce": "another"}}, "is not of this log-in"),
        ({"error": "access_denied"}, "access_denied"),
    ],
)
async def test_who_may_not_log_in_gets_no_session(
    api: Api, provider: ProviderSite, change: dict[str, object], sentence: str
) -> None:
    back = await begin(api)
    vars(provider).update(change)
    answer = await api.browse(back)
    assert answer.status_code == 403
    assert sentence in answer.text
    assert (await api.browse("keys")).status_code == 303


async def test_a_browser_ends_only_the_log_in_that_it_has_begun(api: Api) -> None:
    back = await begin(api)
    state = parse_qs(urlsplit(back).query)["state"][0]
    other = state[:-1] + ("0" if state[-1] != "0" else "1")
    for path in (back.replace(state, other), "login/callback", "login/callback?state=%FF&code=1"):
        assert "has not begun that log-in" in (await api.browse(path)).text
    await api.restart(cookies=False)
    assert "has not begun that log-in" in (await api.browse(back)).text
    assert (await api.browse("keys")).status_code == 303


async def test_a_code_is_good_for_one_log_in(api: Api) -> None:
    back = await begin(api)
    assert (await api.browse(back)).status_code == 200
    assert "has not begun that log-in" in (await api.browse(back)).text


async def test_a_provider_that_is_away_is_named(api: Api, provider: ProviderSite) -> None:
    provider.told = {"authorization_endpoint": None}
    answer = await api.browse("login/provider")
    assert answer.status_code == 403
    assert "names no authorization_endpoint" in answer.text


async def test_without_a_provider_there_is_no_such_log_in(api: Api) -> None:
    provider, api.backend.provider = api.backend.provider, None
    await api.restart()
    assert (await api.browse("login/provider")).status_code == 404
    assert "/ui/login/provider" not in (await api.browse("login")).text
    api.backend.provider = provider


@given(st.text(), st.text())
def test_no_cookie_and_no_state_of_others_ends_an_attempt(cookie: str, state: str) -> None:
    attempts = LoginAttempts(b"p" * 32, "c")
    assert attempts.read(cookie, state) is None
    assert attempts.read(f"c_login={cookie}", state) is None
    own = attempts.begin("/models?a=b;c")
    header = attempts.set_cookie(own, tls=True)
    assert "HttpOnly; SameSite=Lax; Secure" in header
    presented = header.partition(";")[0]
    assert attempts.read(presented, own.state) == own
    assert attempts.read(presented, state) is None
    assert LoginAttempts(b"q" * 32, "c").read(presented, own.state) is None
