"""The server's HTTP API over a store: what orders change, and how they are refused."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from msgspec.structs import replace

from kvmig.accounts.usage import UsageRecord, UsageSpool
from kvmig.core.api_records import InstanceRow
from kvmig.core.model_sizes import LayerSizes, ModelSizes
from kvmig.fleet.callers import FORWARDED
from kvmig.fleet.deployments import DeploymentEvent
from kvmig.fleet.ledger import merge
from kvmig.fleet.managed_model import CatalogEntry, ManagedModel
from kvmig.fleet.rollout import RolloutTerms, begun
from kvmig.fleet.rollout_table import StoredRollout
from kvmig.fleet.spec import InstanceCounts, ModelSpec, number_in
from kvmig.fleet.tables import StoreError
from tests.support.fleet_api import Api, said
from tests.support.fleet_stores import Place
from tests.support.model_bench import shown, watched_of


@pytest.fixture
async def api(place: Place) -> AsyncIterator[Api]:
    made = Api(place)
    await made.backend.stored(made.store.open)
    yield made
    await made.close()


async def add_model(api: Api, name: str = "qwen") -> None:
    body = {"name": name, "source": f"path:{api.folder}", "engine": "toy"}
    status, _ = await api.ask("POST", "models", body)
    assert status == 201


async def last_noted(api: Api) -> dict[str, Any]:
    """The newest row of the audit."""
    (row,) = (await api.ask("GET", "audit?limit=1"))[1]["data"]
    return dict(row)


async def test_a_command_is_refused_unless_the_fleet_was_started_for_that(api: Api) -> None:
    body = {
        "name": "other", "source": f"path:{api.folder}", "engine": "command", "memory": 1 << 20,
        "command": f"{sys.executable} {{port}}", "share_prefixes": True,
    }  # fmt: skip
    status, sentence = said(await api.ask("POST", "models", body))
    assert status == 400
    assert "engine is 'command', must be vllm or transformers: this fleet runs no" in sentence
    fleet = {"fleet": {"models": [body]}}
    assert (await api.ask("POST", "apply", fleet))[0] == 400
    api.backend.settings = replace(api.backend.settings, allow_commands=True)
    assert (await api.ask("POST", "models", body))[0] == 201


async def test_an_alias_is_set_shown_and_removed(api: Api) -> None:
    await add_model(api)
    assert (await api.ask("PUT", "aliases/a/b", {"targets": {"qwen": 3}}))[0] == 200
    assert await api.ask("GET", "aliases") == (200, {"data": {"a/b": {"qwen": 3}}})
    assert (await api.ask("DELETE", "aliases/a/b"))[0] == 200
    assert await api.ask("GET", "aliases") == (200, {"data": {}})
    assert said(await api.ask("DELETE", "aliases/a/b")) == (404, "no alias 'a/b'")


@pytest.mark.parametrize("based_on", ["nonsense", "[]", '{"qwen": "x"}', "{", '"\\ud800"'])
async def test_what_a_removal_was_made_from_may_be_no_nonsense(api: Api, based_on: str) -> None:
    await add_model(api)
    await api.ask("PUT", "aliases/a", {"targets": {"qwen": 3}})
    status, sentence = said(await api.ask("DELETE", f"aliases/a?based_on={quote(based_on)}"))
    assert (status, sentence.startswith("based_on is ")) == (400, True), sentence
    assert (await api.ask("DELETE", "models/qwen?based_on=x"))[0] == 400
    right = quote('{"qwen": 3}')
    assert (await api.ask("DELETE", f"aliases/a?based_on={right}"))[0] == 200


def run_here(api: Api, **more: Any) -> None:
    """A round of the fleet with one model, qwen."""
    one = ModelSpec(name="qwen", source=f"path:{api.folder}", engine="toy", **more)
    api.models.take_catalogue([CatalogEntry("m1", "qwen", 1, True, one)])
    api.models.reconcile()


async def test_each_worker_says_what_it_has_for_another_instance(api: Api) -> None:
    assert said(await api.ask("GET", "why-not/qwen")) == (404, "no model 'qwen'")
    await add_model(api)
    assert said(await api.ask("GET", "why-not/qwen"))[0] == 404, "the server learns of it soon"
    run_here(api)
    status, found = await api.ask("GET", "why-not/qwen")
    (node,) = found["nodes"]
    assert (status, found["state"], found["need_bytes"], found["gpus"]) == (200, "zero", 1 << 27, 0)
    assert node == node | {"node": "local", "chosen": True, "score": 100, "refusals": []}
    run_here(api, memory=1 << 50)
    _, found = await api.ask("GET", "why-not/qwen")
    (node,) = found["nodes"]
    (refusal,) = node["refusals"]
    assert (refusal["filter"], refusal["need_bytes"]) == ("memory", 1 << 50)


async def test_why_an_instance_is_on_its_worker_is_shown_as_it_was_decided(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.fleet.deployments.RETRY_S", 60.0)
    await add_model(api)
    run_here(api, instances=InstanceCounts(min=1))
    watched = watched_of(api.models, "qwen")
    await watched.looked.wait()  # there is no deployment that would say anything
    assert said(await api.ask("GET", "why/qwen?instance=i0")) == (
        404,
        "model qwen has no instance 'i0', there are: none",
    )
    rows = tuple(InstanceRow(id=one, state="serving") for one in ("i0", "i7"))
    watched.told = DeploymentEvent(0, data=rows)
    _, found = await api.ask("GET", "why/qwen?instance=i0")
    (node,) = found["decision"]["nodes"]
    assert (found["worker"], node["node"], node["chosen"]) == ("local", "local", True)
    _, found = await api.ask("GET", "why/qwen?instance=i7")
    assert (found["worker"], found["at"], found["decision"]) == ("local", None, None)
    assert (await api.ask("GET", "why/qwen"))[0] == 400, "which one?"


async def test_both_deployments_of_a_model_that_rolls_out_are_shown_with_what_they_have(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.fleet.deployments.RETRY_S", 60.0)
    await add_model(api)
    run_here(api, instances=InstanceCounts(min=1))
    before = shown(api.models, "qwen").wanted.spec
    spec = msgspec.structs.replace(before, flags=("--seed", "1"))
    stored = StoredRollout(begun(RolloutTerms(), 1, 2, 0.0), before)
    api.models.take_catalogue([CatalogEntry("m1", "qwen", 2, True, spec, stored)])
    api.models.reconcile()
    watched = watched_of(api.models, "qwen@2")
    monkeypatch.setattr(ManagedModel, "held", {"GPU-0": 3})
    await watched.looked.wait()
    watched.told = DeploymentEvent(0, data=(InstanceRow(id="i3", state="serving"),))
    for name in ("qwen", "qwen@2"):
        _, found = await api.ask("GET", f"why/{name}?instance=i3")
        assert (found["model"], found["instance"]) == ("qwen@2", "i3")
    assert said(await api.ask("GET", "why/qwen?instance=i0")) == (
        404,
        "model qwen has no instance 'i0', there are: i3 of qwen@2",
    )
    _, row = await api.ask("GET", "models/qwen")
    assert [one["bytes"] for one in row["gpus"]] == [6]


async def test_a_change_that_waits_for_the_next_start_is_named_in_the_answer(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.fleet.deployments.RETRY_S", 60.0)
    await add_model(api)
    run_here(api, instances=InstanceCounts(min=1))
    model = shown(api.models, "qwen")
    assert model.note is not None
    body = {"fleet": {"models": [msgspec.to_builtins((await api.backend.row("qwen")).spec)]}}
    assert (await api.ask("POST", "apply", body))[1]["at_next_start"] == []
    unit = msgspec.structs.replace(model.wanted.spec, unit="u", unit_memory=1 << 30)
    model.note = msgspec.structs.replace(model.note, spec=unit)
    body["fleet"]["models"][0]["max_held"] = 7
    assert (await api.ask("POST", "apply", body))[1]["at_next_start"] == ["qwen"]


async def test_an_alias_of_no_model_changes_nothing(api: Api) -> None:
    status, sentence = said(await api.ask("PUT", "aliases/best", {"targets": {"qwen": 1}}))
    assert (status, api.changes) == (400, 0)
    assert "aliases.best: 'qwen' is no model" in sentence


async def test_a_user_who_is_disabled_has_no_keys(api: Api) -> None:
    await api.backend.stored(api.store.first_admin_key)
    await api.ask("POST", "users", {"name": "bea"})
    _, made = await api.ask("POST", "keys", {"user": "bea"})
    assert api.keys.find(made["key"]) is not None
    status, row = await api.ask("PATCH", "users/bea", {"disabled": True})
    assert (status, row["disabled"], row["role"]) == (200, True, "user")
    assert api.keys.find(made["key"]) is None


async def test_the_only_admin_stays_one(api: Api) -> None:
    await api.backend.stored(api.store.first_admin_key)
    status, sentence = said(await api.ask("PATCH", "users/admin", {"role": "user"}))
    assert status == 400
    assert "admin is the only admin" in sentence


async def test_a_rotated_key_is_good_for_a_while(api: Api) -> None:
    await api.ask("POST", "users", {"name": "bea"})
    _, old = await api.ask("POST", "keys", {"user": "bea"})
    _, new = await api.ask("POST", f"keys/{old['prefix']}/rotate?keep_s=60")
    assert api.keys.find(old["key"]) is not None
    assert api.keys.find(new["key"]) is not None
    _, last = await api.ask("POST", f"keys/{new['prefix']}/rotate")
    assert api.keys.find(new["key"]) is None
    assert api.keys.find(last["key"]) is not None


async def test_limits_of_a_key_are_changed_one_by_one_and_noted(api: Api) -> None:
    await api.ask("POST", "users", {"name": "bea"})
    _, made = await api.ask("POST", "keys", {"user": "bea", "rpm": 5, "quota": 1000})
    path = f"keys/{made['prefix']}"

    status, row = await api.ask("PATCH", path, {"rpm": None, "tpm": 9})

    named = ("rpm", "tpm", "parallel", "quota", "period")
    assert (status, [row["terms"][name] for name in named]) == (200, [None, 9, None, 1000, "month"])
    grant = api.keys.find(made["key"])
    assert grant is not None
    assert (grant.rpm, grant.tpm) == (None, 9)
    row = await last_noted(api)
    assert (row["before"], row["after"]) == ({"rpm": 5, "tpm": None}, {"rpm": None, "tpm": 9})


async def test_quotas_of_models_are_given_with_a_key_and_changed_by_their_names(api: Api) -> None:
    await add_model(api)
    await api.ask("POST", "users", {"name": "bea"})
    quotas = {"qwen": {"tokens": 9, "period": "day"}}
    _, made = await api.ask("POST", "keys", {"user": "bea", "quotas": quotas})
    path = f"keys/{made['prefix']}"

    status, row = await api.ask("PATCH", path, {"rpm": 3})
    assert (status, row["terms"]["quotas"]) == (200, quotas)
    status, row = await api.ask("PATCH", path, {"quotas": {"qwen": None}})
    assert (status, row["terms"]["quotas"]) == (200, {})
    row = await last_noted(api)
    assert (row["before"], row["after"]) == ({"quotas": quotas}, {"quotas": {}})


async def test_a_users_limits_come_to_all_keys_and_are_noted(api: Api) -> None:
    await api.ask("POST", "users", {"name": "bea"})
    made = [(await api.ask("POST", "keys", {"user": "bea"}))[1]["key"] for _ in range(2)]

    status, row = await api.ask("PATCH", "users/bea", {"quota": 9, "period": "day"})

    assert (status, row["limits"]["quota"], row["disabled"]) == (200, 9, False)
    for key in made:
        grant = api.keys.find(key)
        assert grant is not None
        assert (grant.quota, grant.user_limits.quota, grant.user_limits.period) == (None, 9, "day")
    row = await last_noted(api)
    noted = [row[when]["limits"]["quota"] for when in ("before", "after")]
    assert (row["object"], noted) == ("bea", [None, 9])


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"rpm": 0}, "rpm is 0, must be 1 to"),
        ({"quota": -1}, "quota is -1, must be 1 to"),
        ({"period": "week"}, "period"),
        ({"quotas": {"nobody": {"tokens": 5}}}, "quotas: 'nobody' is no model, must be one of"),
        ({"quotas": {"a": {"tokens": 5, "period": "week"}}}, "quotas"),
    ],
)
async def test_a_limit_that_can_not_be_kept_is_refused_and_changes_nothing(
    api: Api, limits: dict[str, Any], sentence: str
) -> None:
    api.backend.settings = msgspec.structs.replace(api.backend.settings, proxies=2)
    await api.ask("POST", "users", {"name": "bea"})
    _, made = await api.ask("POST", "keys", {"user": "bea"})
    before = api.changes

    status, told = said(await api.ask("PATCH", f"keys/{made['prefix']}", limits))

    assert (status, api.changes) == (400, before)
    assert sentence in told
    assert (await api.ask("POST", "keys", {"user": "bea", **limits}))[0] == 400
    assert (await api.ask("PATCH", "users/bea", limits))[0] == 400


async def test_a_call_from_elsewhere_needs_an_admins_key(api: Api) -> None:
    admin = await api.backend.stored(api.store.first_admin_key)
    await api.ask("POST", "users", {"name": "bea"})
    _, bea = await api.ask("POST", "keys", {"user": "bea"})
    statuses = []
    for key in ("", "kv-00000000-" + "0" * 43, bea["key"], admin):
        headers = {FORWARDED: "10.0.0.9", "authorization": f"Bearer {key}"}
        statuses.append((await api.ask("POST", "users", {"name": "carl"}, **headers))[0])
    assert statuses == [401, 401, 403, 201]
    row = await last_noted(api)
    assert (row["address"], row["object"]) == ("10.0.0.9", "carl")
    assert row["actor"].startswith("admin (")


async def key_of(api: Api, user: str, **more: Any) -> str:
    await api.ask("POST", "users", {"name": user})
    status, made = await api.ask("POST", "keys", {"user": user, **more})
    assert status == 201, made
    return str(made["key"])


def used(key_id: str, seq: int) -> UsageRecord:
    """A call, just now, of 10 and 20 tokens."""
    now = time.time()
    counts: dict[str, Any] = {"prompt": 10, "output": 20, "began": now, "ended": now}
    return UsageRecord(seq=seq, call_id="c", account=key_id, model="qwen", **counts)


def bearing(key: str) -> dict[str, str]:
    return {FORWARDED: "10.0.0.9", "authorization": f"Bearer {key}"}


async def test_a_key_with_the_scope_read_sees_its_own_users_keys_quotas_and_usage(api: Api) -> None:
    await add_model(api)
    bea = await key_of(api, "bea", scopes=["read"], quota=1000, period="day")
    await key_of(api, "carl", quota=50)
    await api.ask("PATCH", "users/bea", {"quotas": {"qwen": {"tokens": 300, "period": "total"}}})
    rows = await api.backend.stored(api.store.keys)
    spool = UsageSpool(api.folder / "front.sqlite")
    spool.write(used(row.key_id, seq) for seq, row in enumerate(rows, start=1))
    await api.backend.stored(merge, api.store.database, api.folder / "front.sqlite")

    _, keys = await api.ask("GET", "keys?left=true", **bearing(bea))
    _, usage = await api.ask("GET", "usage?by=user", **bearing(bea))

    (row,) = keys["data"]
    assert row["user"] == "bea"
    assert "hash" not in row
    left = [(one["whose"], one["model"], one["tokens"], one["left"]) for one in row["left"]]
    assert left == [("key", None, 1000, 970), ("user", "qwen", 300, 270)]
    assert [one["renewed_at"] is None for one in row["left"]] == [False, True]
    assert usage["data"] == [
        {
            "user": "bea", "calls": 1, "prompt": 10, "cached": 0, "output": 20, "characters": 0,
            "seconds": 0, "images": 0,
        },
    ]  # fmt: skip


async def test_a_key_with_the_scope_read_gives_no_orders_and_one_without_it_sees_nothing(
    api: Api,
) -> None:
    reading = bearing(await key_of(api, "bea", scopes=["read"]))
    calling = bearing(await key_of(api, "carl", scopes=["infer"]))
    for method, path in (("GET", "models"), ("GET", "users"), ("GET", "audit"), ("POST", "keys")):
        status, sentence = said(await api.ask(method, path, {"user": "bea"}, **reading))
        assert (status, "scope 'admin'" in sentence) == (403, True)
    for path in ("keys", "usage"):
        status, sentence = said(await api.ask("GET", path, **calling))
        assert (status, "scope 'read'" in sentence) == (403, True)


async def test_an_admins_key_sees_everybodys_usage_without_the_scope_read(api: Api) -> None:
    admin = await api.backend.stored(api.store.first_admin_key)
    await api._changed()
    await key_of(api, "carl")
    _, keys = await api.ask("GET", "keys", **bearing(str(admin)))
    assert {row["user"] for row in keys["data"]} == {"admin", "carl"}


@pytest.mark.parametrize("day", ["yesterday", "2026-13-01", "2026-1-1", "20261101", "2026-02-30"])
async def test_a_day_that_is_none_is_refused_with_the_form_of_one(api: Api, day: str) -> None:
    for field in ("since", "until"):
        answer = said(await api.ask("GET", f"usage?{field}={day}"))
        assert answer == (400, f"{field} is {day!r}, must be a day (UTC) as 2026-11-01")


async def test_old_rows_of_the_ledger_are_deleted_by_an_admins_order(api: Api) -> None:
    admin = str(await api.backend.stored(api.store.first_admin_key))
    bea = await key_of(api, "bea", scopes=["read"])
    spool = UsageSpool(api.folder / "front-1.sqlite")
    old = UsageRecord(seq=1, call_id="c", account="k", model="a", began=0.0, ended=1.0, output=7)
    spool.write([msgspec.structs.replace(old, status="finished")])
    await api.backend.stored(merge, api.store.database, api.folder / "front-1.sqlite")
    _, before = await api.ask("GET", "usage")
    order = {"before": "2026-01-01"}
    status, _ = await api.ask("POST", "usage/prune", order, **bearing(bea))
    assert status == 403
    answer = await api.ask("POST", "usage/prune", order, **bearing(admin))
    assert answer == (200, {"before": "2026-01-01", "rows": 1, "more": False})
    assert await api.ask("GET", "usage") == (200, before)
    row = await last_noted(api)
    assert (row["actor"][:7], row["action"]) == ("admin (", "usage.prune")


@pytest.mark.parametrize("day", ["9999-01-01", "2026-02-30", "90d"])
async def test_rows_of_a_day_that_is_not_over_yet_or_is_none_are_not_deleted(
    api: Api, day: str
) -> None:
    status, sentence = said(await api.ask("POST", "usage/prune", {"before": day}))
    assert (status, sentence.startswith(f"before is {day!r}, must be a day")) == (400, True)


async def test_a_model_that_an_alias_stands_for_is_removed_after_the_alias(api: Api) -> None:
    await add_model(api)
    await api.ask("PUT", "aliases/canary", {"targets": {"qwen": 3}})
    status, sentence = said(await api.ask("DELETE", "models/qwen"))
    assert status == 409
    assert sentence == (
        "alias canary stands for model qwen: `kvmig alias rm canary` first, or"
        " `kvmig alias set canary` without it"
    )
    assert (await api.ask("DELETE", "aliases/canary"))[0] == 200
    assert (await api.ask("DELETE", "models/qwen"))[0] == 200


async def test_a_key_for_a_model_that_nobody_knows_is_refused(api: Api) -> None:
    await add_model(api)
    await api.ask("PUT", "aliases/canary", {"targets": {"qwen": 3}})
    await api.ask("POST", "users", {"name": "bea"})
    status, sentence = said(await api.ask("POST", "keys", {"user": "bea", "models": ["qwem"]}))
    assert status == 400
    assert sentence == (
        "models has 'qwem', which is no model, adapter or alias; there are: canary, qwen"
    )
    body = {"user": "bea", "models": ["canary", "qwen"]}
    assert (await api.ask("POST", "keys", body))[0] == 201


async def test_an_order_that_the_database_cannot_take_is_503_with_the_reason(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreError("the fleet's database /data/fleet.sqlite has no room left")

    monkeypatch.setattr(api.store.database, "transaction", full)
    body = {"name": "qwen", "source": f"path:{Path.cwd()}", "engine": "toy"}
    answer = said(await api.ask("POST", "models", body))
    assert answer == (503, "the fleet's database /data/fleet.sqlite has no room left")
    monkeypatch.undo()
    assert await api.ask("GET", "models") == (200, {"data": []})


# -- files, and known models


async def test_files_are_wanted_once_pinned_removed_and_noted(api: Api) -> None:
    source = {"source": "https://huggingface.co/org/small"}
    first = await api.ask("POST", "files", source)
    again = await api.ask("POST", "files", source)
    assert first[0] == again[0] == 200
    assert first[1]["source"] == again[1]["source"] == "hf:org/small"
    assert (await api.ask("POST", "files/pin", {**source, "pinned": True}))[1]["pinned"] is True
    _, listed = await api.ask("GET", "files?source=hf:org/small")
    assert [one["state"] for one in listed["data"]] == ["wanted"]
    assert await api.ask("DELETE", "files?source=hf:org/small") == (200, {"source": "hf:org/small"})
    assert (await api.ask("DELETE", "files?source=hf:org/small"))[0] == 404
    assert await api.ask("GET", "files") == (200, {"data": []})
    _, audit = await api.ask("GET", "audit")
    assert [one["action"] for one in audit["data"]] == [
        "files.remove", "files.pin", "files.pull", "files.pull",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"source": "org/small"}, "source is 'org/small', must be hf:ORG/NAME[@REVISION]"),
        ({"source": "path:/models"}, "which is on this disk already"),
        ({}, "source"),
    ],
)
async def test_a_source_that_can_not_be_fetched_is_refused(
    api: Api, body: dict[str, str], sentence: str
) -> None:
    status, found = said(await api.ask("POST", "files", body))
    assert status in (400, 422)
    assert sentence in found
    assert await api.ask("GET", "files") == (200, {"data": []})


async def test_orders_about_files_need_an_admins_key(api: Api) -> None:
    for method, path in (("GET", "files"), ("POST", "files"), ("GET", "catalogue")):
        status, _ = await api.ask(method, path, {"source": "hf:a/b"}, **{FORWARDED: "10.0.0.9"})
        assert status == 401


async def test_a_known_model_is_found_by_its_name_in_any_case(api: Api) -> None:
    _, found = await api.ask("GET", "catalogue?name=QWEN3:0.6B")
    assert [one["source"] for one in found["data"]] == ["hf:Qwen/Qwen3-0.6B"]
    assert await api.ask("GET", "catalogue?words=no+such+model") == (
        200,
        {"date": found["date"], "data": [], "left_out": []},
    )


async def test_a_model_whose_files_are_yet_to_come_is_added_unchecked_by_its_engine(
    api: Api,
) -> None:
    body = {"name": "small", "source": "hf:org/small", "flags": "--nonsense"}
    status, shown = await api.ask("POST", "models", body)
    assert (status, shown["spec"]["source"], shown["state"]) == (201, "hf:org/small", "zero")
    refused = await api.ask("POST", "models", {**body, "name": "other", "gpus": ["0"]})
    assert refused[0] == 400
    assert "gpus is ('0',), must be left out: there is no GPU" in said(refused)[1]


async def test_the_log_of_a_model_shows_no_secret_of_a_url_or_a_flag(api: Api) -> None:
    assert (await api.ask("POST", "models", api.model(name="a")))[0] == 201
    log = api.backend.settings.log("a")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("sends to http://u:pw@h/x?token=t\nargs: {'api_key': ['k'], 'seed': 1}\n")
    answer = (await api.ask("GET", "models/a/logs"))[1]
    assert answer["data"] == [
        "sends to http://u:***@h/x?token=***",
        "args: {'api_key': ***, 'seed': 1}",
    ]


SECRETS = [
    "--hf-token",
    "abc-1",
    "--config.api_key=abc-2",
    "--url=http://u:abc-3@h/",
    "--seed",
    "1",
]
HIDDEN_SECRETS = [
    "--hf-token", "***", "--config.api_key=***", "--url=http://u:***@h/", "--seed", "1",
]  # fmt: skip


async def flags_kept(api: Api, name: str = "a/b") -> list[str]:
    """The flags as they are stored."""
    return list((await api.backend.row(name)).spec.flags)


async def test_no_answer_shows_a_secret_in_a_models_flags(api: Api) -> None:
    answers = [await api.ask("POST", "models", api.model(flags=SECRETS))]
    assert answers[0][0] == 201
    changed = {"fleet": {"models": [api.model(flags=[*SECRETS, "--hf_token=abc-4"])]}}
    for path in ("apply", "apply"):
        answers.append(await api.ask("POST", path, changed | {"dry_run": len(answers) == 1}))
    paths = ("models", "models/a/b", "audit", "status", "names", "models/a/b/rollout")
    answers += [await api.ask("GET", path) for path in paths]
    answers.append(await api.ask("POST", "models/a/b/scale", {"min": 0, "max": 2}))
    answers.append(await api.ask("POST", "models/a/b/switch", {"on": False}))
    stale = changed | {"based_on": {"a/b": 1}}
    stale["fleet"] = {"models": [api.model(flags=["--nothing"])]}
    answers.append(await api.ask("POST", "apply", stale))
    assert answers[-1][0] == 409
    wrong = api.model(name="x", flags=["--hf-token=abc-5"], pass_environment=["HF_TOKEN=abc-6"])
    answers.append(await api.ask("POST", "models", wrong))
    assert [status for status, _ in answers if status >= 400] == [409, 400]
    assert "abc-" not in str(answers)
    assert answers[0][1]["spec"]["flags"] == HIDDEN_SECRETS
    assert "abc-1" in await flags_kept(api)


async def test_a_changed_model_that_was_shown_keeps_its_secrets(api: Api) -> None:
    await api.ask("POST", "models", api.model(flags=SECRETS))
    spec = (await api.ask("GET", "models/a/b"))[1]["spec"]
    spec["flags"][-1] = "2"
    status, answer = await api.ask("POST", "apply", {"fleet": {"models": [spec]}})
    assert status == 200, answer
    assert await flags_kept(api) == [*SECRETS[:-1], "2"]
    spec["flags"][1] = "abc-new"
    assert (await api.ask("POST", "apply", {"fleet": {"models": [spec]}}))[0] == 200
    assert await flags_kept(api) == ["--hf-token", "abc-new", *SECRETS[2:-1], "2"]
    assert (await api.ask("POST", "evaluate", spec | {"flags": HIDDEN_SECRETS}))[0] == 200


@pytest.mark.parametrize("path", ["models", "evaluate", "apply"])
async def test_a_hidden_secret_that_nobody_knows_is_refused_by_the_name_of_its_flag(
    api: Api, path: str
) -> None:
    await api.ask("POST", "models", api.model(flags=["--seed", "1"]))
    body = api.model(name="a/b" if path == "apply" else "new", flags=["--hf-token", "***"])
    given = {"fleet": {"models": [body]}} if path == "apply" else body
    status, sentence = said(await api.ask("POST", path, given))
    assert (status, "flags has '--hf-token ***'" in sentence) == (400, True), sentence
    assert await flags_kept(api) == ["--seed", "1"]


async def test_secrets_in_a_command_are_hidden_and_kept(api: Api) -> None:
    api.backend.settings = replace(api.backend.settings, allow_commands=True)
    command = ["env", "HF_TOKEN=abc", sys.executable, "--api-key", "abc", "--port", "{port}"]
    body = {
        "name": "c", "source": f"path:{api.folder}", "engine": "command", "memory": 1 << 20,
        "command": command, "share_prefixes": True,
    }  # fmt: skip
    status, answer = await api.ask("POST", "models", body)
    assert (status, "abc" in str(answer)) == (201, False), answer
    spec = answer["spec"] | {"parallel": 3}
    assert (await api.ask("POST", "apply", {"fleet": {"models": [spec]}}))[0] == 200
    kept = (await api.backend.row("c")).spec
    assert (list(kept.command), kept.parallel) == (command, 3)


async def test_what_does_not_fit_comes_with_a_change_after_which_it_does(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(spec: ModelSpec, sizes: bool) -> None:
        """As an engine that keeps 1,000 bytes of a token."""
        tokens = number_in(spec.flags, 8192, "--max-model-len")
        layer = LayerSizes(kind="full", layers=1, token=1000, request=1000 * tokens)
        made = ModelSizes(weights=10, files=10, tokens=tokens, layers=(layer,))
        api.models.memory.devices.learn(spec, made)

    monkeypatch.setattr(api.backend, "check", check)
    flags = ["--kv-cache-memory-bytes=3000000"]
    body = {"name": "a", "source": f"path:{api.folder}", "flags": flags, "memory": 1 << 20}
    _, found = await api.ask("POST", "evaluate", body)
    assert (found["fits"], found["suggestions"]) == (
        False,
        [
            {
                "flags": ["--max-model-len=2944"], "gpus_per_instance": 0, "max_tokens": 2944,
                "need_bytes": 1 << 20,
            }
        ],
    )  # fmt: skip
    body["flags"] += found["suggestions"][0]["flags"]
    _, again = await api.ask("POST", "evaluate", body)
    assert (again["fits"], again["suggestions"]) == (True, [])
