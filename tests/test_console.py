"""The command `kvmig`, over the server's API."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from kvmig.accounts.keys import Keys
from kvmig.console import app as console
from kvmig.console.client import KEY, Client
from kvmig.fleet import init
from kvmig.fleet.api import Backend, make_app
from kvmig.fleet.memory import Memory
from kvmig.fleet.models import Models
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import Spec
from kvmig.fleet.store import Store
from tests.fleet_stores import Place


class Kvmig:
    """The command, with a server that has a store and nothing that runs."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder

    def __call__(self, *words: str) -> str:
        """What it prints."""
        done = CliRunner().invoke(console.app, words)
        assert done.exit_code == 0, done.output
        return done.output

    def refused(self, *words: str, status: int = 1) -> str:
        """The sentence, where it fails. status: 2 if the server wasn't asked."""
        done = CliRunner().invoke(console.app, words)
        assert done.exit_code == status, done.output
        assert done.output.count("\n") == 1
        return done.output

    def add_model(self, name: str = "qwen") -> None:
        self("model", "add", name, f"path:{self.folder}", "--engine", "toy")

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))["data"]


@pytest.fixture
def kvmig(sqlite_place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kvmig]:
    store = Store(sqlite_place.url, sqlite_place.folder / "pepper")
    settings = FleetSettings(data=str(sqlite_place.folder))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(store.open).result()

        async def changed() -> None:
            return

        async def fine(_: Spec) -> None:
            return

        async def metrics() -> bytes:
            return b""

        models = Models(settings, lambda _: None, lambda _, __: 0, Memory())
        keys = Keys(b"")
        backend = Backend(settings, store, thread, models, changed, fine, lambda: keys, metrics)
        client = Client("unused")
        with TestClient(make_app(backend)) as http:
            monkeypatch.setattr(client, "_http", http)
            monkeypatch.setattr(console.Where, "client", lambda _: client)
            yield Kvmig(store, sqlite_place.folder)
        thread.submit(store.close).result()


def test_an_alias_is_set_and_removed(kvmig: Kvmig) -> None:
    kvmig.add_model("qwen")
    kvmig.add_model("next")
    kvmig("alias", "set", "canary", "qwen=90", "next=10")
    kvmig("alias", "set", "best", "qwen")
    assert kvmig.json("alias", "ls") == {"best": {"qwen": 1}, "canary": {"next": 10, "qwen": 90}}
    assert "next=10, qwen=90" in kvmig("alias", "ls")
    kvmig("alias", "rm", "canary")
    assert kvmig.json("alias", "ls") == {"best": {"qwen": 1}}


def test_a_wrong_weight_is_named(kvmig: Kvmig) -> None:
    sentence = kvmig.refused("alias", "set", "best", "qwen=much", status=2)
    assert sentence == "kvmig: the weight of qwen is 'much', must be a whole number\n"
    assert "'qwen' is no model" in kvmig.refused("alias", "set", "best", "qwen")


def test_a_model_is_switched_off_and_on(kvmig: Kvmig) -> None:
    kvmig.add_model()
    kvmig("model", "off", "qwen")
    assert [one["on"] for one in kvmig.json("model", "ls")] == [False]
    assert "model qwen is off" in kvmig.refused("model", "wake", "qwen")
    kvmig("model", "on", "qwen")
    assert [one["on"] for one in kvmig.json("model", "ls")] == [True]


def test_a_key_is_given_limits_and_they_are_changed(kvmig: Kvmig) -> None:
    kvmig("user", "add", "bea")
    shown = kvmig("key", "add", "bea", "--rpm", "60", "--quota", "10000", "--period", "day")
    prefix = shown.split("-")[1]
    assert "rpm 60, quota" in " ".join(kvmig("key", "ls").split())
    assert (
        kvmig("key", "limit", prefix, "--rpm", "0", "--tpm", "500") == "tpm 500, quota 10000/day\n"
    )
    assert kvmig("key", "limit", prefix, "--tpm=0", "--quota=0") == "no limits\n"
    assert "rpm is -1, must be 1 to" in kvmig.refused("key", "limit", prefix, "--rpm=-1")


def test_a_users_limits_are_changed_one_by_one(kvmig: Kvmig) -> None:
    kvmig("user", "add", "bea")
    assert kvmig("user", "limit", "bea", "--quota", "9", "--period", "day") == "quota 9/day\n"
    assert kvmig("user", "limit", "bea", "--rpm", "5") == "rpm 5, quota 9/day\n"
    assert "rpm 5, quota 9/day" in " ".join(kvmig("user", "ls").split())
    assert "quota is -1, must be 1 to" in kvmig.refused("user", "limit", "bea", "--quota=-1")
    assert kvmig("user", "limit", "bea", "--rpm=0", "--quota=0") == "no limits\n"


def test_quotas_of_models_are_given_and_taken_away(kvmig: Kvmig) -> None:
    kvmig.add_model()
    kvmig("user", "add", "bea")
    shown = kvmig("key", "add", "bea", "--model-quota", "qwen=500/day")
    prefix = shown.split("-")[1]
    assert "quota of qwen 500/day" in " ".join(kvmig("key", "ls").split())
    assert kvmig("key", "limit", prefix, "--model-quota=qwen=7") == "quota of qwen 7/month\n"
    assert kvmig("key", "limit", prefix, "--model-quota=qwen=0") == "no limits\n"
    assert kvmig("user", "limit", "bea", "--model-quota=qwen=5/total", "--rpm=2") == (
        "rpm 2, quota of qwen 5/total\n"
    )


@pytest.mark.parametrize(
    ("given", "sentence", "status"),
    [
        ("qwen", "--model-quota is 'qwen', must be MODEL=TOKENS or MODEL=TOKENS/PERIOD", 2),
        ("qwen=many", "--model-quota is 'qwen=many', must be MODEL=TOKENS", 2),
        ("qwen=-1", "quotas: 'qwen' is -1, must be 1 to", 1),
        ("other=5", "quotas: 'other' is no model, must be one of the catalogue", 1),
    ],
)
def test_a_quota_that_can_not_be_kept_is_refused(
    kvmig: Kvmig, given: str, sentence: str, status: int
) -> None:
    kvmig.add_model()
    kvmig("user", "add", "bea")
    assert sentence in kvmig.refused("user", "limit", "bea", "--model-quota", given, status=status)


def test_a_user_is_disabled_and_enabled(kvmig: Kvmig) -> None:
    kvmig("user", "add", "anna", "--role", "admin")
    kvmig("user", "add", "bea")
    kvmig("user", "set", "bea", "--disable")
    assert [one["disabled"] for one in kvmig.json("user", "ls")] == [False, True]
    assert "disabled" in kvmig("user", "ls")
    kvmig("user", "set", "bea", "--enable", "--role", "admin")
    assert [(one["role"], one["disabled"]) for one in kvmig.json("user", "ls")] == [
        ("admin", False), ("admin", False),
    ]  # fmt: skip
    assert "no user 'carl'" in kvmig.refused("user", "set", "carl", "--disable")


def test_a_key_is_made_rotated_and_revoked(kvmig: Kvmig) -> None:
    kvmig.add_model()
    kvmig("user", "add", "bea")
    key = kvmig("key", "add", "bea", "--name", "laptop", "--model", "qwen", "--days", "2").strip()
    _, prefix, _ = key.split("-", 2)
    other = kvmig("key", "rotate", prefix, "--keep", "60").strip()
    old, new = kvmig.json("key", "ls")
    assert (old["prefix"], new["prefix"]) == (prefix, other.split("-", 2)[1])
    assert old["terms"]["expires"] < new["terms"]["expires"]
    kvmig("key", "revoke", new["prefix"])
    assert [bool(one["revoked_at"]) for one in kvmig.json("key", "ls")] == [False, True]
    assert "has been revoked" in kvmig.refused("key", "revoke", new["prefix"])
    assert key not in kvmig("key", "ls")


def test_a_name_that_looks_like_markup_is_shown_as_it_is(kvmig: Kvmig) -> None:
    kvmig("user", "add", "bea")
    kvmig("key", "add", "bea", "--name", "[/bold]")
    assert "[/bold]" in kvmig("key", "ls")


def test_the_audit_is_shown(kvmig: Kvmig) -> None:
    kvmig("user", "add", "bea")
    kvmig.add_model()
    assert [one["action"] for one in kvmig.json("audit")] == ["model.add", "user.add"]
    assert [one["object"] for one in kvmig.json("audit", "--limit", "1")] == ["qwen"]
    assert "user.add" in kvmig("audit")


def test_a_file_is_applied(kvmig: Kvmig) -> None:
    file = kvmig.folder / "fleet.yaml"
    (kvmig.folder / "weights").mkdir()
    file.write_text("models: [{name: qwen, source: 'path:weights', engine: toy}]")
    assert "add" in kvmig("apply", str(file), "--dry-run")
    assert kvmig.json("model", "ls") == []
    kvmig("apply", str(file))
    (row,) = kvmig.json("model", "ls")
    assert row["spec"]["source"] == f"path:{kvmig.folder}/weights"
    file.write_text("models: []")
    kvmig("apply", str(file), "--prune")
    assert kvmig.json("model", "ls") == []


@pytest.mark.parametrize(
    ("text", "sentence", "status"),
    [
        ("models: [{name: a, name: b}]", "can't be used: line 1: 'name' is there twice", 2),
        ("models: [", "can't be used: it is no plain YAML", 2),
        ("modles: []", "must be `models:` and `aliases:`", 1),
        ("", "the file holds None", 1),
    ],
)
def test_a_wrong_file_is_one_sentence(kvmig: Kvmig, text: str, sentence: str, status: int) -> None:
    file = kvmig.folder / "fleet.yaml"
    file.write_text(text)
    assert sentence in kvmig.refused("apply", str(file), status=status)


def test_a_file_that_is_not_there_is_named(kvmig: Kvmig) -> None:
    assert "can't be used" in kvmig.refused("apply", str(kvmig.folder / "nowhere"), status=2)


def test_a_backup_is_made(kvmig: Kvmig) -> None:
    kvmig("backup", str(kvmig.folder / "saved"))
    assert (kvmig.folder / "saved").stat().st_size > 0
    assert "is there already" in kvmig.refused("backup", str(kvmig.folder / "saved"))


UNIT = """[[units]]
name = "left"
memory_bytes = 1000
[[units.models]]
name = "qwen"
kv_bytes = 100
"""


def test_a_placement_is_refused_shown_and_removed(kvmig: Kvmig) -> None:
    file = kvmig.folder / "placement.toml"
    file.write_text(UNIT)
    sentence = "placement: model is 'qwen', which isn't in the catalogue"
    assert sentence in kvmig.refused("placement", "set", str(file), "--dry-run")
    assert kvmig("placement", "show").splitlines()[-1] == "none"
    kvmig("placement", "rm")


def test_units_without_a_name_are_shown_as_instances_are_told_of_them(
    kvmig: Kvmig, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = {"memory_bytes": 1000, "gpus": [2, 3], "models": [{"name": "qwen", "kv_bytes": 100}]}
    told = {"state": "reached", "why": "", "placement": {"units": [unit]}, "lines": ["took 2 s"]}
    monkeypatch.setattr(Client, "get", lambda *_: told)
    shown = [line.split() for line in kvmig("placement", "show").splitlines()]
    assert shown == [["unit", "models"], ["0:2,3", "qwen"], ["took", "2", "s"], ["reached"]]


def test_a_placement_that_is_no_toml_is_named(kvmig: Kvmig) -> None:
    file = kvmig.folder / "placement.toml"
    file.write_text("units:")
    refused = kvmig.refused("placement", "set", str(file), status=2)
    assert f"{file} can't be read: " in refused


EVENTS = """: model count is starting, 12 s so far

data: {"choices": [{"delta": {"content": "four "}}]}

data: {"choices": [{"delta": {"content": "five"}}]}

data: [DONE]

"""


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Bodies of what the door was asked, which answers all of them alike."""
    asked: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, text=EVENTS)

    http = httpx.Client(base_url="http://door", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", lambda **_: http)
    monkeypatch.setattr(console.Where, "admin_key", lambda _: "kvmig_key")
    return asked


def test_a_chat_shows_that_a_cold_model_starts(answering: list[Any]) -> None:
    done = CliRunner().invoke(console.app, ["--url", "http://door", "chat", "count", "three"])
    assert (done.stdout, done.stderr) == ("four five\n", "model count is starting, 12 s so far\n")


def test_a_chat_takes_its_lines_from_a_pipe(answering: list[Any]) -> None:
    words = ["--url", "http://door", "chat", "count"]
    done = CliRunner().invoke(console.app, words, input="three\nsix\n")
    assert done.stdout == "four five\nfour five\n"
    said = [one["content"] for one in answering[-1]["messages"]]
    assert said == ["three", "four five", "six"]


def test_models_processes_get_no_password_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str | None, str | None]] = []

    def up(settings: FleetSettings) -> int:
        seen.append((settings.database, os.environ.get(console.DATABASE), os.environ.get(KEY)))
        return 0

    monkeypatch.setattr(init, "up", up)
    environment = {console.DATABASE: "postgresql+psycopg://a:b@c/d", KEY: "kv-x"}
    done = CliRunner().invoke(console.app, [f"--data={tmp_path}", "up"], env=environment)
    assert done.exit_code == 0, done.output
    assert seen == [("postgresql+psycopg://a:b@c/d", None, None)]
