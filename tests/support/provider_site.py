"""An identity provider of the tests' own: it speaks OpenID Connect on a port of this host."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import ECKey, KeySet

CLIENT = "kvmig"
DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
Answer = tuple[int, Any]


def challenge_of(verifier: str) -> str:
    """S256 of PKCE (RFC 7636)."""
    digest = hashlib.sha256(verifier.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def new_key(kid: str = "") -> ECKey:
    """A key of this id, or of a new one."""
    return ECKey.generate_key("P-256", {"kid": kid or secrets.token_hex(4), "alg": "ES256"})


@dataclass
class ProviderSite:
    """What it says, and whom it has logged in."""

    issuer: str = ""
    key: ECKey = field(default_factory=new_key)
    person: dict[str, Any] = field(
        default_factory=lambda: {"sub": "u-1", "preferred_username": "bea", "groups": ["staff"]}
    )
    """Claims of whoever logs in."""
    pending: int = 1
    """Questions about a code that are answered before the person has entered it."""
    error: str = ""
    """Error of the next answers of the token endpoint."""
    device: bool = True
    """Whether it has a page for codes."""
    claims: dict[str, Any] = field(default_factory=dict)
    """Other claims of all tokens."""
    told: dict[str, Any] = field(default_factory=dict)
    """Other fields of what it says of itself."""
    kind: str = ""
    """Type of its tokens; empty: they have none."""
    slow_s: float = 0.0
    """Time before each answer."""
    asked: int = 0
    """How often it was asked for anything."""
    key_looks: int = 0
    """How often its keys were read."""
    _codes: dict[str, str] = field(default_factory=dict)
    """Challenges, by code."""
    _nonces: dict[str, str | None] = field(default_factory=dict)

    def token(self, **claims: Any) -> str:
        """An ID token. claims: None: it has none of the name."""
        now = int(time.time())
        own = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 300}
        own["jti"] = secrets.token_hex(8)
        every = {**own, **self.person, **self.claims, **claims}
        kept = {name: value for name, value in every.items() if value is not None}
        head = {"alg": "ES256", "kid": self.key.kid, **({"typ": self.kind} if self.kind else {})}
        return jwt.encode(head, kept, self.key)

    def get(self, path: str, query: dict[str, str]) -> Answer:
        match path:
            case "/.well-known/openid-configuration":
                own = {
                    "issuer": self.issuer,
                    "jwks_uri": f"{self.issuer}/jwks",
                    "token_endpoint": f"{self.issuer}/token",
                    "authorization_endpoint": f"{self.issuer}/authorize",
                }
                if self.device:
                    own["device_authorization_endpoint"] = f"{self.issuer}/device"
                return 200, {**own, **self.told}
            case "/jwks":
                self.key_looks += 1
                return 200, KeySet([self.key]).as_dict(private=False)
            case "/authorize":
                assert query["code_challenge_method"] == "S256"
                back = {"state": query["state"], "code": self._new_code(query)}
                return 302, f"{query['redirect_uri']}?{urlencode(back)}"
        return 404, {}

    def _new_code(self, query: dict[str, str]) -> str:
        code = secrets.token_hex(8)
        self._codes[code] = query["code_challenge"]
        self._nonces[code] = query.get("nonce")
        return code

    def post(self, path: str, form: dict[str, str]) -> Answer:
        if path == "/device":
            return 200, {
                "device_code": self._new_code(form), "user_code": "WDJB-MJHT", "expires_in": 5,
                "interval": 0.01, "verification_uri": f"{self.issuer}/enter",
            }  # fmt: skip
        if path != "/token":
            return 404, {}
        if self.error:
            return 400, {"error": self.error, "error_description": f"because of {self.error}"}
        device = form["grant_type"] == DEVICE_GRANT
        code = form["device_code" if device else "code"]
        challenge = self._codes.get(code)
        if challenge != challenge_of(form["code_verifier"]):
            return 400, {"error": "invalid_grant"}
        if device and self.pending:
            self.pending -= 1
            return 400, {"error": "authorization_pending"}
        token = self.token(nonce=self.claims.get("nonce", self._nonces.get(code)))
        return 200, {"access_token": "x", "token_type": "Bearer", "id_token": token}


@contextmanager
def provider_site() -> Iterator[ProviderSite]:
    """One that runs."""
    site = ProviderSite()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            site.asked += 1
            time.sleep(site.slow_s)
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            self._answer(*site.get(parts.path, query))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            self._answer(*site.post(self.path, form))

        def _answer(self, status: int, what: Any) -> None:
            body = b"" if status == 302 else json.dumps(what).encode()
            self.send_response(status)
            if status == 302:
                self.send_header("location", what)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        site.issuer = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
