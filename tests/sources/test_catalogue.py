"""The catalogue of known models."""

from __future__ import annotations

from importlib import resources

import pytest

from kvmig.core.errors import ConfigError
from kvmig.fleet.spec import spec_of
from kvmig.sources.catalogue import ModelCatalogue, name_for, read_catalogue
from tests.support.catalogue_site import ONE


@pytest.fixture(scope="module")
def own() -> ModelCatalogue:
    text = (resources.files("kvmig.sources") / "catalogue.toml").read_text()
    return read_catalogue(text, "of kvmig")


def test_each_model_of_our_own_catalogue_can_be_added_under_its_name(own: ModelCatalogue) -> None:
    assert 30 <= len(own.models) <= 40
    assert own.left_out == ()
    for one in own.models:
        spec_of({"name": one.name, "source": one.source, "flags": one.flags})
        assert 0 < one.parameters < 200
        assert 0.2 < one.gb / one.parameters < 4.2, one.name


def test_a_search_finds_models_that_have_all_words(own: ModelCatalogue) -> None:
    found = [one.name for one in own.search(["QWEN3", "apache", "code"])]
    assert found == ["qwen3-coder:30b"]
    assert own.search(["no such model"]) == []
    assert own.find("Qwen3:0.6B") == own.models[0]


@pytest.mark.parametrize(
    "text",
    ["[[", "date = '2026'", f"date = {'9' * 5000}", f"date = {'[' * 100_000}"],
)
def test_what_is_no_catalogue_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the catalogue x can't be used: "):
        read_catalogue(text, "x")


GOOD = ONE.split("\n", 2)[2].replace("small", "good")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ONE + 'colour = "red"\n', "'small': Object contains unknown field `colour`"),
        (ONE.replace("hf:", "ftp:"), "'small': source is 'ftp:org/small', must be"),
        (ONE.replace("hf:org/", "path:/"), "'small': must have a name, and a source whose files"),
        (ONE.replace('name = "small"', "name = 7"), "7: Expected `str`, got `int`"),
        (ONE.replace('name = "small"\n', ""), "'entry 1': Object missing required field `name`"),
        (ONE.replace("gb = 2", "gb = nan"), "'small': parameters and gb must be finite"),
        (ONE + 'note = "a\\u001b[2J"\n', "'small': it has characters that can't be printed"),
        (ONE + 'flags = "--a \'"\n', "'small': flags: No closing quotation"),
    ],
)
def test_an_entry_that_cannot_be_used_is_left_out_by_name_and_the_others_are_there(
    text: str, said: str
) -> None:
    found = read_catalogue(text + GOOD, "x")
    assert [one.name for one in found.models] == ["good"]
    (why,) = found.left_out
    assert why.startswith(said)


def test_the_first_of_two_entries_with_one_name_counts() -> None:
    found = read_catalogue(ONE + GOOD + GOOD.replace("org/good", "org/other"), "x")
    assert [one.source for one in found.models] == ["hf:org/small", "hf:org/good"]
    assert found.left_out == ("'good': must be there once",)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hf:Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("hf:gpt2@main", "gpt2"),
        ("https://example.com/models/My Model/", "my-model"),
        ("https://example.com/tiny.Q4.gguf", "tiny.q4"),
        ("s3://bucket/a/b", "b"),
    ],
)
def test_a_source_gives_its_model_a_name(source: str, name: str) -> None:
    assert name_for(source) == name
    spec_of({"name": name, "source": source})
