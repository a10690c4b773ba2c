"""The identity provider (OpenID Connect) that vouches for people: is a token its own?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import httpx
from joserfc import jwt
from joserfc.errors import BadSignatureError, ExpiredTokenError, InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from kvmig.accounts.people import LoginRefused, LoginTerms
from kvmig.core.clock import TimeSource
from kvmig.core.errors import KvmigError

DISCOVERY = "/.well-known/openid-configuration"
ALGORITHMS = ("RS256", "PS256", "ES256", "EdDSA")
"""Signatures that are taken: all by a private key, which only the provider has."""
OTHER_TOKENS = "+jwt"
"""End of the type of tokens that the provider signs for something else (RFC 8725): `at+jwt` lets
programs call a service, and its audience may be this fleet's, too."""
TIMEOUT_S = 5.0
"""Timeout of a connection, and of each pause in an answer."""
READ_S = 10.0
"""Timeout of both answers together that the keys are read from."""
AWAY_S = 5.0
"""Pause after a failure: people without a key have the provider asked."""
MOST_BYTES = 1 << 20
"""Longest answer."""
KNOWN_S = 3600.0
"""How long the provider's keys are known."""
ANEW_S = 30.0
"""Pause between two looks for keys because of a token: anyone may send one."""
SKEW_S = 60
"""Most that the provider's clock may differ."""


class ProviderAway(KvmigError):
    """The identity provider doesn't answer, or not as OpenID Connect says."""


class IdentityProvider:
    """The identity provider of a fleet; make it inside a running event loop, `close` it."""

    def __init__(self, terms: LoginTerms, clock: TimeSource, wall: TimeSource) -> None:
        """clock: steady. wall: Unix time."""
        self.terms = terms
        self._clock = clock
        self._wall = wall
        self._keys: KeySet | None = None
        self._told: Mapping[str, Any] = {}
        """What the provider says of itself."""
        self._read_at = 0.0
        self._tried_at = 0.0
        self._why = ""
        """Why the keys could not be read at the last try; empty: they could."""
        self._reading = asyncio.Lock()
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S)

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def claims(self, token: str) -> Mapping[str, Any]:
        """What an ID token says, which is for this fleet, and the provider's own.

        Raises LoginRefused, ProviderAway.
        """
        keys, fresh = await self._known()
        found = self._decoded(token, keys)
        if found is None and not fresh and (changed := await self._anew()) is not None:
            found = self._decoded(token, changed)
        if found is None:
            raise LoginRefused("the token is not signed by the identity provider")
        self._check(found)
        return found

    async def login_page(self, query: Mapping[str, str]) -> str:
        """The provider's page for a person's browser, with this query. Raises ProviderAway."""
        page = await self._endpoint("authorization_endpoint")
        return f"{page}{'&' if '?' in page else '?'}{urlencode(query)}"

    async def token_for(self, code: str, verifier: str, redirect_uri: str) -> str:
        """The ID token of a person who has logged in at that page. Raises LoginRefused,
        ProviderAway."""
        url = await self._endpoint("token_endpoint")
        form = {
            "grant_type": "authorization_code", "code": code, "code_verifier": verifier,
            "redirect_uri": redirect_uri, "client_id": self.terms.client_id,
        }  # fmt: skip
        try:
            async with asyncio.timeout(READ_S):
                found = await self._call("POST", url, form)
        except TimeoutError as error:
            raise ProviderAway(f"{url:.200} does not answer within {READ_S:g} s") from error
        token = found.get("id_token")
        if not isinstance(token, str):
            raise LoginRefused(f"the provider gives no token: {str(found.get('error', ''))!r:.100}")
        return token

    async def _endpoint(self, name: str) -> str:
        """Raises ProviderAway."""
        await self._known()
        where = self._told.get(name)
        if not isinstance(where, str):
            raise ProviderAway(f"the identity provider names no {name}")
        if self.terms.issuer.startswith("https:") and not where.startswith("https:"):
            raise ProviderAway(f"its {name} is {where:.200}, must be a URL with https://")
        return where

    def _decoded(self, token: str, keys: KeySet) -> dict[str, Any] | None:
        """What a token says; None: none of the keys has signed it. Raises LoginRefused."""
        try:
            found = jwt.decode(token, keys, algorithms=list(ALGORITHMS))
        except (BadSignatureError, InvalidKeyIdError):
            return None
        except (JoseError, ValueError, TypeError) as error:  # a TypeError of a head that is amiss
            raise LoginRefused(f"the token can't be read: {error}") from error
        kind = str(found.header.get("typ", ""))
        if kind.lower().endswith(OTHER_TOKENS):
            raise LoginRefused(f"the token's type is {kind!r:.50}, must be that of an ID token")
        return dict(found.claims)

    def _check(self, claims: dict[str, Any]) -> None:
        """Raises LoginRefused."""
        registry = jwt.JWTClaimsRegistry(
            now=int(self._wall()),
            leeway=SKEW_S,
            iss={"essential": True, "value": self.terms.issuer},
            aud={"essential": True, "value": self.terms.client_id},
            exp={"essential": True},
            iat={"essential": True},
        )
        try:
            registry.validate(claims)
        except ExpiredTokenError as error:
            raise LoginRefused("the token has expired: log in again") from error
        except JoseError as error:
            raise LoginRefused(f"the token is not for this fleet: {error.description}") from error
        party = claims.get("azp")
        if party is not None and party != self.terms.client_id:
            raise LoginRefused("the token is not for this fleet: Invalid claim: 'azp'")

    async def _known(self) -> tuple[KeySet, bool]:
        """The provider's keys, and whether they were read just now. Raises ProviderAway."""
        if (known := self._fresh()) is not None:
            return known, False
        async with self._reading:
            if (known := self._fresh()) is not None:  # another token's look has brought them
                return known, False
            return await self._read(), True

    def _fresh(self) -> KeySet | None:
        return self._keys if self._clock() - self._read_at < KNOWN_S else None

    async def _anew(self) -> KeySet | None:
        """Read the keys once more, which may have changed; None: that was done just before.

        Raises ProviderAway.
        """
        async with self._reading:
            if self._clock() - self._tried_at < ANEW_S:
                return None
            return await self._read()

    async def _read(self) -> KeySet:
        """Raises ProviderAway, also if the last try has failed just before."""
        if self._why and self._clock() - self._tried_at < AWAY_S:
            raise ProviderAway(self._why)
        try:
            async with asyncio.timeout(READ_S):
                self._keys = await self._fetch()
        except TimeoutError as error:
            self._why = f"{self.terms.issuer:.200} does not answer within {READ_S:g} s"
            raise ProviderAway(self._why) from error
        except ProviderAway as error:
            self._why = str(error)
            raise
        finally:
            self._tried_at = self._clock()
        self._why, self._read_at = "", self._tried_at
        return self._keys

    async def _fetch(self) -> KeySet:
        """Raises ProviderAway."""
        told = await self._get(self.terms.issuer.rstrip("/") + DISCOVERY)
        if told.get("issuer") != self.terms.issuer:
            raise ProviderAway(
                f"the identity provider calls itself {told.get('issuer')!r:.200}, --oidc-issuer is"
                f" {self.terms.issuer!r:.200}"
            )
        self._told = told
        where = told.get("jwks_uri")
        if not isinstance(where, str):
            raise ProviderAway("the identity provider names no jwks_uri")
        if self.terms.issuer.startswith("https:") and not where.startswith("https:"):
            raise ProviderAway(f"its keys are at {where:.200}, must be at a URL with https://")
        try:
            return KeySet.import_key_set(await self._get(where))
        except (JoseError, ValueError, KeyError, TypeError) as error:
            raise ProviderAway(f"the keys at {where:.200} can't be read: {error}") from error

    async def _get(self, url: str) -> Any:
        """A JSON object. Raises ProviderAway."""
        return await self._call("GET", url)

    async def _call(self, method: str, url: str, form: dict[str, str] | None = None) -> Any:
        """A JSON object; of a form also that of a refusal. Raises ProviderAway."""
        try:
            async with self._http.stream(method, url, data=form) as answer:
                if form is None or answer.is_server_error:
                    answer.raise_for_status()
                came = b""
                async for part in answer.aiter_bytes():
                    came += part
                    if len(came) > MOST_BYTES:
                        raise ProviderAway(f"{url:.200} answers more than {MOST_BYTES} bytes")
            found = httpx.Response(200, content=came).json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ProviderAway(f"{url:.200} can't be read: {error!r}") from error
        if not isinstance(found, dict):
            raise ProviderAway(f"{url:.200} is no JSON object")
        return found
