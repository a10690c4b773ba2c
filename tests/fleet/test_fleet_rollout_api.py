"""The API's orders to roll-outs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvmig.fleet.spec import ModelSpec
from tests.support.fleet_api import Api, said
from tests.support.fleet_stores import Place


@pytest.fixture
async def api(place: Place) -> AsyncIterator[Api]:
    made = Api(place)
    await made.backend.stored(made.store.open)
    await made.ask("POST", "models", made.model())
    yield made
    await made.close()


async def change(api: Api, flags: str, **rollout: Any) -> tuple[int, dict[str, Any]]:
    models = [api.model(flags=flags)]
    return await api.ask("POST", "apply", {"fleet": {"models": models}, "rollout": rollout})


async def order(api: Api, action: str, **more: Any) -> tuple[int, dict[str, Any]]:
    return await api.ask("POST", "models/a/b/rollout", {"action": action, **more})


async def test_a_model_without_one_says_so(api: Api) -> None:
    found = await api.ask("GET", "models/a/b/rollout")
    assert found == (200, {"name": "a/b", "rollout": None})
    assert (await api.ask("GET", "models/nobody/rollout"))[0] == 404


@pytest.mark.parametrize(
    ("rollout", "sentence"),
    [
        ({"canary": [50, 10]}, "canary is 50,10, must be at most 20 rising percentages"),
        ({"hold_s": -1}, "hold_s is -1, must be 0 to 604800"),
        ({"deadline_s": 1e9}, "deadline_s is 1e+09, must be 0 to 604800"),
    ],
)
async def test_terms_that_can_not_be_kept_are_refused_and_change_nothing(
    api: Api, rollout: dict[str, Any], sentence: str
) -> None:
    status, told = said(await change(api, "--seed 1", **rollout))
    assert status == 400
    assert sentence in told
    assert (await api.backend.row("a/b")).revision == 1


async def test_an_order_without_a_roll_out_is_refused(api: Api) -> None:
    for action in ("pause", "resume", "promote"):
        assert said(await order(api, action)) == (400, "model 'a/b' has no roll-out under way")


async def test_going_back_makes_a_revision_as_the_one_before_with_what_else_was_changed(
    api: Api,
) -> None:
    assert (await change(api, "--seed 1", canary=[10]))[0] == 200
    await api.ask("POST", "models/a/b/scale", {"min": 0, "max": 3})
    assert (await order(api, "undo"))[0] == 200
    row = await api.backend.row("a/b")
    assert (row.revision, row.spec.flags, row.spec.instances.max) == (4, (), 3)
    status, told = said(await order(api, "undo", revision=1))
    assert (status, told) == (400, "model a/b is as that revision already")
    assert said(await order(api, "undo", revision=9))[0] == 400


async def test_going_back_is_refused_where_it_would_undo_what_came_while_flags_were_checked(
    api: Api,
) -> None:
    assert (await change(api, "--seed 1"))[0] == 200
    check = api.backend.check

    async def check_long(spec: ModelSpec, sizes: bool) -> None:
        await check(spec, sizes)
        api.backend.check = check
        await api.ask("POST", "models/a/b/scale", {"min": 0, "max": 3})

    api.backend.check = check_long
    status, told = said(await order(api, "undo"))
    assert status == 409
    assert "has revision 3 by" in told
    assert "this order was made from revision 2: instances" in told
    assert (await api.backend.row("a/b")).spec.instances.max == 3
    assert (await order(api, "undo"))[0] == 200
    row = await api.backend.row("a/b")
    assert (row.spec.flags, row.spec.instances.max) == ((), 3)
