"""The `main` of child processes: their words, and what they say when they fail."""

from __future__ import annotations

import io
import os

import msgspec
import pytest

from kvmig.core.errors import StartupError
from kvmig.process.child import StartAnnouncement, announce
from kvmig.process.child_main import run_child


class Launch(msgspec.Struct):
    name: str


@pytest.fixture(autouse=True)
def launch_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"name": "a"}\n')))
    monkeypatch.setattr("kvmig.process.child.lead_group", lambda: None)


@pytest.mark.parametrize("words", [[], ["a"], ["a", "b"], ["1", "2"], ["a", "1", "2"], ["1"] * 5])
def test_wrong_words_are_answered_with_the_usage(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    counts = (3,) if words != ["a", "1", "2"] else (3, 1)
    assert run_child(words, "it [TITLE] A B C", Launch, print, counts=counts) == 2
    assert capfd.readouterr().err == "usage: python -m it [TITLE] A B C\n"


@pytest.mark.parametrize("title", [[], ["title"], ["7"]])
def test_a_child_runs_with_its_launch_document_and_its_descriptors(
    title: list[str],
) -> None:
    got: list[object] = []
    words = [*title, "3", "4", "5"]
    assert run_child(words, "it", Launch, lambda *given: got.extend(given), counts=(3, 1)) == 0
    assert got == [Launch("a"), 3, 4, 5]


def fail(launch: Launch, announced: int) -> None:
    raise StartupError(f"{launch.name} has no memory")


def test_a_child_that_cannot_start_announces_why() -> None:
    read, written = os.pipe()
    assert run_child([str(written)], "it", Launch, fail) == 1
    with os.fdopen(read) as announced:
        said = msgspec.json.decode(announced.readline(), type=StartAnnouncement)
    assert said == StartAnnouncement(failed="a has no memory")


def test_a_child_that_fails_after_it_was_ready_says_so_on_stderr(
    capfd: pytest.CaptureFixture[str],
) -> None:
    read, written = os.pipe()

    def serve_then_fail(launch: Launch, announced: int) -> None:
        announce(announced, StartAnnouncement(endpoint="here"))
        fail(launch, announced)

    assert run_child([str(written)], "it", Launch, serve_then_fail) == 1
    os.close(read)
    assert capfd.readouterr().err == "kvmig: a has no memory\n"
