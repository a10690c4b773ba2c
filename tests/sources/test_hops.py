"""Where calls for files may lead, and that they go to the addresses that were checked."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import httpx2
import pytest

from kvmig.core.config import CertificateFiles
from kvmig.mirror.errors import PlaceGone
from kvmig.mirror.hub_transport import CHAIN, HubTransport
from kvmig.sources import hops
from kvmig.sources.file_list import SourceFailure
from kvmig.sources.hops import CallChain, addresses_of, begun_at, may_follow, proxy_for
from kvmig.sources.http_client import CheckedTransport
from tests.support.certificates import Authority

PUBLIC, PRIVATE, LINK = "93.184.216.34", "10.0.0.7", "169.254.169.254"
FIRST, SECOND = "https://hub.test/x", "https://store.test/y"


@pytest.mark.parametrize(
    ("first", "url", "followed"),
    [
        ("https://a.com/x", "https://b.com/x", True),
        ("https://a.com/x", "http://a.com/x", False),
        ("https://a.com/x", "http://127.0.0.1:8080/x", False),
        ("https://a.com/x", "http://169.254.169.254/x", False),
        ("http://localhost/x", "http://127.0.0.1:1/x", True),
        ("http://localhost/x", "http://10.0.0.1/x", False),
        ("http://mirror.lan/x", "http://store.lan/x", True),
        ("http://mirror.lan/x", "http://localhost/x", False),
        ("http://localhost/x", "file:///etc/passwd", False),
    ],
)
def test_a_redirect_keeps_tls_and_leaves_this_host_alone(
    first: str, url: str, followed: bool
) -> None:
    assert may_follow(first, url) is followed


@pytest.mark.parametrize(
    ("first", "addresses", "refused"),
    [
        ([PUBLIC], [PUBLIC], False),
        ([PUBLIC], [PRIVATE], True),
        ([PUBLIC], ["127.0.0.1"], True),
        ([PUBLIC], ["::1"], True),
        ([PUBLIC], ["fd00::1"], True),
        ([PUBLIC], ["::ffff:10.0.0.7"], True),
        ([PUBLIC], [PUBLIC, PRIVATE], True),
        ([PRIVATE], ["10.0.0.8"], False),
        (["127.0.0.1"], [PRIVATE], False),
        ([PRIVATE], [LINK], True),
        ([PRIVATE], ["fe80::1"], True),
        ([PRIVATE], [f"::ffff:{LINK}"], True),
        ([PRIVATE], ["64:ff9b::a9fe:a9fe"], True),
        ([PUBLIC], ["64:ff9b::a00:7"], True),
        ([PUBLIC], ["64:ff9b::5db8:d822"], False),
        ([PUBLIC], ["2002:a00:7::1"], True),
        ([], [PRIVATE], True),
    ],
)
def test_a_public_server_leads_to_no_address_of_this_network(
    first: list[str], addresses: list[str], refused: bool
) -> None:
    chain = CallChain(FIRST)
    assert chain.check_addresses(FIRST, first) == ""
    assert bool(chain.check_addresses(SECOND, addresses)) is refused


def test_a_public_name_that_becomes_an_address_of_this_network_is_not_called_again() -> None:
    chain = CallChain(FIRST)
    assert chain.check_addresses(FIRST, [PUBLIC]) == ""
    why = chain.check_addresses("https://hub.test/other?word", [PRIVATE])
    assert why == (
        f"{FIRST} leads to https://hub.test, which is refused: it is an address of this host or its"
        " network"
    )


class NamedServer:
    """Answers with the host that it was called by, at 127.0.0.1 only."""

    def __init__(self, files: CertificateFiles | None = None) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.headers["host"])
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if files is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files.cert, files.key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> NamedServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class Names:
    """What each look-up of a name finds: one answer after the other, then the last for good."""

    def __init__(self, **known: list[list[str]]) -> None:
        self.known = known

    def __call__(self, host: str) -> list[str]:
        answers = self.known[host.partition(".")[0]]
        return answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """127.0.0.1 counts as an address of the public network."""
    made = Names(hub=[["127.0.0.1"]], store=[["127.0.0.1"]])
    monkeypatch.setattr("kvmig.sources.http_client.addresses_of", made)
    monkeypatch.setattr("kvmig.mirror.hub_transport.addresses_of", made)
    monkeypatch.setattr(hops, "is_inside", lambda address: address != "127.0.0.1")
    return made


@pytest.fixture
def client() -> Iterator[httpx2.Client]:
    with httpx2.Client(transport=CheckedTransport(), timeout=10) as made:
        yield made


def test_a_call_goes_to_the_address_that_was_checked_and_no_second_look_up_decides(
    names: Names, client: httpx2.Client
) -> None:
    with NamedServer() as server, begun_at(f"http://hub.test:{server.port}/"):
        url = f"http://hub.test:{server.port}/a"
        assert client.get(url).status_code == 200  # the system knows no such name
        assert server.asked == [f"hub.test:{server.port}"]


@pytest.mark.parametrize("host", ["hub", "store"])
def test_a_name_that_now_stands_for_an_address_inside_gets_no_call(
    names: Names, client: httpx2.Client, host: str
) -> None:
    names.known[host] = [["127.0.0.1"], ["127.0.0.2"]]
    with NamedServer() as server, begun_at(f"http://hub.test:{server.port}/"):
        assert client.get(f"http://hub.test:{server.port}/").status_code == 200
        if host == "store":
            assert client.get(f"http://store.test:{server.port}/").status_code == 200
        with pytest.raises(SourceFailure, match="it is an address of this host or its network"):
            client.get(f"http://{host}.test:{server.port}/")
        assert len(server.asked) == 1 + (host == "store")


def test_addresses_are_tried_one_after_the_other(names: Names, client: httpx2.Client) -> None:
    names.known["hub"] = [["::1", "127.0.0.1"]]
    with NamedServer() as server:
        assert client.get(f"http://hub.test:{server.port}/").status_code == 200


def test_a_name_that_is_not_known_fails_as_a_connection(
    names: Names, client: httpx2.Client
) -> None:
    names.known["hub"] = [[]]
    with pytest.raises(httpx2.ConnectError, match=r"hub\.test is not known here"):
        client.get("http://hub.test/")


def test_tls_is_for_the_name_and_not_for_the_address(
    names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Authority.make().write(tmp_path, host="hub.test")
    monkeypatch.setenv("SSL_CERT_FILE", files.cert)
    with (
        NamedServer(files) as server,
        httpx2.Client(transport=CheckedTransport(), timeout=10) as client,
    ):
        assert client.get(f"https://hub.test:{server.port}/").status_code == 200
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            client.get(f"https://store.test:{server.port}/")


def test_a_proxy_of_the_environment_is_called_for_all_hosts_but_those_that_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.test:3128")
    monkeypatch.setenv("no_proxy", "near.test")
    assert proxy_for("https", "hub.test") == "http://proxy.test:3128"
    assert proxy_for("https", "near.test") == ""
    assert proxy_for("http", "hub.test") == ""


async def test_the_mirrors_calls_go_to_checked_addresses_too(names: Names) -> None:
    names.known["store"] = [["127.0.0.1"], ["127.0.0.2"]]
    transport = HubTransport(httpx.Limits())
    with NamedServer() as server:
        first, other = (f"http://{host}.test:{server.port}/" for host in ("hub", "store"))
        chain = {CHAIN: CallChain(first)}
        async with httpx.AsyncClient(transport=transport, timeout=10) as client:
            for url in (first, other):
                assert (await client.get(url, extensions=chain)).status_code == 200
            with pytest.raises(PlaceGone, match="it is an address of this host or its network"):
                await client.get(other, extensions=chain)
        assert [one.partition(":")[0] for one in server.asked] == ["hub.test", "store.test"]


def test_a_name_of_this_host_has_its_addresses_in_order() -> None:
    assert "127.0.0.1" in addresses_of("localhost")
    assert addresses_of("no-such-name.invalid") == []
