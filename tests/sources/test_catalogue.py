"""The catalogue of known models."""

from __future__ import annotations

from importlib import resources

import pytest

from kvmig.core.errors import ConfigError
from kvmig.fleet.spec import spec_of
from kvmig.sources.catalogue import ModelCatalogue, name_for, read_catalogue

ONE = """
date = "2026-11-27"
[[models]]
name = "small"
source = "hf:org/small"
parameters = 1
gb = 2
licence = "MIT"
"""


@pytest.fixture(scope="module")
def own() -> ModelCatalogue:
    text = (resources.files("kvmig.sources") / "catalogue.toml").read_text()
    return read_catalogue(text, "of kvmig")


def test_each_model_of_our_own_catalogue_can_be_added_under_its_name(own: ModelCatalogue) -> None:
    assert 30 <= len(own.models) <= 40
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
    ("text", "said"),
    [
        ("[[", "the catalogue x can't be used: "),
        (ONE + 'colour = "red"\n', "unknown field `colour`"),
        (ONE.replace("hf:", "ftp:"), "the catalogue x: small: source is 'ftp:org/small', must be"),
        (ONE.replace("hf:org/", "path:/"), "'small' must be there once, with a source whose files"),
        (ONE + ONE.split("\n", 2)[2], "'small' must be there once"),
        (ONE.replace("gb = 2", "gb = nan"), "small: parameters and gb must be finite"),
        (ONE + 'note = "a\\u001b[2J"\n', "'small' has characters that can't be printed"),
        (f"date = {'9' * 5000}", "the catalogue x can't be used: Exceeds the limit"),
        (f"date = {'[' * 100_000}", "the catalogue x can't be used: "),
        (ONE + 'flags = "--a \'"\n', "the catalogue x: small: flags: No closing quotation"),
    ],
)
def test_a_wrong_catalogue_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_catalogue(text, "x")
    assert said in str(refused.value)


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
