"""What clients got beside the ledger: what is found wrong, and what a fault excuses."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from bench import ledger
from bench.ledger import WRONG, Asked, Clients, Done, Fault, Nemesis, Row, delivered, judge, lost_of
from kvmig.accounts.keys import QUOTA_WORDS
from kvmig.frontend.grant_link import AWAY
from kvmig_tools.fleet import FleetUp

KILLED = Done("front end", 5.0)


def asked(**more: Any) -> Asked:
    """A call from 0 s to 4 s that got a token a second, four in all."""
    got = [(float(second), second) for second in range(1, 5)]
    given = {"began": 0.0, "ended": 4.0, "got": got, "text": "1234", "fate": "whole"}
    return Asked(**{"call_id": "c", "key": "k", "tokens": 10, "told": (7, 4), **given, **more})


def row(**more: Any) -> Row:
    whole = Row(call_id="c", key="k", status="finished", prompt=7, output=4, moves=0)
    return whole._replace(**more)


def wrong(one: Asked, rows: list[Row], *faults: Done) -> dict[str, float]:
    """Of the figures that must be 0, those that aren't."""
    figures, _ = judge([one], rows, faults)
    return {what: figures[what] for what in WRONG if figures.get(what)}


def test_a_row_that_says_what_its_client_got_is_right() -> None:
    assert not wrong(asked(), [row()])


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([], "missing"),
        ([row(output=3)], "missing"),
        ([row(output=5)], "beyond the answer"),
        ([row(output=2), row(output=2)], "rows twice"),
        ([row(key="x")], "other key's"),
        ([row(prompt=8)], "other prompt"),
        ([row(status="running")], "never ended"),
        ([row(), row(call_id="d")], "rows of no client"),
    ],
)
def test_what_is_wrong_is_found(rows: list[Row], what: str) -> None:
    assert list(wrong(asked(), rows)) == [what]


def test_a_call_that_was_cut_off_may_have_more_in_the_ledger_but_no_more_than_it_asked_for() -> (
    None
):
    cut = asked(fate="left", told=None)
    assert not wrong(cut, [row(output=10)])
    assert wrong(cut, [row(output=11)]) == {"beyond what was asked": 1}


def test_a_stream_that_its_quota_ended_has_just_its_tokens_in_the_ledger() -> None:
    unpaid = asked(fate="unpaid", told=None)
    assert not wrong(unpaid, [row()])
    assert wrong(unpaid, [row(output=5)]) == {"beyond the answer": 1}


def test_of_a_quota_prompts_are_delivered_whose_answers_began() -> None:
    refused = asked(fate="unpaid", told=None, got=[], text="")
    assert delivered([asked(), asked(), refused], 7) == 22


def test_a_killed_front_end_excuses_what_it_had_not_written_yet() -> None:
    figures, _ = judge([asked()], [row(output=3)], [KILLED])
    assert figures["longest that a front end lost, s"] == 1.0
    assert not wrong(asked(), [row(output=3)], KILLED)
    assert wrong(asked(), [row(output=1)], KILLED) == {"missing": 3}


def test_a_quota_does_not_pay_for_what_a_killed_front_end_had_not_counted() -> None:
    one = asked(fate="cut")
    assert lost_of([one], [row(output=3)], [KILLED], 7) == 1
    assert lost_of([one], [row(output=3)], [], 7) == 0
    assert lost_of([one], [row()], [KILLED], 7) == 0
    assert lost_of([asked(began=3.0, got=[(4.0, 4)])], [], [KILLED], 7) == 4 + 7


def test_a_killed_server_excuses_nothing() -> None:
    server = Done("server", 3.0)
    assert wrong(asked(), [row(output=3)], server) == {"missing": 1}
    cut = asked(fate="cut", told=None)
    assert wrong(cut, [row()], server) == {"failed without a reason": 1}
    assert not wrong(cut, [row()], Done("proxy", 3.0))


class Answering:
    """Clients whose calls end for these reasons, then because the quota is used up."""

    def __init__(self, *whys: str) -> None:
        self._whys = itertools.chain(whys, itertools.repeat(f"the key{QUOTA_WORDS}10 is used up"))

    async def call(self, key: str, tokens: int, start: int) -> Asked:
        why = next(self._whys)
        return asked(fate="unpaid" if why else "whole", why=why)


async def test_a_quota_is_used_up_when_its_clients_are_told_so_not_while_nobody_grants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "new_key", lambda *_, **__: "kv-prefix-secret")
    clients = cast("Clients", Answering("", AWAY, ""))
    calls = await ledger.use_up(cast("FleetUp", None), clients, 1, 10)
    assert [one.fate for one in calls] == ["whole", "unpaid", "whole", "unpaid"]


async def test_the_first_fault_kills_a_server_that_has_not_died_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Fault] = []

    async def note(self: Nemesis, fault: Fault) -> None:
        done.append(fault)

    monkeypatch.setattr(Nemesis, "_do", note)
    for seed in range(5):
        await Nemesis(cast("FleetUp", None), cast("Clients", None), seed).run(0.0)
    assert done == ["server"] * 5
