"""Grammars that would take an engine long are refused before one has them, by the field's name."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.engines.grammar_bounds import (
    MOST_CHOICES,
    MOST_REGEX,
    GrammarTooLarge,
    check_grammar,
    check_regex,
)

USUAL = [
    r"[a-z]+", r"(\d{1,3}\.){3}\d{1,3}", r"\w+@\w+\.com\n", r"(yes|no|maybe)",
    r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", r"([a-z]+ ){1,20}\.", r"(a+?,){2,9}", r"[^]a)(]{2,4}",
    r"(?:ab|cd){1,50}", r"(?P<year>\d{4})-(?<month>\d{2})", r"\{\"a\": [a-z]{1,100}\}", "a{1,200}",
    r"((a{1,30}){1,30})", r"(?i)abc", r"(a|b)*c?", "(a?){1,200}", "(|a){2}", "a{1,90000}",
    r"([A-Z][a-z]{1,10} ?){1,50}",
]  # fmt: skip
HOSTILE = [
    "((((a{1,200}){1,200}){1,200}){1,200}){1,200}",
    "(((a{1,99}){1,99}){1,99})",
    "a{1,200}{1,200}",
    "(a{101,}){100}",
    "((?:x{0,90}){0,9}?){90}",
    "(?i:(a{101}b){1,200})",
    "(?x(a{1,200}){1,200}:)",
    "(?=(b|a{1,200}){1,200})b",
    "[)](a{1,200}){1,200}",
    r"[\]](a{1,200}){1,200}",
    r"\((a{1,200}){1,200}",
    ")(a{1,200}){1,200}",
    "(" * 2000,
    "(a{9}){" + "9" * 5000 + "}",
    "a" * (MOST_REGEX + 1),
]


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_expressions_are_let_through(pattern: str) -> None:
    check_regex("regex", pattern)


@pytest.mark.parametrize("pattern", HOSTILE)
def test_counted_repeats_within_each_other_are_refused(pattern: str) -> None:
    with pytest.raises(GrammarTooLarge, match=r"^regex has "):
        check_grammar(regex=pattern)
    with pytest.raises(GrammarTooLarge, match=r"^pattern in json has "):
        check_grammar(json={"properties": {"a": {"items": [{"pattern": pattern}]}}})
    with pytest.raises(GrammarTooLarge, match=r"^pattern in json has "):
        check_grammar(json=json.dumps({"anyOf": [{"pattern": pattern}]}))
    tag = json.dumps({"format": {"type": "regex", "pattern": pattern}})
    with pytest.raises(GrammarTooLarge, match=r"^pattern in structural_tag has "):
        check_grammar(structural_tag=tag)


def test_the_names_of_properties_may_be_expressions_too() -> None:
    with pytest.raises(GrammarTooLarge, match="patternProperties in json"):
        check_grammar(json={"patternProperties": {"(a{200}){200}": {}}})


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        ({"choice": ["a"] * (MOST_CHOICES + 1)}, "choice has 4097 entries, allowed are 4096"),
        ({"choice": ["a" * 70_000]}, "choice has 70000 characters, allowed are 65536"),
        ({"grammar": "a" * 70_000}, "grammar has 70000 characters, allowed are 65536"),
        ({"json": {"enum": ["a" * 140_000]}}, "json has 140013 bytes, allowed are 131072"),
        ({"json": json.dumps({"enum": ["a" * 140_000]})}, "json has 140"),
        ({"structural_tag": "[" * 140_000}, "structural_tag has 140000 bytes"),
    ],
)
def test_what_is_large_is_refused_by_its_size(grammar: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GrammarTooLarge, match=re.escape(sentence)):
        check_grammar(**grammar)


@pytest.mark.parametrize("schema", ["no JSON", "[" * 10_000, '"\\ud800"'])
def test_what_is_no_schema_is_the_engines_to_refuse(schema: str) -> None:
    check_grammar(json=schema)


@given(st.text(st.sampled_from("ab()[]{}|\\?*+^$.,0129:<=!"), max_size=60))
def test_any_text_is_read_to_its_end(pattern: str) -> None:
    with suppress(GrammarTooLarge):
        check_regex("regex", pattern)


def test_the_longest_expression_is_read_within_milliseconds() -> None:
    began = time.perf_counter()
    check_regex("regex", "(a|[b-c]{1,2})" * (MOST_REGEX // 14))
    assert time.perf_counter() - began < 1.0


RANGE = {"type": "number", "minimum": -1e300, "exclusiveMaximum": 1e300}


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (
            {"properties": {f"p{one}": RANGE for one in range(251)}},
            "json has 502 limits of numbers (minimum, maximum, multipleOf), allowed are 500",
        ),
        (
            {"items": [{"multipleOf": 7}] * 501},
            "json has 501 limits of numbers (minimum, maximum, multipleOf), allowed are 500",
        ),
        (
            {"anyOf": [{"type": "array", "maxItems": 10**6}, {"type": "array", "minItems": 5}]},
            "json has 1000005 as the sum of its minItems and maxItems, allowed are 10000",
        ),
        (
            {"anyOf": [{"type": "array", "minItems": one} for one in range(400)]},
            "json has 79800 as the sum of its minItems and maxItems, allowed are 10000",
        ),
    ],
)
@pytest.mark.parametrize("written", [json.dumps, dict])
def test_what_takes_much_memory_to_read_is_refused(
    schema: dict[str, Any], sentence: str, written: Any
) -> None:
    """A schema of 50 characters with a million items took 1.2 GB of a front end."""
    with pytest.raises(GrammarTooLarge, match=re.escape(sentence)):
        check_grammar(json=written(schema))


def test_names_of_properties_are_no_limits() -> None:
    names = {"minimum": {"type": "number"}, "maxItems": {"type": "integer", "minimum": 1}}
    check_grammar(json={"properties": {f"p{one}": {"properties": names} for one in range(500)}})
    check_grammar(json={"exclusiveMinimum": True, "maxItems": 10_000, "minimum": float("nan")})
