"""The way from the command line to a fleet's server: its socket here, or its proxy elsewhere."""

from __future__ import annotations

import fcntl
import os
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from kvmig.core.errors import ConfigError, KvmigError
from kvmig.core.shown_urls import shown_url

URL, KEY = "KVMIG_URL", "KVMIG_KEY"
"""Environment variables: the proxy's URL of a fleet elsewhere, and a key for it."""
TIMEOUT_S = 200.0
"""The first check of an engine's flags loads its libraries."""
SILENCE_S = 600.0
"""Longest within an answer that streams: the prefill of a long prompt on a CPU."""


APIS = ("/v1", "/kvmig", "/models")
"""Paths of a proxy, which its URL doesn't have."""


class CallFailure(KvmigError):
    """The server has refused, or can't be reached."""

    def __init__(self, sentence: str, status: int | None = None) -> None:
        """status: of its answer; None: there was none."""
        super().__init__(sentence)
        self.status = status


class FleetClient:
    """A client of a fleet. Without a URL it uses the socket in the fleet's folder, which only its
    user can connect to."""

    def __init__(self, socket: str, url: str = "", key: str = "", certificate: str = "") -> None:
        """key: an admin's, for a fleet elsewhere. certificate: file of the one that the URL's
        server must have; empty: one that this host trusts. Raises ConfigError."""
        url, key = url or os.environ.get(URL, ""), check_key(key or os.environ.get(KEY, ""))
        self.where = check_url(url) or socket
        self._lacks_key = bool(url) and not key
        self._folder = None if url else Path(socket).parent
        self._socket = "" if url else socket
        self._base = url or "http://kvmig"
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._verify = only_certificate(certificate) if certificate else True
        # A socket's client loads no certificates, which takes tens of milliseconds.
        self._http = httpx.Client(
            base_url=self._base,
            transport=httpx.HTTPTransport(uds=socket, verify=False) if self._socket else None,
            headers=self._headers,
            timeout=TIMEOUT_S,
            verify=self._verify,
        )

    def close(self) -> None:
        """End its connections."""
        self._http.close()

    def asynchronous(self, timeout_s: float) -> httpx.AsyncClient:
        """A client of the same server, for an event loop."""
        return httpx.AsyncClient(
            base_url=self._base,
            transport=httpx.AsyncHTTPTransport(uds=self._socket, verify=False)
            if self._socket
            else None,
            headers=self._headers,
            timeout=timeout_s,
            verify=self._verify,
        )

    def get(self, path: str, **query: Any) -> Any:
        """JSON of a path under /kvmig/v2. Raises CallFailure."""
        return self._ask("GET", path, params=query)

    def post(self, path: str, body: Any = None) -> Any:
        """The same, with a body. Raises CallFailure."""
        return self._ask("POST", path, json={} if body is None else body)

    def put(self, path: str, body: Any) -> Any:
        """The same. Raises CallFailure."""
        return self._ask("PUT", path, json=body)

    def patch(self, path: str, body: Any) -> Any:
        """The same. Raises CallFailure."""
        return self._ask("PATCH", path, json=body)

    def delete(self, path: str, **query: Any) -> Any:
        """The same. Raises CallFailure."""
        return self._ask("DELETE", path, params=query)

    def stream(self, path: str, body: Any) -> Iterator[str]:
        """Lines of an answer that streams. path: whole. Raises CallFailure."""
        wait = httpx.Timeout(TIMEOUT_S, read=SILENCE_S)
        try:
            with self._http.stream("POST", path, json=body, timeout=wait) as answer:
                if not answer.is_success:
                    answer.read()
                    raise CallFailure(self.refusal(answer), answer.status_code)
                yield from answer.iter_lines()
        except httpx.HTTPError as error:
            raise CallFailure(f"{self.where} can't be reached: {error}") from error

    @property
    def _advice(self) -> str:
        """What to do where no fleet answers."""
        init = holder_of(self._folder) if self._folder is not None else ""
        if init:
            return f"its supervisor, process {init}, restarts the server and logs what is wrong"
        return "`kvmig up` starts one"

    def _ask(self, method: str, path: str, **more: Any) -> Any:
        try:
            answer = self._http.request(method, f"/kvmig/v2/{path}", **more)
        except UnicodeEncodeError as error:  # of the shell's bytes
            there = error.object[max(0, error.start - 40) : error.end + 40]
            raise ConfigError(f"{there!r} has bytes that are not UTF-8") from error
        except httpx.HTTPError as error:
            raise CallFailure(
                f"no fleet answers at {self.where} ({error}); {self._advice}"
            ) from error
        if not answer.is_success:
            raise CallFailure(self.refusal(answer), answer.status_code)
        try:
            return answer.json()
        except ValueError as error:
            kind = answer.headers.get("content-type", "no type")
            raise CallFailure(
                f"{self.where} is no fleet: it answers with {kind!r:.100} in place of JSON"
            ) from error

    def refusal(self, answer: httpx.Response) -> str:
        """Why the server refuses a call."""
        if answer.status_code == HTTPStatus.UNAUTHORIZED and self._lacks_key:
            return f"{self.where} requires a key: give --key, or set {KEY}"
        if answer.has_redirect_location:
            there = shown_url(answer.headers["location"])
            return f"{self.where} leads to {there!r:.200}: give the fleet's own address as --url"
        return sentence_of(answer)


def path_part(name: str, safe: str = "/") -> str:
    """A name as it stands in a path of the API. safe: what is left as it is. Raises ConfigError for
    a name that would stand for what is around it."""
    if {".", ".."} & set(check_given(name).split("/")):
        raise ConfigError(f"a name is {name!r:.150}, which is none of the fleet's")
    return quote(name, safe=safe)


def check_given(name: str) -> str:
    """Return a name unchanged, or a source that is given as one. Raises ConfigError for none."""
    if name in ("", ".", ".."):
        raise ConfigError(f"a name is {name!r}, which names nothing")
    return name


def only_certificate(path: str) -> ssl.SSLContext:
    """Trust the first certificate of a file and no other, by any name of its server.

    Raises ConfigError.
    """
    end = "-----END CERTIFICATE-----\n"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # its issuer may be unknown here
    try:
        own, _, _ = Path(path).read_text().partition(end)
        context.load_verify_locations(cadata=own + end)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"the fleet's certificate {path} can't be read: {error}") from error
    return context


def check_url(url: str) -> str:
    """Return a proxy's URL unchanged. Raises ConfigError for anything else."""
    shown = shown_url(url)
    try:
        parts = urlsplit(url)
        named = bool(httpx.URL(url).host) and parts.port != 0
        sound = not url or (parts.scheme in ("http", "https") and named)
    except (ValueError, httpx.InvalidURL):
        sound = False
    if not sound:
        raise ConfigError(f"--url is {shown!r:.200}, must be of the form http://HOST:PORT")
    if parts.path.startswith(APIS):
        door = shown_url(f"{parts.scheme}://{parts.netloc}")
        raise ConfigError(
            f"--url is {shown!r:.200}, must be the fleet's address without a path: {door}"
        )
    return url


def check_key(key: str) -> str:
    """Return a key unchanged, which is in no error. Raises ConfigError for what no header takes."""
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("--key has characters that are in no key: copy it again")
    return key


def holder_of(folder: Path) -> str:
    """The process id of the supervisor in a fleet's `run` folder; empty: there is none."""
    try:
        with (folder / "init.pid").open() as held:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return held.read().strip()
    except OSError:
        pass  # no fleet was ever there
    return ""


def sentence_of(answer: httpx.Response) -> str:
    """What an error answer says."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {answer.status_code} without a reason"
