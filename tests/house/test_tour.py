"""docs/tour.md is true: what it names exists, and its journeys are numbered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvmig_tools.drift.source import Tree

ROOT = Path(__file__).resolve().parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text()
NAMED = sorted(set(re.findall(r"`(kvmig/[\w/]+\.py)`\s+`([\w.]+)`", TOUR)))
TREE = Tree(ROOT, "kvmig")


def hops(journey: str) -> list[int]:
    """The numbers of one journey's lines."""
    text = TOUR.partition(f"## {journey}\n")[2].partition("\n## ")[0]
    return [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[" ".join(one) for one in NAMED])
def test_what_the_tour_names_is_there(file: str, name: str) -> None:
    module = file.removesuffix(".py").replace("/", ".")
    owner, _, method = name.partition(".")
    assert TREE.find(module, owner) is not None
    defined = rf"^(async )?(class|def) {owner}\b"
    assert re.search(defined, (ROOT / file).read_text(), re.MULTILINE), "it is imported there"
    if method:
        cls = TREE.cls(module, owner)
        assert cls is not None
        assert method in TREE.names(cls)


def test_every_file_that_the_tour_names_is_there() -> None:
    missing = [
        one for one in re.findall(r"`(kvmig/[\w/]+\.py)`", TOUR) if not (ROOT / one).exists()
    ]
    assert missing == []


JOURNEYS = ["One request", "One migration", "One round", "A cold fleet request"]


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_journey_is_numbered_without_a_gap(journey: str) -> None:
    found = hops(journey)
    assert len(found) > 5
    assert found == list(range(1, len(found) + 1))
