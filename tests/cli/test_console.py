"""The command `kvmig`, over the server's API."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from starlette.testclient import TestClient
from typer.testing import CliRunner

from kvmig import __version__
from kvmig.accounts.keys import KeyIndex
from kvmig.cli import app as console
from kvmig.cli import chat
from kvmig.cli.client import KEY, CallFailure, FleetClient
from kvmig.cli.common import day_of
from kvmig.cli.models import suggestion_text
from kvmig.cli.names import KnownModel, known_model
from kvmig.cli.placement_rates import loads_of, models_file, seconds_of
from kvmig.core.errors import ConfigError
from kvmig.fleet import supervisor
from kvmig.fleet.api import ApiBackend, make_app
from kvmig.fleet.catalogue import CatalogueReader
from kvmig.fleet.controller import ModelController
from kvmig.fleet.host_memory import MemoryBudget
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.store import FleetStore
from kvmig.placement.problem import ModelLoad, models_of
from tests.support.fleet_stores import Place, idle_files
from tests.support.gguf_files import LLAMA, gguf_file

COMMAND_LINE = functools.cache(typer.main.get_command)
"""Made once, as in a process of the command: that takes longer than most calls do."""


@pytest.fixture(autouse=True)
def made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.testing._get_command", COMMAND_LINE)


class Kvmig:
    """The command, with a server that has a store and nothing that runs."""

    def __init__(self, store: FleetStore, folder: Path) -> None:
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
    store = FleetStore(sqlite_place.url, sqlite_place.folder / "pepper")
    settings = FleetSettings(data=str(sqlite_place.folder))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(store.open).result()

        async def changed() -> None:
            return

        async def fine(_: ModelSpec, sizes: bool) -> None:
            return

        async def metrics() -> bytes:
            return b""

        models = ModelController(settings, lambda _: None, lambda _, __: 0, MemoryBudget())
        keys = KeyIndex(b"")
        files = idle_files(settings, store, lambda *args: backend.stored(*args))
        known = CatalogueReader("", time.monotonic)
        backend = ApiBackend(
            settings, store, thread, models, changed, fine, lambda: keys, metrics, files, known
        )
        client = FleetClient("unused")
        with TestClient(make_app(backend)) as http:
            monkeypatch.setattr(client, "_http", http)
            monkeypatch.setattr(console.FleetAddress, "client", lambda _: client)
            yield Kvmig(store, sqlite_place.folder)
        thread.submit(store.close).result()


def test_top_needs_a_terminal(kvmig: Kvmig) -> None:
    assert "`kvmig top` needs a terminal; with --json" in kvmig.refused("top", status=2)


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
    classes = ("--class", "low", "--class", "normal")
    options = ("--name", "laptop", "--model", "qwen", "--days", "2", *classes)
    key = kvmig("key", "add", "bea", *options).strip()
    _, prefix, _ = key.split("-", 2)
    other = kvmig("key", "rotate", prefix, "--keep", "60").strip()
    new, old = kvmig.json("key", "ls")  # the newest first
    assert (old["prefix"], new["prefix"]) == (prefix, other.split("-", 2)[1])
    assert old["terms"]["expires"] < new["terms"]["expires"]
    assert new["terms"]["classes"] == ["low", "normal"]
    assert "classes" in kvmig("key", "ls")
    kvmig("key", "revoke", new["prefix"])
    assert [bool(one["revoked_at"]) for one in kvmig.json("key", "ls")] == [False, True]
    assert "has been revoked" in kvmig.refused("key", "revoke", new["prefix"])
    assert key not in kvmig("key", "ls")


def commands(group: Any, *names: str) -> Iterator[tuple[str, ...]]:
    """Names of all commands, by the words that call them."""
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, *names, name)
        else:
            yield (*names, name)


EVERY = sorted(commands(typer.main.get_command(console.app)))


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_but_those_that_serve_takes_json(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(console.app, [*words, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert ("--json" in done.output) == (words not in (("up",), ("mirror",)))


def test_orders_answer_with_json(kvmig: Kvmig) -> None:
    kvmig.add_model()
    assert json.loads(kvmig("model", "off", "qwen", "--json"))["on"] is False
    assert json.loads(kvmig("model", "show", "qwen", "--json"))["revisions"]
    assert json.loads(kvmig("alias", "set", "best", "qwen", "--json"))["targets"] == {"qwen": 1}
    kvmig("user", "add", "bea")
    assert json.loads(kvmig("key", "add", "bea", "--json")).keys() == {"key", "prefix"}


def test_a_model_is_shown_for_people(kvmig: Kvmig) -> None:
    kvmig.add_model()
    shown = kvmig("model", "show", "qwen")
    assert shown.splitlines()[0] == "qwen"
    assert f"source      path:{kvmig.folder}" in shown
    assert "revisions" not in shown


DECISION = {
    "strategy": "spread", "need_bytes": 7, "gpus": 2, "gpu_bytes": 40,
    "nodes": [
        {"node": "w1", "chosen": True, "gpus": ["GPU 0", "GPU 1"], "score": 98.333333,
         "strategy_score": 93.333333, "locality": 5.0, "refusals": []},
        {"node": "w2", "chosen": False, "gpus": [], "score": 0, "strategy_score": 0, "locality": 0,
         "refusals": [{"filter": "cordon", "why": "it is cordoned"},
                      {"filter": "memory", "why": "memory: needs 7 bytes, 3 of 9 are free"}]},
    ],
}  # fmt: skip
MOVES = {
    "seconds": 6.2, "moves": [
        {"model": "c", "instance": "i0", "node": "w1", "gpus": ["GPU 0"], "to_node": "w2",
         "to_gpus": ["GPU 3"], "load_bytes": 7, "move_bytes": 2},
    ],
}  # fmt: skip
LINES = """\
it needs 7 bytes of memory and 40 bytes of each of 2 GPUs that reach each other; spread over the \
emptiest
  w1: 98.33 (93.33, and 5 for its files there), on GPU 0, GPU 1, chosen
  w2: refused
    cordon: it is cordoned
    memory: memory: needs 7 bytes, 3 of 9 are free
"""


def test_why_an_instance_is_where_it_is_and_why_a_model_is_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get(_: FleetClient, path: str, **query: str) -> object:
        asked.append((path, query))
        if path.startswith("why-not/"):
            return {"state": "waiting", "why": "no room", "moves": MOVES, "moving": []} | DECISION
        kept = DECISION if query["instance"] == "i0" else None
        return {
            "instance": query["instance"], "worker": "w1", "gpus": ["GPU 0", "GPU 1"],
            "at": 0.0 if kept else None, "decision": kept,
        }  # fmt: skip

    asked: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(FleetClient, "get", get)

    def shown(*words: str) -> str:
        return CliRunner().invoke(console.app, words).output

    first = "a/b/i0 is on worker w1, on GPU 0, GPU 1 since 1970-01-01 00:00:00+00:00\n"
    assert shown("instance", "why", "a/b/i0") == first + LINES
    assert shown("instance", "why", "a/b/i1") == (
        "a/b/i1 is on worker w1, on GPU 0, GPU 1; why is not kept: an earlier server started it\n"
    )
    assert shown("model", "why-not", "a/b") == (
        f"a/b is waiting (no room); another instance finds a worker\n{LINES}"
        "moves of other models would make room in about 6 s:\n"
        "  c/i0: from w1, GPU 0 to w2, GPU 3; 7 bytes are loaded, 2 move\n"
    )
    assert asked == [
        ("why/a/b", {"instance": "i0"}), ("why/a/b", {"instance": "i1"}), ("why-not/a/b", {}),
    ]  # fmt: skip
    assert (
        "must be MODEL/INSTANCE"
        in CliRunner().invoke(console.app, ["instance", "why", "i0"]).output
    )


def test_labels_of_workers_and_the_strategy_are_given_when_a_model_is_added(kvmig: Kvmig) -> None:
    kvmig(
        "model", "add", "a", f"path:{kvmig.folder}", "--worker-selector", "os=linux",
        "--worker-selector", "worker=local", "--placement-strategy", "pack",
    )  # fmt: skip
    (row,) = kvmig.json("model", "ls")
    assert row["spec"]["worker_selector"] == {"os": "linux", "worker": "local"}
    assert row["spec"]["placement_strategy"] == "pack"
    assert "workers     os=linux, worker=local" in kvmig("model", "show", "a")
    add = ("model", "add", "b", f"path:{kvmig.folder}", "--worker-selector")
    assert "--worker-selector is 'os', must be LABEL=VALUE" in kvmig.refused(*add, "os", status=2)
    twice = kvmig.refused(*add, "os=linux", "--worker-selector", "os=x", status=2)
    assert "--worker-selector is 'os=x', is there twice" in twice


def test_a_models_flags_are_changed(kvmig: Kvmig) -> None:
    kvmig.add_model()
    kvmig("model", "set", "qwen", "--flags", "--max-model-len 8192", "--zero-after", "7")
    (row,) = kvmig.json("model", "ls")
    assert row["spec"]["flags"] == ["--max-model-len", "8192"]
    assert (row["spec"]["instances"]["zero_after_s"], row["revision"]) == (7, 2)


def test_a_change_is_refused_that_would_undo_what_came_while_its_flags_were_checked(
    kvmig: Kvmig, monkeypatch: pytest.MonkeyPatch
) -> None:
    kvmig.add_model()
    post = FleetClient.post

    def post_late(client: FleetClient, path: str, body: Any = None) -> Any:
        if path == "apply":
            kvmig("model", "scale", "qwen", "--min", "0", "--max", "4")
        return post(client, path, body)

    monkeypatch.setattr(FleetClient, "post", post_late)
    said = kvmig.refused("model", "set", "qwen", "--zero-after", "60")
    assert "has revision 2 by" in said
    assert "this order was made from revision 1: instances" in said
    (row,) = kvmig.json("model", "ls")
    assert row["spec"]["instances"]["max"] == 4


def test_why_a_model_failed_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "name": "count", "state": "failed", "serving": 0, "running": 0, "held": 0, "revision": 1,
        "why": "the model's start failed: " + "a long sentence " * 9,
        "spec": {"instances": {"min": 0, "max": 1}},
    }  # fmt: skip
    monkeypatch.setattr(FleetClient, "get", lambda *_: {"data": [row]})
    done = CliRunner().invoke(console.app, ["model", "ls"], env={"COLUMNS": "80"})
    assert len(done.output.splitlines()) == 3
    assert done.output.splitlines()[2] == f"count: {row['why']}"


def test_a_row_is_a_line_where_no_terminal_shows_it(
    kvmig: Kvmig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvmig model ls | grep NAME` would find a part of a name."""
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "meta/" + "long" * 25
    kvmig.add_model(name)
    _, row = kvmig("model", "ls").splitlines()
    assert row.split()[:2] == [name, "zero"]


def test_the_fleet_at_a_glance_is_in_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"address": "http://x", "memory_bytes": 25276502016, "claimed_bytes": 1500}
    monkeypatch.setattr(FleetClient, "get", lambda *_: told)
    shown = CliRunner().invoke(console.app, ["status"]).output
    assert "memory 25.3 GB" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("text", "day"),
    [("today", "2026-11-26"), ("yesterday", "2026-11-25"), ("7d", "2026-11-19"), ("", "")],
)
def test_a_day_may_be_said_from_today(text: str, day: str) -> None:
    assert day_of("--since", text, date(2026, 11, 26)) == day


def test_a_day_that_is_none_is_refused_with_the_forms_of_one(kvmig: Kvmig) -> None:
    assert kvmig.refused("usage", "--since", "monday", status=2) == (
        "kvmig: --since is 'monday', must be a day (UTC) such as 2026-11-01, today,"
        " yesterday, or 7d for seven days ago\n"
    )
    assert kvmig("usage", "--since", "yesterday", "--until", "today")


def test_old_calls_are_deleted_from_the_ledger(kvmig: Kvmig) -> None:
    today = datetime.now(UTC).date()
    day = (today - timedelta(days=90)).isoformat()
    for words in (("--keep-days", "90"), ("--before", "90d"), ("--before", day)):
        shown = kvmig("usage", "prune", *words)
        assert shown == f"deleted the records of 0 calls before {day}\n"
    assert json.loads(kvmig("usage", "prune", "--before", day, "--json"))["rows"] == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "prune takes either --keep-days or --before"),
        (("--keep-days", "3", "--before", "9d"), "prune takes either --keep-days"),
        (("--keep-days", "0"), "--keep-days is 0, must be 1 to 9999"),
        (("--before", "monday"), "--before is 'monday', must be a day"),
    ],
)
def test_which_calls_are_deleted_is_said_in_one_way(
    kvmig: Kvmig, words: tuple[str, ...], sentence: str
) -> None:
    assert kvmig.refused("usage", "prune", *words, status=2).startswith(f"kvmig: {sentence}")


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(console.app, ["--version"]).output == f"kvmig {__version__}\n"


@pytest.mark.parametrize("url", ["http://door:8080/v1", "http://door:8080/kvmig/v2"])
def test_a_url_with_a_path_too_much_is_refused(url: str) -> None:
    done = CliRunner().invoke(console.app, ["--url", url, "status"])
    assert (done.exit_code, done.output) == (
        2, f"kvmig: --url is {url!r}, must be the fleet's address without a path: http://door:8080\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    "url",
    ["door", "ftp://door", "http://", "http://:8080", "http://[door", "http://door:port",
     "http://door:99999", "http://do\x07or"],
)  # fmt: skip
def test_a_url_that_is_none_is_refused_in_one_sentence(url: str) -> None:
    done = CliRunner().invoke(console.app, ["--url", url, "status"])
    said = f"kvmig: --url is {url!r}, must be of the form http://HOST:PORT\n"
    assert (done.exit_code, done.output) == (2, said)


@pytest.mark.parametrize("key", ["kv\u2011abc", "kv-a\nb"])
def test_a_key_that_no_header_takes_is_refused_and_not_shown(key: str) -> None:
    done = CliRunner().invoke(console.app, ["--url", "http://door", "--key", key, "status"])
    said = "kvmig: --key has characters that are in no key: copy it again\n"
    assert (done.exit_code, done.output) == (2, said)


def test_words_of_the_shell_that_are_no_text_are_named(kvmig: Kvmig) -> None:
    said = kvmig.refused("model", "add", "a", "path:/odd\udcff", "--engine", "toy", status=2)
    assert "/odd\\udcff" in said
    assert said.endswith("has bytes that are not UTF-8\n")


def asked_at(
    monkeypatch: pytest.MonkeyPatch, answer: httpx.Response, *words: str
) -> tuple[int, str]:
    """Exit code and output of a command whose server answers so."""
    http = httpx.Client(base_url="http://door", transport=httpx.MockTransport(lambda _: answer))
    monkeypatch.setattr(httpx, "Client", lambda **_: http)
    done = CliRunner().invoke(console.app, ["--url", "http://door", "--key", "kv-x", *words])
    return done.exit_code, done.output


def test_a_door_of_another_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    page = httpx.Response(200, html="<p>hi</p>")
    status, said = asked_at(monkeypatch, page, "model", "ls")
    kind = "'text/html; charset=utf-8'"
    sentence = f"kvmig: http://door is no fleet: it answers with {kind} in place of JSON\n"
    assert (status, said) == (1, sentence)


@pytest.mark.parametrize("words", [("model", "ls"), ("chat", "qwen", "hi")])
def test_a_door_that_leads_elsewhere_is_named(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """A chat would end without an answer, as if all were well."""
    moved = httpx.Response(301, headers={"location": "https://door/?token=x"})
    status, said = asked_at(monkeypatch, moved, *words)
    there = "'https://door/?token=***'"
    sentence = f"http://door leads to {there}: give the fleet's own address as --url"
    assert (status, said) == (1, f"kvmig: {sentence}\n")


def test_a_door_that_wants_a_key_says_how_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = httpx.MockTransport(lambda _: httpx.Response(401, json={"error": {"message": "no"}}))
    http = httpx.Client(base_url="http://door", transport=refusing)
    monkeypatch.setattr(httpx, "Client", lambda **_: http)
    monkeypatch.delenv(KEY, raising=False)
    done = CliRunner().invoke(console.app, ["--url", "http://door", "status"])
    sentence = "http://door requires a key: give --key, or set KVMIG_KEY"
    assert done.output == f"kvmig: {sentence}\n"
    done = CliRunner().invoke(console.app, ["--url", "http://door", "--key", "kv-x", "status"])
    assert done.output == "kvmig: no\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--keep-usage-days", "-1"], "--keep-usage-days is -1, must be 0 to 36500"),
        (["--memory", "5XB"], "--memory is '5XB' must be a number of B, or one with a unit"),
        (["--threads", "9999"], "--threads is 9999, must be 1 to"),
    ],
)
def test_what_a_fleet_can_not_have_of_the_machine_is_refused(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    done = CliRunner().invoke(console.app, [f"--data={tmp_path}", "up", *words])
    assert done.exit_code == 2
    assert sentence in done.output


def test_memory_is_given_with_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def up(settings: FleetSettings) -> int:
        seen.append(settings.memory)
        return 0

    monkeypatch.setattr(supervisor, "up", up)
    CliRunner().invoke(console.app, [f"--data={tmp_path}", "up", "--memory", "5GB"])
    assert seen == [5_000_000_000]


def test_an_interrupt_stops_a_chats_answer_and_the_next_one_goes_on(
    answering: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(_: FleetClient, path: str, body: Any) -> Iterator[str]:
        yield 'data: {"choices": [{"delta": {"content": "four"}}]}'
        if len(body["messages"]) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(FleetClient, "stream", lines)
    words = ["--url", "http://door", "chat", "count"]
    done = CliRunner().invoke(console.app, words, input="three\nsix\n")
    assert (done.exit_code, done.stdout) == (0, "four\nfour\n")
    done = CliRunner().invoke(console.app, [*words, "three"])
    assert (done.exit_code, done.stdout) == (130, "four\n")


def test_a_chat_prints_objects(answering: list[Any]) -> None:
    words = ["--url", "http://door", "chat", "count", "three", "--json"]
    done = CliRunner().invoke(console.app, words)
    assert json.loads(done.stdout) == {
        "role": "assistant", "content": "four five", "stopped": False,
    }  # fmt: skip


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
    told = {
        "state": "reached", "why": "", "placement": {"units": [unit]}, "lines": ["took 2 s"],
        "rates": {}, "planned": {}, "replan": "",
    }  # fmt: skip
    monkeypatch.setattr(FleetClient, "get", lambda *_: told)
    shown = [line.split() for line in kvmig("placement", "show").splitlines()]
    assert shown == [["unit", "models"], ["0:2,3", "qwen"], ["took", "2", "s"], ["reached"]]
    told |= {"rates": {"qwen": 2.5}, "planned": {"qwen": 1.0}, "replan": "not worth it"}
    assert kvmig("placement", "show").splitlines()[-3:] == [
        "qwen: 2.50 requests per second, planned for 1.00", "not worth it", "reached",
    ]  # fmt: skip


def test_a_placements_models_and_costs_are_given_together(kvmig: Kvmig) -> None:
    file, models = kvmig.folder / "placement.toml", kvmig.folder / "models.toml"
    file.write_text(UNIT)
    models.write_text("[[models]]\nname = 'qwen'\nmodel = 'llama-7b'\nrate = 1\n")
    order = ("placement", "set", str(file), "--models", str(models))
    assert "--models and --costs must both be given" in kvmig.refused(*order, status=2)
    device = kvmig.refused(*order, "--costs", "abacus", status=2)
    assert "device is 'abacus', must be a100-80g or a .toml file" in device


def used(model: str, calls: int, prompt: int = 0, output: int = 0) -> dict[str, Any]:
    return {"model": model, "calls": calls, "prompt": prompt, "output": output, "cached": 0}


def test_rates_and_lengths_of_calls_are_a_models_file() -> None:
    loads = loads_of([used("b", 50, 5000, 0), used("a", 100, 1600, 800), used("c", 0)], 200.0)
    assert loads == [
        ModelLoad("a", "a", 0.5, 16.0, 8.0), ModelLoad("b", "b", 0.25, 100.0, 1.0),
    ]  # fmt: skip
    assert models_of(models_file(loads), "text") == loads


def test_days_without_a_call_have_no_rates(kvmig: Kvmig) -> None:
    assert "no model had calls in these days" in kvmig.refused("placement", "rates", status=2)


def test_the_seconds_of_days_end_now() -> None:
    noon = datetime(2026, 11, 2, 12, tzinfo=UTC).timestamp()
    assert seconds_of("2026-11-01", "2026-11-02", noon) == 1.5 * 86400
    assert seconds_of("2026-10-01", "2026-10-01", noon) == 86400
    with pytest.raises(ConfigError, match="--since is 2026-11-03, must be a day until 2026-11-02"):
        seconds_of("2026-11-03", "2026-11-02", noon)


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
    monkeypatch.setattr(console.FleetAddress, "admin_key", lambda _: "kvmig_key")
    return asked


def test_a_chat_shows_that_a_cold_model_starts(answering: list[Any]) -> None:
    done = CliRunner().invoke(console.app, ["--url", "http://door", "chat", "count", "three"])
    assert (done.stdout, done.stderr) == ("four five\n", "model count is starting, 12 s so far\n")


def test_a_chat_takes_all_lines_of_a_pipe_that_ask_something(answering: list[Any]) -> None:
    words = ["--url", "http://door", "chat", "count"]
    done = CliRunner().invoke(console.app, words, input="three\n\n  \nsix\n")
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

    monkeypatch.setattr(supervisor, "up", up)
    environment = {console.DATABASE: "postgresql+psycopg://a:b@c/d", KEY: "kv-x"}
    done = CliRunner().invoke(console.app, [f"--data={tmp_path}", "up"], env=environment)
    assert done.exit_code == 0, done.output
    assert seen == [("postgresql+psycopg://a:b@c/d", None, None)]


@pytest.mark.parametrize("module", ["kvmig", "kvmig.cli.app"])
def test_a_module_with_the_command_does_what_the_command_does(module: str) -> None:
    words = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert __version__ in done.stdout


# -- models by name


def test_known_models_are_found_by_words(kvmig: Kvmig) -> None:
    assert [one["name"] for one in kvmig.json("model", "search", "gpt-oss", "120")] == [
        "gpt-oss:120b"
    ]
    (one,) = kvmig.json("model", "search", "llama3.2", "1b")
    assert one["source"] == "hf:meta-llama/Llama-3.2-1B-Instruct"
    assert "llama3.2:1b" in kvmig("model", "search", "llama3.2", "1b")


def test_files_are_pulled_by_a_known_name_listed_pinned_and_removed(kvmig: Kvmig) -> None:
    pulled = json.loads(kvmig("pull", "qwen3:0.6b", "--no-wait", "--json"))
    assert (pulled["source"], pulled["state"]) == ("hf:Qwen/Qwen3-0.6B", "wanted")
    kvmig("model", "files", "pin", "hf:Qwen/Qwen3-0.6B")
    (row,) = kvmig.json("model", "files", "ls")
    assert row["pinned"] is True
    assert "its files wait to be downloaded" in kvmig("model", "files", "ls")
    kvmig("model", "files", "unpin", "qwen3:0.6b")
    kvmig("model", "files", "rm", "hf:Qwen/Qwen3-0.6B")
    assert kvmig.json("model", "files", "ls") == []


def test_a_model_of_the_fleet_is_pulled_by_its_name(kvmig: Kvmig) -> None:
    kvmig("model", "add", "mine", "hf:org/small")
    pulled = json.loads(kvmig("pull", "mine", "--no-wait", "--json"))
    assert pulled["source"] == "hf:org/small"


def test_a_model_is_added_by_its_source_and_shows_its_files(kvmig: Kvmig) -> None:
    kvmig("model", "add", "small", "hf:org/small")
    row = kvmig.store.model("small")
    assert row.spec.source == "hf:org/small"


@pytest.mark.parametrize(
    ("words", "said", "status"),
    [
        (("run", "no-such-model"), "no model 'no-such-model' in this fleet or in its", 1),
        (("pull", "hf:a/b/c"), "source is 'hf:a/b/c', must be hf:ORG/NAME", 2),
        (("pull", "path:/models"), "which is on this disk already", 1),
        (("model", "files", "rm", "hf:a/b"), "there are no files of hf:a/b", 1),
        (("model", "add", "a", "ftp://a/b"), "no folder here", 1),
    ],
)
def test_what_is_no_model_or_source_is_refused(
    kvmig: Kvmig, words: tuple[str, ...], said: str, status: int
) -> None:
    assert said in kvmig.refused(*words, status=status)


def test_what_runs_is_listed_by_its_short_command(kvmig: Kvmig) -> None:
    kvmig.add_model()
    assert "qwen" not in kvmig("ps")
    assert "qwen" in kvmig("model", "ls")
    kvmig("rm", "qwen")
    assert "qwen" not in kvmig("model", "ls")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--tls-cert=a.pem"], "--tls-cert is 'a.pem', must be given together with --tls-key"),
        (["--tls-key=a.key"], "--tls-key is 'a.key', must be given together with --tls-cert"),
    ],
)
def test_a_certificate_and_its_key_are_given_together(
    tmp_path: Path, flags: list[str], sentence: str
) -> None:
    done = CliRunner().invoke(console.app, [f"--data={tmp_path}", "up", *flags])
    assert (done.exit_code, done.stderr) == (2, f"kvmig: {sentence}\n")


def test_a_model_that_has_failed_is_not_listed_among_those_that_run(
    kvmig: Kvmig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("busy", "broken"):
        kvmig.add_model(name)
    get, states = FleetClient.get, {"busy": "waiting", "broken": "failed"}

    def with_states(self: FleetClient, path: str, **query: Any) -> Any:
        found = get(self, path, **query)
        return {"data": [{**one, "state": states[one["name"]]} for one in found["data"]]}

    monkeypatch.setattr(FleetClient, "get", with_states)
    listed = kvmig("ps")
    assert "busy" in listed
    assert "broken" not in listed


def test_without_a_cluster_the_host_is_the_only_worker(kvmig: Kvmig) -> None:
    (one,) = kvmig.json("worker", "ls")
    assert (one["name"], one["state"], one["instances"]) == ("local", "ready", [])
    assert "local" in kvmig("worker", "ls")
    assert "memory" in kvmig("worker", "show", "local")
    for order in (("cordon", "local"), ("drain", "local"), ("label", "local", "a=b")):
        sentence = kvmig.refused("worker", *order)
        assert sentence.startswith("kvmig: worker local is this host, the only one")
    assert "there is no worker 'w'" in kvmig.refused("worker", "show", "w")


def test_a_gguf_file_is_evaluated_by_its_header(kvmig: Kvmig, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_file(LLAMA, 8192))
    words = ("model", "evaluate", "tiny", f"path:{tmp_path}", "--engine", "toy", "--json")
    found = json.loads(kvmig(*words))
    assert found["weights_bytes"] == found["files_bytes"] == 8192
    assert found["token_bytes"] == 16 * 8 * 128 * 2


def test_a_model_is_evaluated_for_the_worker_that_is_named(kvmig: Kvmig) -> None:
    words = ("model", "evaluate", "qwen", "--engine", "toy", "--worker")
    kvmig.add_model()
    assert "fits" in kvmig(*words, "local")
    said = kvmig.refused(*words, "gpu 1&x")
    assert "worker is 'gpu 1&x', must be one of the workers: local" in said


def test_a_change_after_which_a_model_fits_is_said_as_its_flags() -> None:
    change = {
        "flags": ["--max-model-len=896"], "gpus_per_instance": 2, "max_tokens": 896,
        "need_bytes": 7,
    }  # fmt: skip
    assert suggestion_text(change) == (
        "--max-model-len=896 and gpus_per_instance: 2: it then needs 7 bytes, and takes requests of"
        " 896 tokens"
    )


# -- what a newcomer types


@pytest.mark.parametrize(
    "words",
    [
        ("run", "hf:org/small", "Hello"),
        ("model", "add", "small", "hf:org/small"),
        ("model", "evaluate", "small", "hf:org/small"),
        ("model", "set", "qwen"),
    ],
)
def test_flags_with_an_open_quote_are_named(kvmig: Kvmig, words: tuple[str, ...]) -> None:
    kvmig.add_model()
    said = kvmig.refused(*words, "--flags", '--a "b', status=2)
    assert said == "kvmig: --flags is '--a \"b', must be a list of words: No closing quotation\n"


@pytest.mark.parametrize("name", ["a/../../keys/kv", "../keys/kv", "./a", "a/.."])
@pytest.mark.parametrize(
    "words", [("rm",), ("model", "show"), ("alias", "rm"), ("key", "revoke"), ("worker", "show")]
)
def test_a_name_leads_to_nothing_else_of_the_fleet(
    kvmig: Kvmig, words: tuple[str, ...], name: str
) -> None:
    said = kvmig.refused(*words, name, status=2)
    assert said == f"kvmig: a name is {name!r}, which is none of the fleet's\n"


@pytest.mark.parametrize("name", ["", ".", ".."])
@pytest.mark.parametrize(
    "words",
    [("rm",), ("model", "show"), ("model", "evaluate"), ("model", "why-not"), ("alias", "rm"),
     ("key", "revoke"), ("model", "rollout", "status"), ("worker", "show")],
)  # fmt: skip
def test_what_is_no_name_is_refused_before_a_call(
    kvmig: Kvmig, words: tuple[str, ...], name: str
) -> None:
    said = kvmig.refused(*words, name, status=2)
    assert said == f"kvmig: a name is {name!r}, which names nothing\n"


def test_a_model_is_removed_by_what_it_was_run_by(kvmig: Kvmig) -> None:
    kvmig("model", "add", "small-1b", "hf:Org/Small-1B")
    assert "no model 'Org/Other'" in kvmig.refused("rm", "Org/Other")
    kvmig("rm", "Org/Small-1B")
    assert "small-1b" not in kvmig("model", "ls")


def test_of_two_who_run_a_new_model_at_once_the_second_uses_what_the_first_has_added(
    kvmig: Kvmig, monkeypatch: pytest.MonkeyPatch
) -> None:
    kvmig("model", "add", "small", "hf:org/small")
    asked: list[str] = []
    unknown = [KnownModel("small", "hf:org/small")]
    monkeypatch.setattr(
        chat, "known_model", lambda *known: unknown.pop() if unknown else known_model(*known)
    )
    monkeypatch.setattr(chat, "follow_download", lambda *_, quiet: None)
    monkeypatch.setattr(chat, "converse", lambda model, *_: asked.append(model))
    kvmig("run", "hf:org/small", "Hello")
    assert asked == ["small"]


def test_a_name_of_the_catalogue_and_a_repository_are_evaluated_without_a_source(
    kvmig: Kvmig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def evaluated(self: FleetClient, path: str, body: Any = None) -> Any:
        asked.append(body)
        raise CallFailure("enough")

    kvmig.add_model("mine")
    monkeypatch.setattr(FleetClient, "post", evaluated)
    for name in ("qwen3:0.6b", "Org/Small-1B", "mine"):
        kvmig.refused("model", "evaluate", name, "--flags", "--seed 1")
    assert [one["name"] for one in asked] == ["qwen3:0.6b", "small-1b", "mine"]
    assert [one["source"] for one in asked[:2]] == ["hf:Qwen/Qwen3-0.6B", "hf:Org/Small-1B"]
    assert all(one["flags"][-2:] == ["--seed", "1"] for one in asked)
