"""How a person logs in from a terminal: an identity provider's ID token (OpenID Connect).

By a short code that the person enters at the provider's page, on any device (RFC 8628). Or by a
browser on this host, which the provider sends back to a port of this process (RFC 8252). Both prove
with PKCE that who gets the token is who has asked for it.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import httpx2
from authlib.common.errors import AuthlibBaseError
from authlib.common.security import generate_token
from authlib.integrations.httpx_client import OAuth2Client
from authlib.oauth2.rfc7636 import create_s256_code_challenge

from kvmig.cli.client import CallFailure

DISCOVERY = "/.well-known/openid-configuration"
SCOPE = "openid profile email"
DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
DEVICE_PAGE = "device_authorization_endpoint"
TIMEOUT_S = 20.0
"""Timeout of the provider's answers."""
PATIENCE_S = 600.0
"""Time for the person to log in."""
SLOWER_S = 5.0
"""What the provider's `slow_down` adds to the pause between two questions."""
HEAD_BYTES = 16_384
DONE = b"You are logged in: go back to the terminal.\n"


def id_token(issuer: str, client_id: str, *, browser: bool = False) -> str:
    """Let the person log in. browser: with one on this host. Raises CallFailure."""
    client = OAuth2Client(
        client_id,
        token_endpoint_auth_method="none",  # noqa: S106 - a client without a secret
        scope=SCOPE,
        code_challenge_method="S256",
        timeout=TIMEOUT_S,
    )
    try:
        with client:
            provider = discover(client, issuer)
            if DEVICE_PAGE in provider and not browser:
                return by_code(client, provider)
            return by_browser(client, provider)
    except (httpx.HTTPError, httpx2.HTTPError) as error:  # Authlib's client is of either
        raise CallFailure(f"the identity provider {issuer} can't be reached: {error}") from error
    except AuthlibBaseError as error:
        why = error.description or error.error
        raise CallFailure(f"the identity provider {issuer} refuses: {why}") from error
    except (KeyError, ValueError, TypeError) as error:
        raise CallFailure(f"the identity provider {issuer} answers amiss: {error!r}") from error


def discover(client: OAuth2Client, issuer: str) -> Mapping[str, Any]:
    """What the provider says of itself. Raises CallFailure."""
    answer = client.get(issuer.rstrip("/") + DISCOVERY, auth=None)
    found: dict[str, Any] = answer.raise_for_status().json()
    if found.get("issuer") != issuer:
        raise CallFailure(f"{issuer} calls itself {found.get('issuer')!r:.200}")
    return found


def token_of(answer: Mapping[str, Any]) -> str:
    """Raises CallFailure."""
    token = answer.get("id_token")
    if not isinstance(token, str):
        raise CallFailure(
            "the identity provider gave no ID token: is openid a scope of the client?"
        )
    return token


def by_code(client: OAuth2Client, provider: Mapping[str, Any]) -> str:
    """Let the person enter a code on any device. Raises CallFailure, AuthlibBaseError."""
    verifier = generate_token(64)
    asked = {
        "client_id": client.client_id,
        "scope": SCOPE,
        "code_challenge": create_s256_code_challenge(verifier),
        "code_challenge_method": "S256",
    }
    answer = client.post(provider[DEVICE_PAGE], data=asked, auth=None)
    told = answer.raise_for_status().json()
    print(f"Open {told['verification_uri']} and enter {told['user_code']}", file=sys.stderr)
    pause_s = float(told.get("interval", SLOWER_S))
    ends = time.monotonic() + min(PATIENCE_S, float(told["expires_in"]))
    while time.monotonic() < ends:
        time.sleep(pause_s)
        try:
            found = client.fetch_token(
                provider["token_endpoint"],
                grant_type=DEVICE_GRANT,
                device_code=told["device_code"],
                client_id=client.client_id,
                code_verifier=verifier,
            )
        except AuthlibBaseError as error:
            if error.error not in ("authorization_pending", "slow_down"):
                raise
            pause_s += SLOWER_S if error.error == "slow_down" else 0
        else:
            return token_of(found)
    raise CallFailure("the code was not used in time")


def by_browser(client: OAuth2Client, provider: Mapping[str, Any]) -> str:
    """Let the person use a browser of this host. Raises CallFailure, AuthlibBaseError."""
    verifier = generate_token(64)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client.redirect_uri = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        page, state = client.create_authorization_url(
            provider["authorization_endpoint"], code_verifier=verifier
        )
        print(f"Open {page}", file=sys.stderr)
        came = redirected(listening)
    if why := parse_qs(urlsplit(came).query).get("error"):
        raise CallFailure(f"the identity provider refuses: {why[0]!r:.200}")
    found = client.fetch_token(
        provider["token_endpoint"],
        authorization_response=client.redirect_uri.rstrip("/") + came,
        state=state,
        code_verifier=verifier,
    )
    return token_of(found)


def redirected(listening: socket.socket) -> str:
    """The path by which the provider sends the browser back, with its query. Raises CallFailure."""
    ends = time.monotonic() + PATIENCE_S
    while (left_s := ends - time.monotonic()) > 0:
        listening.settimeout(left_s)
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            break
        with connection:
            connection.settimeout(TIMEOUT_S)
            try:
                head = connection.recv(HEAD_BYTES)
                path = head.split(b" ", 2)[1].decode("ascii") if head.startswith(b"GET /") else ""
                lines = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nconnection: close\r\n"
                body = DONE if "code=" in path else b""
                connection.sendall(lines + b"content-length: %d\r\n\r\n" % len(body) + body)
            except (OSError, ValueError, IndexError):
                continue  # no browser, or one that has left
        if "code=" in path or "error=" in path:
            return path
    raise CallFailure("no browser has come back in time")
