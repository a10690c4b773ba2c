"""Which priority class a call is of, and which a key may not use."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvmig.core.priorities import NORMAL, PriorityClass
from kvmig.proxy.priority_choice import ChosenPriority, choose_class
from kvmig.proxy.refusals import ProxyRefusal
from tests.support.proxy_site import Site

HIGH, LOW = PriorityClass("high", -1), PriorityClass("low", 9)
CLASSES = (HIGH, NORMAL, LOW)


@pytest.mark.parametrize(
    ("allowed", "header", "field", "chosen"),
    [
        (None, None, None, ChosenPriority(5)),
        (None, "high", None, ChosenPriority(-1)),
        (("low", "normal"), None, None, ChosenPriority(0, 0)),
        (("high", "low"), None, None, ChosenPriority(9, 9)),
        (("high", "low"), "high", "low", ChosenPriority(-1, -1)),
        (("low",), None, 9, ChosenPriority(9, 9)),
    ],
)
def test_the_class_is_what_the_call_names_else_one_that_the_key_may_use(
    allowed: tuple[str, ...] | None, header: str | None, field: Any, chosen: ChosenPriority
) -> None:
    assert choose_class(CLASSES, 5, allowed, header, field) == chosen


@pytest.mark.parametrize(
    ("allowed", "header", "field", "status", "sentence"),
    [
        (("low", "normal"), "high", "low", 403, "class high, it may use low, normal"),
        (("low",), None, -1, 403, "the API key may not use the priority class high, it may use"),
        (("other",), None, None, 403, "class normal, it may use other"),
        (("low",), None, "first", 400, "priority is 'first', must be high (-1) or"),
    ],
)
def test_a_class_that_the_key_may_not_use_is_refused(
    allowed: tuple[str, ...], header: str | None, field: Any, status: int, sentence: str
) -> None:
    with pytest.raises(ProxyRefusal, match=re.escape(sentence)) as refused:
        choose_class(CLASSES, 0, allowed, header, field)
    assert refused.value.status == status


async def test_a_key_runs_in_its_own_classes_only_whatever_a_call_says(door: Site) -> None:
    given, _ = door.add_key(classes=("low",))
    twice = [("x-vllm-priority", "low"), ("x-vllm-priority", "high")]
    async with door.deployment() as there:
        door.ready(classes=CLASSES)
        named = await door.ask({"model": "count", "priority": "high"}, given=given)
        by_header = await door.ask(headers={"x-vllm-priority": "-1"}, given=given)
        assert there.got == []
        assert (await door.ask(given=given)).status_code == 200
        async with door.client(given) as client:
            path, body = "/v1/chat/completions", {"model": "count"}
            assert (await client.post(path, json=body, headers=twice)).status_code == 200
    assert {named.status_code, by_header.status_code} == {403}
    assert named.json()["error"]["code"] == "class_not_allowed"
    assert {one.headers["x-vllm-priority"] for one in there.got} == {"9"}
