"""The wording of the documents and of `kvmig/` only gets plainer: a ratchet over patterns."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from scripts import prose
from tests.support.module_facts import module_facts


def found(text: str) -> list[str]:
    return [place.pattern for place in prose.places_in_text("docs", "page.md", 1, text)]


def opened(docstring: str) -> list[str]:
    source = f'def method():\n    """{docstring}"""\n'
    return [place.pattern for place in prose.places_in_module("module.py", source)]


def test_no_count_of_wording_rises_and_one_that_falls_is_written_down() -> None:
    in_modules = (place for module in module_facts() for place in module.places)
    now = prose.counts(chain(prose.places_in_documents(), in_modules))
    risen, fallen = prose.changes(now, prose.accepted())
    assert not risen, f"{risen}: say it plainly; `python -m scripts.prose` prints the places"
    assert not fallen, f"{fallen}: plainer than before, run `{prose.COMMAND}`"


def test_a_risen_and_a_fallen_count_are_found() -> None:
    held = {"docs": {"anew": 1, "tell": 3}}
    risen, fallen = prose.changes({"docs": {"anew": 2, "tell": 2}}, held)
    assert risen == ["docs, 'anew': 2, was 1"]
    assert fallen == ["docs, 'tell': 2, was 3"]


def test_a_risen_count_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = tmp_path / "prose.json"
    held.write_text('{"docs": {"tell": 1}, "kvmig": {}}')
    monkeypatch.setattr(prose, "TARGET", held)
    told = prose.Place("docs", "tell", "page.md:1", "told")
    monkeypatch.setattr(prose, "places", lambda: iter([told, told]))
    assert prose.main(["--write"]) == 1
    assert "docs, 'tell': 2, was 1" in capsys.readouterr().err
    assert held.read_text() == '{"docs": {"tell": 1}, "kvmig": {}}'
    monkeypatch.setattr(prose, "places", lambda: iter(()))
    assert prose.main(["--write"]) == 0
    assert prose.accepted()["docs"]["tell"] == 0


def test_wording_is_found_across_lines_but_not_in_code() -> None:
    assert found("All of them, but\nfor one.") == ["but for"]
    assert found("`tell` and\n```\nwhoever\n```") == []


def test_a_rate_without_a_preposition_is_found_and_one_with_per_is_not() -> None:
    assert found("88 bytes a request") == ["per without a preposition"]
    assert found("88 bytes per request, and it moves a request") == []


def test_a_docstring_that_leaves_out_its_noun_is_found() -> None:
    assert opened("Of one call.") == ["opens with a preposition"]
    assert opened("It is gone.") == ["opens with a pronoun"]
    assert opened("The call's id.") == []


def test_a_place_has_its_file_and_line() -> None:
    (place,) = prose.places_in_text("docs", "page.md", 1, "first\nstarts anew")
    assert place.where == "page.md:2"
