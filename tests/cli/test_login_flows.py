"""`kvmig login` against an identity provider that speaks the real protocol."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from kvmig.cli import login_flows
from kvmig.cli.client import CallFailure
from kvmig.cli.login_flows import id_token
from tests.support.provider_site import CLIENT, ProviderSite, provider_site


@pytest.fixture
def site() -> Iterator[ProviderSite]:
    with provider_site() as made:
        yield made


def test_a_code_on_any_device_gives_a_token(
    site: ProviderSite, capsys: pytest.CaptureFixture[str]
) -> None:
    site.pending = 2
    assert id_token(site.issuer, CLIENT).count(".") == 2
    assert capsys.readouterr().err == f"Open {site.issuer}/enter and enter WDJB-MJHT\n"


@pytest.mark.parametrize("error", ["access_denied", "expired_token", "invalid_client"])
def test_what_the_provider_refuses_is_said(site: ProviderSite, error: str) -> None:
    site.error = error
    with pytest.raises(CallFailure, match=f"{site.issuer} refuses: because of {error}"):
        id_token(site.issuer, CLIENT)


def test_a_code_that_nobody_enters_ends(
    site: ProviderSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.pending = 1_000_000
    monkeypatch.setattr(login_flows, "PATIENCE_S", 0.2)
    with pytest.raises(CallFailure, match="the code was not used in time"):
        id_token(site.issuer, CLIENT)


def test_a_provider_that_is_not_there_is_named() -> None:
    with pytest.raises(CallFailure, match=r"http://127\.0\.0\.1:9 can't be reached"):
        id_token("http://127.0.0.1:9", CLIENT)


def test_a_provider_that_calls_itself_otherwise_is_refused(site: ProviderSite) -> None:
    site.told = {"issuer": "https://evil.example.com"}
    with pytest.raises(CallFailure, match="calls itself 'https://evil"):
        id_token(site.issuer, CLIENT)


def test_an_answer_without_its_fields_is_said(site: ProviderSite) -> None:
    site.told = {"token_endpoint": f"{site.issuer}/nowhere"}
    with pytest.raises(CallFailure, match="gave no ID token"):
        id_token(site.issuer, CLIENT)


def opened(said: io.StringIO) -> str:
    """The page that the person is to open."""
    ends = time.monotonic() + 10
    while (found := re.search(r"Open (\S+)", said.getvalue())) is None:
        assert time.monotonic() < ends
        time.sleep(0.01)
    return found[1]


@pytest.mark.parametrize("device", [True, False])
def test_a_browser_on_this_host_gives_a_token(
    site: ProviderSite, monkeypatch: pytest.MonkeyPatch, device: bool
) -> None:
    site.device = device
    said, tokens = io.StringIO(), list[str]()
    monkeypatch.setattr(sys, "stderr", said)
    thread = threading.Thread(
        target=lambda: tokens.append(id_token(site.issuer, CLIENT, browser=device))
    )
    thread.start()
    page = opened(said)
    port = int(re.search(r"127\.0\.0\.1%3A(\d+)", page)[1])  # type: ignore[index]
    assert httpx.get(f"http://127.0.0.1:{port}/favicon.ico").status_code == 200
    answer = httpx.get(page, follow_redirects=True)
    thread.join(10)
    assert "You are logged in" in answer.text
    assert tokens[0].count(".") == 2


@pytest.mark.parametrize("query", ["code=stolen&state=another", "error=%1b[2Jno"])
def test_a_browser_that_comes_back_with_another_state_gives_no_token(
    site: ProviderSite, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    said, failures = io.StringIO(), list[str]()
    monkeypatch.setattr(sys, "stderr", said)

    def logs_in() -> None:
        try:
            id_token(site.issuer, CLIENT, browser=True)
        except CallFailure as error:
            failures.append(str(error))

    thread = threading.Thread(target=logs_in)
    thread.start()
    port = int(re.search(r"127\.0\.0\.1%3A(\d+)", opened(said))[1])  # type: ignore[index]
    httpx.get(f"http://127.0.0.1:{port}/?{query}")
    thread.join(10)
    assert len(failures) == 1
    assert "refuses" in failures[0]
    assert failures[0].isprintable(), "any page may send the browser here"
