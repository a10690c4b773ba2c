"""Who may call what: the admin API without a key is for programs of this machine only."""

from __future__ import annotations

import os
from http import HTTPStatus

import msgspec
import pytest

from kvmig.asgi.access import access
from kvmig.controlplane.scheduler_process import SchedulerLaunch
from kvmig.core.config import IN_THE_CLEAR, ClusterConfig, MigrationConfig, Transport, check
from kvmig.core.errors import ConfigError, TransportError
from kvmig.engines.kind import API_KEY_VARIABLE, api_keys
from kvmig.kvtransfer.messages import TransportOffer
from kvmig.kvtransfer.transports import nixl
from kvmig.kvtransfer.transports.select import TransportSite, open_offer, open_staging
from kvmig.launcher.environment import cluster_secret
from kvmig.launcher.front_ends import FrontLaunch
from kvmig.launcher.launch import LlumletLaunch

HERE = {"host": "127.0.0.1:8000"}


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1", "[::1]:8000"])
def test_without_keys_a_program_of_this_machine_may_use_the_admin_api(host: str) -> None:
    assert access([], "", "127.0.0.1").admin({"host": host}) is None


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "192.0.2.7"])
def test_without_keys_the_admin_api_is_closed_where_other_machines_can_call(bound: str) -> None:
    denied = access([], "", bound).admin(HERE)
    assert denied is not None
    assert denied.status is HTTPStatus.FORBIDDEN
    assert "KVMIG_ADMIN_KEY" in denied.message


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "rebound.example"},
        {"host": "127.0.0.1.example"},
        {"host": "["},
        {"host": "a\u2100b"},
        {},
        HERE | {"origin": "http://evil.example"},
        HERE | {"origin": "null"},
        HERE | {"sec-fetch-site": "cross-site"},
        HERE | {"x-forwarded-for": "192.0.2.1"},
        HERE | {"forwarded": "for=192.0.2.1"},
        HERE | {"via": "1.1 proxy"},
        HERE | {"x-real-ip": "192.0.2.1"},
        HERE | {"x-forwarded-host": "models.example"},
        HERE | {"x-forwarded-proto": "https"},
        HERE | {"cf-connecting-ip": "192.0.2.1"},
    ],
)
def test_without_keys_neither_web_pages_nor_proxies_may(headers: dict[str, str]) -> None:
    denied = access([], "", "127.0.0.1").admin(headers)
    assert denied is not None
    assert denied.status is HTTPStatus.FORBIDDEN


def test_without_keys_the_admin_api_is_closed_to_the_version_of_http_that_nginx_relays_in() -> None:
    """`proxy_pass http://127.0.0.1:8000` alone: no header says that somebody else calls."""
    here = access([], "", "127.0.0.1")
    for path in ("/kvmig/v1/instances", "/kvmig/"):
        assert here.denied("GET", path, HERE, "1.0") is not None
        assert here.denied("GET", path, HERE, "1.1") is None
    assert here.denied("POST", "/v1/completions", HERE, "1.0") is None
    for keyed in (access(["key"], "", "127.0.0.1"), access([], "key", "127.0.0.1")):
        assert keyed.denied("GET", path, {"authorization": "Bearer key"}, "1.0") is None
    assert access([], "", "/run/model.sock").denied("GET", path, {}, "1.0") is None


def test_the_apis_keys_open_the_admin_api_from_anywhere() -> None:
    rules = access(["one", "two"], "", "0.0.0.0")
    for rule in (rules.admin, rules.openai):
        assert rule({"authorization": "Bearer two"}) is None
        denied = rule({"authorization": "Bearer three"})
        assert denied is not None
        assert denied.status is HTTPStatus.UNAUTHORIZED


def test_with_an_admin_key_the_apis_keys_are_not_enough() -> None:
    rules = access(["tenant"], "operator", "0.0.0.0")
    assert rules.openai({"authorization": "Bearer tenant"}) is None
    assert rules.admin({"authorization": "Bearer tenant"}) is not None
    assert rules.admin({"authorization": "Bearer operator"}) is None


OPERATORS = [
    ("POST", "/v1/load_lora_adapter"), ("POST", "/sleep"), ("POST", "/collective_rpc"),
    ("POST", "/inference/v1/abort_requests"), ("POST", "/pause"), ("DELETE", "/v1/anything"),
    ("POST", "/scale_elastic_ep"), ("POST", "/reset_prefix_cache"),
]  # fmt: skip
CLIENTS = [
    ("POST", "/v1/chat/completions"), ("GET", "/v1/models"),
    ("POST", "/score"), ("GET", "/v1/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel"),
]  # fmt: skip
OPERATOR, TENANT = ({"authorization": f"Bearer {one}"} for one in ("operator", "tenant"))


@pytest.mark.parametrize("keys", [["tenant"], []])
@pytest.mark.parametrize(("method", "path"), OPERATORS)
def test_what_an_engine_has_beside_clients_routes_is_for_the_admin_key_alone(
    method: str, path: str, keys: list[str]
) -> None:
    rules = access(keys, "operator", "0.0.0.0")
    assert rules.denied(method, path, TENANT) is not None
    assert rules.denied(method, path, OPERATOR) is None


@pytest.mark.parametrize(("method", "path"), CLIENTS)
def test_clients_routes_are_for_the_apis_keys(method: str, path: str) -> None:
    rules = access(["tenant"], "operator", "0.0.0.0")
    assert rules.denied(method, path, TENANT) is None
    assert rules.denied(method, path, OPERATOR) is not None


@pytest.mark.parametrize(("method", "path"), [*OPERATORS, *CLIENTS])
def test_without_an_admin_key_the_apis_keys_open_all(method: str, path: str) -> None:
    assert access(["tenant"], "", "0.0.0.0").denied(method, path, TENANT) is None


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("body", [{"content-length": "9"}, {"transfer-encoding": "chunked"}])
def test_a_call_with_a_body_needs_a_key_on_every_path(method: str, body: dict[str, str]) -> None:
    rules = access(["tenant"], "", "0.0.0.0")
    assert rules.denied(method, "/health", {"content-length": "0"}) is None
    assert rules.denied(method, "/health", body) is not None
    assert rules.denied(method, "/health", TENANT | body) is None


def test_keys_come_from_vllms_variable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    assert api_keys(None) == ["secret"]
    assert api_keys(["flag"]) == ["flag"]
    monkeypatch.delenv(API_KEY_VARIABLE)
    assert api_keys(None) == api_keys([""]) == []


def test_children_do_not_inherit_what_the_launcher_was_told() -> None:
    environment = {"KVMIG_SECRET": "0123456789abcdef", "PATH": "/bin"}
    assert cluster_secret(environment) == b"0123456789abcdef"
    assert environment == {"PATH": "/bin"}


def test_a_secret_that_can_be_guessed_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="KVMIG_SECRET has 5 bytes, must have 16 or more"):
        cluster_secret({"KVMIG_SECRET": "short"})
    assert cluster_secret({}) != cluster_secret({}), "made up for each run"


def test_what_prints_a_launch_document_shows_no_secret() -> None:
    secret, config = os.urandom(32), ClusterConfig()
    launches: list[msgspec.Struct] = [
        LlumletLaunch(cluster="c", instance="i0", secret=secret, config=config, engine_argv=[]),
        SchedulerLaunch(secret, config),
        FrontLaunch(
            name="f", launcher="tcp://x", secret=secret, admin_key="operator", config=config,
            engine_argv=["--api-key", "tenant"],
        ),
    ]  # fmt: skip
    for launch in launches:
        shown = f"{launch!r} {launch} {[launch]}"
        assert repr(secret)[2:-1] not in shown
        assert "operator" not in shown
        assert "tenant" not in shown


@pytest.mark.parametrize("transport", IN_THE_CLEAR)
def test_blocks_go_in_the_clear_only_where_the_network_is_trusted(transport: Transport) -> None:
    with pytest.raises(ConfigError, match=f"--transport is {transport}, must be .*trust-network"):
        check(ClusterConfig(migration=MigrationConfig(transport=transport)))
    check(ClusterConfig(migration=MigrationConfig(transport=transport, trust_network=True)))


def test_auto_takes_no_offer_in_the_clear_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "has_rdma", lambda: True)
    with pytest.raises(TransportError, match="nixl: this side takes encrypted ones only"):
        open_offer([TransportOffer("nixl", "{}")], "auto", TransportSite(trusted=False))
    pools = open_staging("auto", "test", "i0", 1, 4096, TransportSite(trusted=False))
    try:
        assert "nixl" not in pools
    finally:
        for pool in pools.values():
            pool.close()
