"""What bench.fleet_node_chaos finds in the ledger."""

from __future__ import annotations

from typing import Any

import pytest

from bench.fleet_chaos import Call
from bench.fleet_node_chaos import wrong_in_ledger


def call(**more: Any) -> Call:
    given = {"model": "a", "began": 0.0, "start": 17, "tokens": 10, "call_id": "c", **more}
    return Call(**given)


@pytest.mark.parametrize(
    ("one", "rows", "fine"),
    [
        (call(fate="right"), [("c", 10, "finished")], True),
        (call(fate="right"), [], False),
        (call(fate="right"), [("c", 9, "finished")], False),
        (call(fate="right"), [("c", 10, "finished")] * 2, False),
        (call(fate="right"), [("c", 10, "cut")], False),
        (call(fate="told", text="abc"), [("c", 3, "cut")], True),
        (call(fate="told", text="abc"), [("c", 2, "cut")], False),
        (call(fate="told", text=""), [], True),
        (call(fate="left", text="abc"), [("c", 10, "cut")], True),
        (call(fate="left", text="abc"), [("c", 11, "cut")], False),
    ],
)
def test_the_ledger_has_what_clients_have_got(
    one: Call, rows: list[tuple[str, int, str]], fine: bool
) -> None:
    assert (wrong_in_ledger([one], rows) == []) is fine
