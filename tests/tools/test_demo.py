"""The demo: what it shows is what happened, and it ends as it says."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from kvmig_tools.demo.__main__ import main
from kvmig_tools.demo.ledger import Ledger
from kvmig_tools.demo.run import Shown, marks
from kvmig_tools.demo.screen import Screen
from kvmig_tools.served import Served


def streamed(text: str, start: float = 0.0) -> Ledger:
    """A ledger with one token a character, a second apart."""
    ledger = Ledger()
    for number, character in enumerate(text):
        ledger.take(character, 1, start + number)
    return ledger


def test_tokens_are_not_shown_before_their_instance_is_known() -> None:
    ledger = streamed("ab")
    assert ledger.known() == []

    ledger.settle(0, "i0")

    assert ledger.known() == [("i0", "ab")]
    assert ledger.known() == []


def test_tokens_that_come_during_a_migration_wait_for_its_report() -> None:
    ledger = streamed("ab")
    ledger.settle(0, "i0")
    ledger.known()
    ledger.moving()
    for at, character in enumerate("cde", start=2):
        ledger.take(character, 1, at)
    assert ledger.known() == []
    assert not ledger.complete

    ledger.settle(3, "i1")

    assert ledger.known() == [("i0", "c"), ("i1", "de")]
    assert ledger.complete


def test_a_migration_that_was_aborted_changes_no_owner() -> None:
    ledger = streamed("ab")
    ledger.settle(0, "i0")
    ledger.moving()
    ledger.take("c", 1, 2)

    ledger.stayed()

    assert ledger.known() == [("i0", "abc")]


def test_a_chunk_of_several_tokens_is_cut_where_the_instances_changed() -> None:
    ledger = Ledger()
    ledger.take("abc", 3, 0.0)
    ledger.settle(0, "i0")
    ledger.settle(1, "i1")

    assert ledger.known() == [("i0", "a"), ("i1", "bc")]


def test_a_chunk_that_can_not_be_cut_is_its_first_tokens() -> None:
    ledger = Ledger()
    ledger.take("hello ", 2, 0.0)
    ledger.settle(0, "i0")
    ledger.settle(1, "i1")

    assert ledger.known() == [("i0", "hello ")]


def test_the_gap_is_the_time_since_the_token_before() -> None:
    ledger = streamed("abc")
    ledger.take("d", 1, 10.0)

    assert ledger.gap(3) == 8.0
    assert ledger.usual_gap() == 1.0
    assert ledger.gap(0) is None
    assert ledger.gap(4) is None


def test_moves_are_spread_over_the_stream() -> None:
    assert marks(2000, 3) == [20, 515, 1010]
    assert marks(10, 1) == [5]


def test_without_a_terminal_the_instances_are_named_in_plain_text() -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out))
    ledger = streamed("abcd")
    report = {
        "id": "m", "source": "i0", "destination": "i1", "state": "committed", "hit_blocks": 3,
        "output_tokens": 2, "stages": [{"blocks": 4}], "tail_blocks": 1, "bytes": 2048,
    }  # fmt: skip

    screen.show("i0", "ab")
    screen.show("i1", "cd")
    screen.end()
    screen.table(Shown(ledger, [report, {**report, "state": "aborted", "reason": "no_blocks"}]))

    text = out.getvalue()
    assert "\x1b" not in text
    assert "i0  ab\ni1  cd\n" in text
    assert ["i0", "→", "i1", "2", "1000.0", "ms", "5", "3", "2"] in [
        line.split() for line in text.splitlines()
    ]
    assert "aborted: no_blocks" in text
    assert "4 tokens, 1 migrations" in text


def test_a_server_that_is_not_there_is_said_in_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 1

    said = capsys.readouterr().err
    assert said.startswith("kvmig: the server at http://127.0.0.1:9 does not answer")
    assert said.count("\n") == 1


@pytest.mark.server
def test_the_demo_moves_a_stream_and_finds_its_text_unchanged(two_instances: Served) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "kvmig_tools.demo",
            "--url", two_instances.url, "--tokens", "300", "--moves", "3",
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "0003 0004" in done.stdout
    assert "300 tokens, 3 migrations" in done.stdout
    assert "equals the unmoved run's" in done.stdout
