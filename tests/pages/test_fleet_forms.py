"""Forms of the fleet's pages: what they order, and how the page says what was refused."""

from __future__ import annotations

import asyncio
import html
import json
import re

import msgspec
import pytest

from kvmig.core.quantities import size_text
from kvmig.fleet.evaluate import FitSuggestion, FitVerdict, HostVerdict
from kvmig.pages.rendering import render
from tests.support.page_api import Pages, alert_of, text_of


@pytest.fixture(autouse=True)
async def an_admin(pages: Pages) -> None:
    await pages.log_in("bea", "admin")


async def add_model(pages: Pages, name: str = "qwen", **more: str) -> None:
    source = f"path:{pages.folder}"
    answer = await pages.send("models", name=name, source=source, engine="toy", **more)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/ui/models/{name}")


async def spec_of(pages: Pages, name: str = "qwen") -> dict[str, object]:
    found: dict[str, object] = (await pages.ask("GET", f"models/{name}"))[1]["spec"]
    return found


async def test_a_model_is_added_by_the_form(pages: Pages) -> None:
    await add_model(pages, "org/qwen", min="0", max="3", target="2.5", zero_after_s="")
    spec = (await pages.ask("GET", "models/org/qwen"))[1]["spec"]
    counts = spec["instances"]
    assert (counts["max"], counts["target"], counts["zero_after_s"]) == (3, 2.5, 300)


@pytest.mark.parametrize(
    ("field", "value"), [("max", "many"), ("max", "NaN"), ("target", "1e999"), ("min", "-1")]
)
async def test_a_number_that_is_none_is_refused_by_its_name_and_the_form_is_kept(
    pages: Pages, field: str, value: str
) -> None:
    form = {"name": "qwen", "source": f"path:{pages.folder}", "engine": "toy", field: value}
    answer = await pages.send("models", **form)
    assert answer.status_code == 400
    assert f"instances.{field} is" in alert_of(answer)
    assert f'value="path:{pages.folder}"' in answer.text


async def test_a_model_whose_engine_refuses_its_flags_is_not_added(pages: Pages) -> None:
    form = {"name": "q", "source": f"path:{pages.folder}", "engine": "toy", "flags": "--nonsense"}
    answer = await pages.send("models", **form)
    assert (answer.status_code, "unrecognized arguments" in alert_of(answer)) == (400, True)
    assert (await pages.ask("GET", "models"))[1]["data"] == []


async def test_an_alias_is_set_shown_and_removed(pages: Pages) -> None:
    await add_model(pages)
    assert (await pages.send("aliases", alias="a/b", targets="qwen=3")).status_code == 303
    assert (await pages.ask("GET", "aliases"))[1]["data"] == {"a/b": {"qwen": 3}}
    assert "qwen=3" in text_of(await pages.browse("models"))
    assert (await pages.send("aliases/remove", alias="a/b")).status_code == 303
    assert (await pages.ask("GET", "aliases"))[1]["data"] == {}


async def test_a_wrong_weight_of_an_alias_is_refused_in_words(pages: Pages) -> None:
    await add_model(pages)
    answer = await pages.send("aliases", alias="x", targets="qwen=many")
    assert (answer.status_code, "many" in alert_of(answer)) == (400, True)


async def test_the_instances_are_scaled(pages: Pages) -> None:
    await add_model(pages)
    assert (await pages.send("models/qwen/scale", min="1", max="4")).status_code == 303
    counts = (await pages.ask("GET", "models/qwen"))[1]["spec"]["instances"]
    assert (counts["min"], counts["max"]) == (1, 4)
    refused = await pages.send("models/qwen/scale", min="5", max="2")
    assert (refused.status_code, "min" in alert_of(refused)) == (400, True)


async def test_a_model_is_switched_off_and_on_and_removed(pages: Pages) -> None:
    await add_model(pages)
    for word in ("no", "yes"):
        await pages.send("models/qwen/switch", on=word)
        assert (await pages.ask("GET", "models/qwen"))[1]["on"] is (word == "yes")
    answer = await pages.send("models/qwen/remove")
    assert answer.headers["location"] == "/ui/models"
    assert (await pages.ask("GET", "models/qwen"))[0] == 404


async def test_a_changed_specification_is_a_revision_and_can_be_taken_back(pages: Pages) -> None:
    await add_model(pages)
    spec = {"name": "qwen", "source": f"path:{pages.folder}", "engine": "toy", "priority": 7}
    answer = await pages.send("models/qwen/change", spec=json.dumps(spec), hold_s="60")
    assert answer.status_code == 303, alert_of(answer)
    shown = text_of(await pages.browse("models/qwen"))
    assert "priority: 0 7" in shown
    assert "to revision 1" in shown


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("{", "is no JSON"),
        ("[" * 5000, "is no JSON"),
        ('{"name": "other", "source": "path:/x"}', "whose name is"),
        ('{"name": "qwen"}', "source is missing"),
        ('{"name": "qwen", "source": "path:/x", "nonsense": 1}', "is no field"),
    ],
)
async def test_a_wrong_specification_is_refused_in_words(pages: Pages, spec: str, why: str) -> None:
    await add_model(pages)
    answer = await pages.send("models/qwen/change", spec=spec)
    assert (answer.status_code, why in alert_of(answer)) == (400, True), alert_of(answer)


async def test_the_form_says_whether_a_model_would_fit(pages: Pages) -> None:
    form = {"name": "qwen", "source": f"path:{pages.folder}", "engine": "toy"}
    whole = await pages.send("evaluate", **form)
    assert "<main" in whole.text
    assert "qwen" in whole.text
    part = await pages.browse("evaluate", {"csrf": "the-token", **form}, **{"hx-request": "true"})
    assert "<main" not in part.text
    wrong = await pages.send("evaluate", **{**form, "source": "nowhere"})
    assert "source" in alert_of(wrong)


def test_a_change_after_which_a_model_fits_is_on_the_page() -> None:
    change = FitSuggestion(flags=("--max-model-len=896",), max_tokens=896, need_bytes=2 << 30)
    fit = FitVerdict(
        name="a", fits=False, why="no room", basis="host", workers=1, weights_bytes=1,
        files_bytes=1, kv_bytes=1, rest_bytes=1, suggestions=(change,),
        host=HostVerdict(need_bytes=1, total_bytes=1, free_bytes=1, fits=True),
    )  # fmt: skip
    page = render("fit", fit={**msgspec.to_builtins(fit), "error": ""})
    assert f"It fits with --max-model-len=896: it then needs {size_text(2 << 30)}, and" in page


async def test_a_new_key_is_shown_once(pages: Pages) -> None:
    await add_model(pages, "q")
    answer = await pages.send(
        "keys", user="bea", name="ci", scope="infer", rpm="60", quotas="q=9/day"
    )
    assert "kv-" in answer.text
    assert answer.headers["cache-control"] == "no-store"
    assert "kv-" not in (await pages.browse("keys")).text
    row = next(one for one in (await pages.ask("GET", "keys"))[1]["data"] if one["name"] == "ci")
    assert (row["terms"]["rpm"], row["terms"]["tpm"]) == (60, None)
    assert row["terms"]["quotas"] == {"q": {"tokens": 9, "period": "day"}}


async def test_the_limits_of_a_key_are_set_and_an_empty_field_removes_one(pages: Pages) -> None:
    await add_model(pages, "q")
    body = {"user": "bea", "rpm": 5, "quotas": {"q": {"tokens": 3}}}
    prefix = (await pages.ask("POST", "keys", body))[1]["prefix"]
    form = {
        "rpm": "",
        "tpm": "100",
        "quota": "1000",
        "period": "day",
        "had_quotas": "q",
        "quotas": "",
    }
    assert (await pages.send(f"keys/{prefix}/limit", **form)).status_code == 303
    rows = (await pages.ask("GET", "keys"))[1]["data"]
    terms = next(one for one in rows if one["prefix"] == prefix)["terms"]
    assert (terms["rpm"], terms["tpm"], terms["quota"], terms["period"]) == (None, 100, 1000, "day")
    assert terms["quotas"] == {}


@pytest.mark.parametrize(("field", "value"), [("rpm", "0"), ("tpm", "x"), ("quotas", "nonsense")])
async def test_a_wrong_limit_is_refused_by_its_name(pages: Pages, field: str, value: str) -> None:
    prefix = (await pages.ask("POST", "keys", {"user": "bea"}))[1]["prefix"]
    answer = await pages.send(f"keys/{prefix}/limit", period="day", **{field: value})
    assert answer.status_code == 400
    assert field in alert_of(answer)


async def test_a_key_is_rotated_and_revoked(pages: Pages) -> None:
    prefix = (await pages.ask("POST", "keys", {"user": "bea"}))[1]["prefix"]
    answer = await pages.send(f"keys/{prefix}/rotate", keep_s="0")
    assert "kv-" in answer.text
    other = (await pages.ask("POST", "keys", {"user": "bea"}))[1]["prefix"]
    assert (await pages.send(f"keys/{other}/revoke")).status_code == 303
    rows = (await pages.ask("GET", "keys"))[1]["data"]
    assert next(one for one in rows if one["prefix"] == other)["revoked_at"] is not None
    assert (await pages.send("keys/nonsense/revoke")).status_code == 404


async def test_a_refused_form_of_a_key_keeps_its_scopes(pages: Pages) -> None:
    form = {"user": "bea", "name": "ci", "cidrs": "nowhere", "rpm": "9"}
    answer = await pages.send("keys", scope="admin", **form)
    checked = re.findall(r'name="scope" value="(\w+)" checked', answer.text)
    assert (answer.status_code, checked) == (400, ["admin"])
    assert 'name="rpm" value="9"' in answer.text


async def test_refused_limits_of_one_key_are_not_those_of_a_new_one(pages: Pages) -> None:
    prefix = (await pages.ask("POST", "keys", {"user": "bea"}))[1]["prefix"]
    answer = await pages.send(f"keys/{prefix}/limit", period="month", rpm="-7")
    checked = re.findall(r'name="scope" value="(\w+)" checked', answer.text)
    assert (answer.status_code, checked) == (400, ["infer"])
    assert 'value="-7"' not in answer.text


async def test_a_user_is_added_limited_and_disabled(pages: Pages) -> None:
    assert (await pages.send("users", name="tom", role="user")).status_code == 303
    await pages.send("users/tom/change", rpm="7", period="month")
    await pages.send("users/tom/change", disabled="yes")
    rows = (await pages.ask("GET", "users"))[1]["data"]
    tom = next(one for one in rows if one["name"] == "tom")
    assert (tom["limits"]["rpm"], tom["disabled"], tom["role"]) == (7, True, "user")
    again = await pages.send("users", name="tom", role="user")
    assert (again.status_code, "tom" in alert_of(again)) == (409, True)


async def test_the_only_host_refuses_a_drain_in_words(pages: Pages) -> None:
    answer = await pages.send("workers/local/drain", deadline_s="")
    assert (answer.status_code, "the only one" in alert_of(answer)) == (409, True)


async def test_the_audit_shows_who_changed_what_and_from_where(pages: Pages) -> None:
    await add_model(pages)
    seen = text_of(await pages.browse("audit"))
    assert "bea (" in seen
    assert "10.0.0.9" in seen
    assert "qwen" in seen
    assert (await pages.browse("audit?limit=x")).status_code == 400


async def test_a_key_s_form_that_is_sent_twice_makes_one_key_and_shows_it_twice(
    pages: Pages,
) -> None:
    shown = await pages.browse("keys")
    (once,) = set(re.findall(r'name="once" value="([^"]+)"', shown.text))
    form = {"user": "bea", "name": "one", "scope": "infer", "once": once}
    first, second = await asyncio.gather(*(pages.send("keys", **form) for _ in range(2)))
    third = await pages.send("keys", **form)
    keys = [re.findall(r"kv-[0-9a-z]{8}-[^<\s\"]+", one.text) for one in (first, second, third)]
    assert keys[0] == keys[1] == keys[2] != []
    named = [one for one in (await pages.ask("GET", "keys"))[1]["data"] if one["name"] == "one"]
    assert len(named) == 1
    await pages.send("keys", **{**form, "name": "two"})
    assert len((await pages.ask("GET", "keys"))[1]["data"]) == 3


async def test_a_user_s_form_that_is_sent_twice_is_no_error_and_a_refused_one_is_sent_again(
    pages: Pages,
) -> None:
    once = re.findall(r'name="once" value="([^"]+)"', (await pages.browse("users")).text)[0]
    for _ in range(2):
        assert (await pages.send("users", name="", role="user", once=once)).status_code == 400
    for _ in range(2):
        answer = await pages.send("users", name="ann", role="user", once=once)
        assert answer.status_code == 303, alert_of(answer)
    other = await pages.send("users", name="eva", role="user", once="0123456789abcdef.x")
    assert (other.status_code, "started again" in alert_of(other)) == (409, True)
    assert 'value="eva"' in other.text


async def test_a_form_of_a_model_that_somebody_has_changed_since_is_refused_and_kept(
    pages: Pages,
) -> None:
    await add_model(pages)
    assert 'name="based_on" value="1"' in (await pages.browse("models/qwen")).text
    assert (
        await pages.send("models/qwen/scale", min="0", max="4", based_on="1")
    ).status_code == 303
    typed = {"name": "qwen", "source": f"path:{pages.folder}", "engine": "toy", "priority": 7}
    stale = await pages.send("models/qwen/change", spec=json.dumps(typed), based_on="1")
    said = html.unescape(alert_of(stale))
    assert (stale.status_code, "has revision 2 by bea" in said) == (409, True), said
    assert '"max": 4' in said
    assert json.dumps(typed) in html.unescape(stale.text)
    assert 'name="based_on" value="2"' in stale.text
    assert (
        await pages.send("models/qwen/scale", min="1", max="2", based_on="1")
    ).status_code == 409
    again = await pages.send("models/qwen/change", spec=json.dumps(typed), based_on="2")
    assert again.status_code == 303, alert_of(again)
    assert (await spec_of(pages))["priority"] == 7


def order_of(page: str, about: str) -> dict[str, str]:
    """The fields of the form that changes the limits of a key or a user, as a page has them."""
    (form,) = [one for one in re.findall(r"<form.*?</form>", page, re.DOTALL)
               if f'name="of" value="{about}"' in one]  # fmt: skip
    fields = re.findall(r'<input type="\w+" name="(\w+)" value="([^"]*)"', form)
    found = {name: html.unescape(value) for name, value in fields}
    (period,) = re.findall(r"<option selected>(\w+)</option>", form)
    return found | {"period": period}


@pytest.mark.parametrize("whose", ["key", "user"])
async def test_limits_that_somebody_has_changed_since_are_not_overwritten_and_the_form_is_kept(
    pages: Pages, whose: str
) -> None:
    await add_model(pages, "q")
    prefix = (await pages.ask("POST", "keys", {"user": "bea", "rpm": 5}))[1]["prefix"]
    about = prefix if whose == "key" else "bea"
    shown, path = {
        "key": ("keys", f"keys/{prefix}/limit"), "user": ("users", "users/bea/change"),
    }[whose]  # fmt: skip
    mine = order_of((await pages.browse(shown)).text, about) | {"rpm": "9", "quotas": "q=7/day"}
    others = order_of((await pages.browse(shown)).text, about) | {"tpm": "1000"}
    assert (await pages.send(path, **others)).status_code == 303

    stale = await pages.send(path, **mine)
    said = html.unescape(alert_of(stale))
    assert (stale.status_code, "tpm null became 1000" in said) == (409, True), said
    kept = order_of(stale.text, about)
    assert (kept["rpm"], kept["tpm"], kept["quotas"]) == ("9", "", "q=7/day")
    assert '<details class="confirm" open><summary class="button" aria-label="Limits' in stale.text
    assert stale.text.count('<details class="confirm" open>') == 1

    assert (await pages.send(path, **kept)).status_code == 303
    now = order_of((await pages.browse(shown)).text, about)
    assert (now["rpm"], now["quotas"]) == ("9", "q=7/day")


async def test_wrong_limits_are_shown_again_where_they_were_typed(pages: Pages) -> None:
    await add_model(pages, "q")
    body = {"user": "bea", "quotas": {"q": {"tokens": 3}}}
    prefix = (await pages.ask("POST", "keys", body))[1]["prefix"]
    typed = order_of((await pages.browse("keys")).text, prefix) | {"rpm": "-7", "quotas": ""}
    refused = await pages.send(f"keys/{prefix}/limit", **typed)
    again = order_of(refused.text, prefix)
    assert (refused.status_code, again["rpm"], again["quotas"]) == (400, "-7", "")
    assert refused.text.count('value="-7"') == 1
    done = await pages.send(f"keys/{prefix}/limit", **again | {"rpm": ""})
    assert done.status_code == 303, alert_of(done)
    rows = (await pages.ask("GET", "keys"))[1]["data"]
    assert next(one for one in rows if one["prefix"] == prefix)["terms"]["quotas"] == {}


@pytest.mark.parametrize("based_on", ["nonsense", "{}", '{"rpm": 1, "more": 2}'])
async def test_what_an_order_for_limits_was_made_from_may_be_no_nonsense(
    pages: Pages, based_on: str
) -> None:
    form = {"period": "month", "rpm": "4", "based_on": based_on}
    answer = await pages.send("users/bea/change", **form)
    if based_on == "{}":  # no limits, which is so
        assert answer.status_code == 303
    else:
        assert (answer.status_code, "based_on" in alert_of(answer)) == (400, True)


async def test_an_alias_that_somebody_has_set_since_is_not_overwritten(pages: Pages) -> None:
    await add_model(pages)
    await add_model(pages, "other")
    known = re.findall(r'name="known" value="([^"]*)"', (await pages.browse("models")).text)[0]
    form = {"alias": "x", "targets": "qwen=3", "known": html.unescape(known)}
    assert (await pages.ask("PUT", "aliases/x", {"targets": {"other": 1}}))[0] == 200
    stale = await pages.send("aliases", **form)
    said = html.unescape(alert_of(stale))
    assert (stale.status_code, "other null became 1" in said) == (409, True), said
    assert 'value="qwen=3"' in stale.text
    known = re.findall(r'name="known" value="([^"]*)"', stale.text)[0]
    again = await pages.send("aliases", **form | {"known": html.unescape(known)})
    assert again.status_code == 303, alert_of(again)


async def test_the_form_of_a_model_shows_no_secret_of_its_flags_and_keeps_it(pages: Pages) -> None:
    await add_model(pages, flags="--hf-token abc-1 --config.password=abc-2")
    page = (await pages.browse("models/qwen")).text
    assert "abc-" not in page
    (typed,) = re.findall(r"<textarea[^>]*>(.*?)</textarea>", page, re.DOTALL)
    spec = json.loads(html.unescape(typed)) | {"priority": 7}
    answer = await pages.send("models/qwen/change", spec=json.dumps(spec), based_on="1")
    assert answer.status_code == 303, alert_of(answer)
    kept = (await pages.backend.row("qwen")).spec
    assert (kept.priority, kept.flags[1:]) == (7, ("abc-1", "--config.password=abc-2"))
    for shown in ("models/qwen", "models", "audit"):
        assert "abc-" not in (await pages.browse(shown)).text
    spec["flags"][1] = "***"
    spec["flags"][0] = "--other-token"
    refused = await pages.send("models/qwen/change", spec=json.dumps(spec))
    assert (refused.status_code, "--other-token ***" in alert_of(refused)) == (400, True)


def form_for(page: str, path: str, label: str) -> dict[str, str]:
    """The hidden fields of the form with this button that goes to /ui/`path`."""
    (form,) = [
        one
        for one in re.findall(r"<form[^>]*>.*?</form>", page, re.DOTALL)
        if f'action="/ui/{path}"' in one and re.search(rf"<button[^>]*>\s*{label}", one)
    ]
    fields = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form)
    return {name: html.unescape(value) for name, value in fields}


async def test_an_alias_that_somebody_has_set_since_is_not_removed(pages: Pages) -> None:
    await add_model(pages)
    await add_model(pages, "other")
    await pages.ask("PUT", "aliases/x", {"targets": {"qwen": 3}})
    form = form_for((await pages.browse("models")).text, "aliases/remove", "Remove")
    await pages.ask("PUT", "aliases/x", {"targets": {"qwen": 3, "other": 1}})
    stale = await pages.send("aliases/remove", **form)
    said = html.unescape(alert_of(stale))
    assert (stale.status_code, "alias x: other null became 1" in said) == (409, True), said
    assert (await pages.ask("GET", "aliases"))[1]["data"] == {"x": {"qwen": 3, "other": 1}}
    again = await pages.send("aliases/remove", **form_for(stale.text, "aliases/remove", "Remove"))
    assert again.status_code == 303, alert_of(again)
    gone = await pages.send("aliases/remove", **form)
    assert (gone.status_code, "no alias" in alert_of(gone)) == (404, True)


async def test_a_model_that_somebody_has_changed_since_is_not_removed(pages: Pages) -> None:
    await add_model(pages)
    form = form_for((await pages.browse("models/qwen")).text, "models/qwen/remove", "Remove")
    await pages.ask("POST", "models/qwen/scale", {"min": 0, "max": 4})
    stale = await pages.send("models/qwen/remove", **form)
    said = html.unescape(alert_of(stale))
    assert (stale.status_code, "has revision 2" in said, '"max": 4' in said) == (409, True, True)
    again = form_for(stale.text, "models/qwen/remove", "Remove")
    assert (await pages.send("models/qwen/remove", **again)).status_code == 303
    assert (await pages.ask("GET", "models"))[1]["data"] == []


@pytest.mark.parametrize(
    ("label", "other", "changed"),
    [
        ("Disable", {"role": "admin"}, "role &#34;user&#34; became &#34;admin&#34;"),
        ("Make an admin", {"disabled": True}, "disabled false became true"),
        ("Make an admin", {"role": "admin"}, "role &#34;user&#34; became &#34;admin&#34;"),
    ],
)
async def test_a_user_whose_role_or_state_somebody_has_changed_since_stays_so(
    pages: Pages, label: str, other: dict[str, object], changed: str
) -> None:
    await pages.ask("POST", "users", {"name": "tom"})
    form = form_for((await pages.browse("users")).text, "users/tom/change", f"{label} tom")
    await pages.ask("PATCH", "users/tom", {"rpm": 5})
    assert (await pages.ask("PATCH", "users/tom", other))[0] == 200
    before = (await pages.ask("GET", "users"))[1]
    stale = await pages.send("users/tom/change", **form)
    assert (stale.status_code, changed in alert_of(stale)) == (409, True), alert_of(stale)
    assert (await pages.ask("GET", "users"))[1] == before


async def test_limits_that_somebody_has_set_since_keep_no_role_from_being_changed(
    pages: Pages,
) -> None:
    await pages.ask("POST", "users", {"name": "tom"})
    form = form_for((await pages.browse("users")).text, "users/tom/change", "Make an admin tom")
    await pages.ask("PATCH", "users/tom", {"rpm": 5})
    answer = await pages.send("users/tom/change", **form)
    assert answer.status_code == 303, alert_of(answer)
    body = {"rpm": 7, "based_on": {"rpm": 5, "role": "user"}}
    status, refused = await pages.ask("PATCH", "users/tom", body)
    assert (status, "role" in refused["error"]["message"]) == (409, True)
    body["based_on"] = {"rpm": 5, "role": "admin"}
    assert (await pages.ask("PATCH", "users/tom", body))[0] == 200
