"""Logging in by an identity provider that speaks the real protocol: keys, roles, refusals."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from joserfc.jwk import ECKey

from kvmig.accounts.people import LoginTerms
from kvmig.fleet import identity_provider
from kvmig.fleet.account_lists import ListWindow
from kvmig.fleet.api import STATUS, answer_with
from kvmig.fleet.api_paths import PREFIX
from kvmig.fleet.identity_provider import AWAY_S, IdentityProvider, ProviderAway
from kvmig.fleet.login_api import login_api
from kvmig.fleet.store import FleetStore
from tests.support.fleet_stores import ANNA, Place, database_reads
from tests.support.provider_site import CLIENT, ProviderSite, new_key, provider_site
from tests.support.waiting import until


@pytest.fixture(scope="module")
def running() -> Iterator[ProviderSite]:
    with provider_site() as site:
        yield site


@pytest.fixture
def site(running: ProviderSite) -> ProviderSite:
    """The provider as it begins."""
    fresh = ProviderSite(issuer=running.issuer)
    vars(running).update(vars(fresh))
    return running


class Logins:
    """The routes, with a store."""

    def __init__(self, store: FleetStore, provider: IdentityProvider | None) -> None:
        self.store = store
        self.changes = 0
        app = FastAPI()
        for kind, status in STATUS.items():
            app.add_exception_handler(kind, answer_with(status))
        app.include_router(login_api(provider, store, self._stored, self._changed))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url=f"http://x{PREFIX}")

    async def _stored(self, call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    async def _changed(self) -> None:
        self.changes += 1

    async def log_in(self, token: str) -> tuple[int, dict[str, Any]]:
        answer = await self.http.post("/login", json={"id_token": token})
        return answer.status_code, answer.json()

    async def refused(self, token: str) -> tuple[int, str]:
        status, body = await self.log_in(token)
        assert self.changes == 0
        return status, str(body["error"]["message"])


class Clock:
    """Stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def logins(sqlite_place: Place, site: ProviderSite, clock: Clock) -> AsyncIterator[Logins]:
    terms = LoginTerms(
        issuer=site.issuer, client_id=CLIENT, user_groups=("staff",), admin_groups=("ops",)
    )
    provider = IdentityProvider(terms, clock, time.time)
    store = FleetStore(sqlite_place.url, sqlite_place.folder / "pepper", wait_s=0.2)
    store.open()
    made = Logins(store, provider)
    yield made
    await made.http.aclose()
    await provider.close()
    store.close()


async def test_a_person_gets_a_key_that_ends(logins: Logins, site: ProviderSite) -> None:
    status, body = await logins.log_in(site.token())
    assert (status, body["user"], body["role"]) == (200, "bea", "user")
    assert body["key"].startswith("kv-")
    assert body["terms"]["expires"] == pytest.approx(time.time() + 12 * 3600, abs=60)
    assert body["terms"]["scopes"] == ["infer", "read"]
    assert logins.changes == 1
    assert [row.action for row in logins.store.audit()] == ["key.add", "user.add"]
    assert logins.store.audit()[0].actor == "bea (login)"


async def test_a_person_stays_the_same_user_with_the_role_of_today(
    logins: Logins, site: ProviderSite
) -> None:
    logins.store.first_admin_key()
    first = (await logins.log_in(site.token(groups=["ops"])))[1]
    again = (await logins.log_in(site.token(preferred_username="bea.b")))[1]
    assert (first["role"], again["role"]) == ("admin", "user")
    assert first["user"] == again["user"] == "bea"
    assert first["terms"]["scopes"] == ["infer", "read", "admin"]
    roles = {row.name: row.role for row in logins.store.find_users(ListWindow()).rows}
    assert roles == {"admin": "admin", "bea": "user"}


async def test_a_log_in_reads_no_other_user(logins: Logins, site: ProviderSite) -> None:
    await logins.log_in(site.token())
    for at in range(50):
        logins.store.add_user(f"user-{at}", "user", ANNA)
    with database_reads() as reads:
        status, _ = await logins.log_in(site.token())
    assert status == 200
    assert reads.of("users")
    assert [row for row in reads.rows if "user-" in repr(row)] == []


async def test_a_person_does_not_become_a_user_whom_an_admin_has_made(
    logins: Logins, site: ProviderSite
) -> None:
    logins.store.first_admin_key()
    refused = await logins.refused(site.token(preferred_username="admin", groups=["ops"]))
    assert refused == (409, "a user 'admin' is there already")


async def test_the_audit_names_the_user_whatever_the_token_calls_the_person(
    logins: Logins, site: ProviderSite
) -> None:
    logins.store.first_admin_key()
    await logins.log_in(site.token())
    await logins.log_in(site.token(preferred_username="admin"))
    newest = logins.store.audit()[0]
    assert (newest.action, newest.actor) == ("key.add", "bea (login)")


async def test_a_token_gives_one_key(logins: Logins, site: ProviderSite) -> None:
    token = site.token()
    assert (await logins.log_in(token))[0] == 200
    logins.changes = 0
    assert await logins.refused(token) == (403, "the token has been used: log in again")
    assert len(logins.store.keys()) == 1


async def test_a_token_that_gave_no_key_is_taken_again(logins: Logins, site: ProviderSite) -> None:
    token = site.token()
    logins.store.add_user("bea", "user", ANNA)
    assert (await logins.log_in(token))[0] == 409
    assert (await logins.log_in(token))[0] == 409


async def test_two_people_of_one_name_are_not_one_user(logins: Logins, site: ProviderSite) -> None:
    await logins.log_in(site.token())
    logins.changes = 0
    refused = await logins.refused(site.token(sub="u-2"))
    assert refused == (409, "a user 'bea' is there already")


async def test_a_user_who_is_disabled_gets_no_key(logins: Logins, site: ProviderSite) -> None:
    await logins.log_in(site.token())
    logins.changes = 0
    logins.store.set_user("bea", ANNA, disabled=True)
    assert await logins.refused(site.token()) == (403, "user bea is disabled")


@pytest.mark.parametrize(
    ("claims", "sentence"),
    [
        ({"exp": 1000}, "the token has expired: log in again"),
        ({"exp": None}, "the token is not for this fleet: Missing claim: .exp"),
        ({"iat": None}, "the token is not for this fleet: Missing claim: .iat"),
        ({"aud": "another"}, "the token is not for this fleet: Invalid claim: .aud"),
        ({"aud": ["another", CLIENT], "azp": "another"}, "the token is not for this fleet: .*azp"),
        ({"iss": "https://evil.example.com"}, "the token is not for this fleet: .*iss"),
        ({"nbf": 1 << 34}, "the token is not for this fleet: .*not yet valid"),
        ({"groups": ["other"]}, "the claim groups names no group that may log in"),
    ],
)
async def test_a_token_that_is_not_for_this_fleet_is_refused_by_name(
    logins: Logins, site: ProviderSite, claims: dict[str, Any], sentence: str
) -> None:
    status, said = await logins.refused(site.token(**claims))
    assert status == 403
    assert re.search(sentence, said), said


async def test_a_token_that_others_have_signed_is_refused(
    logins: Logins, site: ProviderSite
) -> None:
    good = site.token()
    for forged in (
        ProviderSite(issuer=site.issuer).token(),  # with an unknown key
        ProviderSite(issuer=site.issuer, key=renamed(site)).token(),  # with the known key's id
        f"{good[:-6]}AAAAAA",
    ):
        refused = await logins.refused(forged)
        assert refused == (403, "the token is not signed by the identity provider")
    for broken in ("", "x", "a.b.c", good.rpartition(".")[0] + "."):
        status, said = await logins.refused(broken)
        assert status == 403, said


def renamed(site: ProviderSite) -> ECKey:
    """Another key of the same id."""
    return new_key(str(site.key.kid))


async def test_a_token_without_a_signature_is_refused(logins: Logins, site: ProviderSite) -> None:
    head, body, _ = site.token().split(".")
    head = base64.urlsafe_b64encode(json.dumps({"alg": "none"}).encode()).rstrip(b"=").decode()
    status, _ = await logins.refused(f"{head}.{body}.")
    assert status == 403


@pytest.mark.parametrize("wrong", [{"crit": 1}, {"crit": [["x"]]}, {"kid": [1]}, {"typ": 1}])
async def test_a_token_with_a_head_that_is_amiss_is_refused(
    logins: Logins, site: ProviderSite, wrong: dict[str, Any]
) -> None:
    _, body, signature = site.token().split(".")
    head = json.dumps({"alg": "ES256", "kid": site.key.kid, **wrong}).encode()
    shown = base64.urlsafe_b64encode(head).rstrip(b"=").decode()
    status, said = await logins.refused(f"{shown}.{body}.{signature}")
    assert (status, said[:23]) == (403, "the token can't be read")


@pytest.mark.parametrize("kind", ["at+jwt", "application/at+jwt", "logout+JWT"])
async def test_a_token_that_the_provider_signed_for_something_else_is_refused(
    logins: Logins, site: ProviderSite, kind: str
) -> None:
    site.kind = kind
    refused = await logins.refused(site.token())
    assert refused == (403, f"the token's type is {kind!r}, must be that of an ID token")
    site.kind = "JWT"
    assert (await logins.log_in(site.token()))[0] == 200


async def test_keys_that_the_provider_has_changed_are_read_again(
    logins: Logins, site: ProviderSite, clock: Clock
) -> None:
    assert (await logins.log_in(site.token()))[0] == 200
    site.key = new_key()
    logins.changes = 0
    assert (await logins.refused(site.token()))[0] == 403, "it has looked just before"
    clock.now += 31
    assert (await logins.log_in(site.token()))[0] == 200
    looks = site.key_looks
    for _ in range(5):
        await logins.log_in(ProviderSite(issuer=site.issuer).token())
    assert site.key_looks <= looks + 1, "forged tokens cost the provider nothing"


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"issuer": "https://evil.example.com"}, "the identity provider calls itself"),
        ({"jwks_uri": None}, "the identity provider names no jwks_uri"),
        ({"jwks_uri": "http://127.0.0.1:9/keys"}, "http://127.0.0.1:9/keys can't be read"),
    ],
)
async def test_a_provider_that_cannot_be_used_is_named(
    logins: Logins, site: ProviderSite, told: dict[str, Any], sentence: str
) -> None:
    site.told = told
    status, said = await logins.refused(site.token())
    assert status == 502
    assert sentence in said


async def test_a_provider_that_failed_is_asked_again_after_a_pause(
    logins: Logins, site: ProviderSite, clock: Clock
) -> None:
    site.told = {"jwks_uri": None}
    failed = await logins.refused(site.token())
    site.told = {}
    assert await logins.refused(site.token()) == failed, "people without a key can't flood it"
    clock.now += AWAY_S
    assert (await logins.log_in(site.token()))[0] == 200


async def test_a_provider_that_does_not_answer_holds_nobody_up_for_long(
    logins: Logins, site: ProviderSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_provider, "READ_S", 0.1)
    site.slow_s = 0.3
    status, said = await logins.refused(site.token())
    assert (status, said) == (502, f"{site.issuer} does not answer within 0.1 s")


async def test_known_keys_are_used_while_the_provider_is_looked_at_for_a_forged_token(
    logins: Logins, site: ProviderSite, clock: Clock
) -> None:
    assert (await logins.log_in(site.token()))[0] == 200
    clock.now += 31
    site.slow_s, asked = 1.5, site.asked
    forged = asyncio.create_task(logins.log_in(ProviderSite(issuer=site.issuer).token()))
    await until(lambda: site.asked > asked)  # it waits for the provider now
    async with asyncio.timeout(1):
        assert (await logins.log_in(site.token()))[0] == 200
    site.slow_s = 0.0
    assert (await forged)[0] == 403


async def test_keys_of_a_provider_with_tls_come_by_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    issuer = "https://id.example.com"
    told = {"issuer": issuer, "jwks_uri": "http://id.example.com/keys"}

    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=told))
    client = httpx.AsyncClient(transport=transport)
    monkeypatch.setattr("kvmig.fleet.identity_provider.httpx.AsyncClient", lambda **_: client)
    terms = LoginTerms(issuer=issuer, client_id=CLIENT)
    provider = IdentityProvider(terms, Clock(), time.time)
    with pytest.raises(ProviderAway, match="must be at a URL with https://"):
        await provider.claims("x")
    await provider.close()


async def test_without_a_provider_nobody_logs_in(sqlite_place: Place) -> None:
    store = FleetStore(sqlite_place.url, sqlite_place.folder / "pepper")
    made = Logins(store, None)
    status, said = await made.refused("x")
    await made.http.aclose()
    assert (status, said) == (
        404, "this fleet has no identity provider (kvmig up --oidc-issuer)",
    )  # fmt: skip
