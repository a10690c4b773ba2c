"""How large a grammar may be that a client's answer must follow. Pure.

Engines compile grammars, and look into them for each token. A few characters may take them minutes:
counted repeats within counted repeats. What these bounds let through and is slow nevertheless, the
engine's own budget of time ends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

MOST_REGEX = 8192
"""Characters of a regular expression, also of a `pattern` within a schema."""
MOST_TEXT = 65_536
"""Characters of a grammar, and of all choices together."""
MOST_CHOICES = 4096
MOST_SCHEMA = 131_072
"""Bytes of a JSON schema, or of a structural tag, as JSON."""
MOST_IN_CALL = 1 << 20
"""Bytes of a call's grammar, times the sequences that each follow it: an engine reads each."""
MOST_LIMITS = 500
"""Limits of numbers in a schema: a range of floats may take 0.3 MB while xgrammar reads it."""
MOST_ITEMS = 10_000
"""Least and greatest numbers of a schema's items, added up: llguidance takes 1.2 kB for each."""
MOST_REPEATS = 10_000
"""Counts of repeats within each other, multiplied."""
MOST_DEPTH = 100
"""Groups within each other."""


class GrammarTooLarge(ValueError):
    """field: to blame."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(f"{field} {sentence}")
        self.field = field


def check_grammar(
    *,
    json: str | dict[str, Any] | None = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    structural_tag: str | None = None,
) -> None:
    """Raises GrammarTooLarge, which names the field, its value and what is allowed."""
    if regex is not None:
        check_regex("regex", regex)
    if grammar is not None:
        _most("grammar", "characters", len(grammar), MOST_TEXT)
    if choice is not None:
        _most("choice", "entries", len(choice), MOST_CHOICES)
        _most("choice", "characters", sum(map(len, choice)), MOST_TEXT)
    for field, schema in (("json", json), ("structural_tag", structural_tag)):
        if schema is not None:
            _check_schema(field, schema)


def check_sequences(size: int, sequences: int) -> None:
    """Raises GrammarTooLarge. size: of the grammar, in bytes."""
    if size * sequences > MOST_IN_CALL:
        raise GrammarTooLarge(
            "structured_outputs",
            f"has {size} bytes for each of {sequences} sequences,"
            f" allowed are {MOST_IN_CALL} in all",
        )


def _check_schema(field: str, schema: str | dict[str, Any]) -> None:
    try:
        text = schema.encode() if isinstance(schema, str) else msgspec.json.encode(schema)
        _most(field, "bytes", len(text), MOST_SCHEMA)
        known = msgspec.json.decode(text) if isinstance(schema, str) else schema
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError, TypeError):
        return  # no schema: the engine says so
    limits = items = 0
    for one in _objects(known):
        limits += sum(_is_number(one.get(name)) for name in _LIMIT_FIELDS)
        items += sum(int(one[name]) for name in _ITEM_FIELDS if _is_number(one.get(name)))
        for where, pattern in _patterns(one):
            check_regex(f"{where} in {field}", pattern)
    _most(field, "limits of numbers (minimum, maximum, multipleOf)", limits, MOST_LIMITS)
    _most(field, "as the sum of its minItems and maxItems", items, MOST_ITEMS)


_PATTERN_FIELDS = ("pattern", "regex")
"""Fields with patterns, of schemas and of structural tags."""

_LIMIT_FIELDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ITEM_FIELDS = ("minItems", "maxItems")


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and each object in it, to any depth."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            left += one.values()
            yield one


def _patterns(one: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields an object's regular expressions, each with the name of its field."""
    for name in _PATTERN_FIELDS:
        if isinstance(one.get(name), str):
            yield name, one[name]
    if isinstance(named := one.get("patternProperties"), dict):
        yield from (("patternProperties", key) for key in named if isinstance(key, str))


def _is_number(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _most(field: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise GrammarTooLarge(field, f"has {count} {what}, allowed are {most}")


# -- regular expressions

_GROUP = re.compile(r"\?<?[=!]|(?:\?(?:[A-Za-z-]*:|P?<\w+>|[A-Za-z-]+(?=\))))?")
"""How a group begins, after its bracket."""


def check_regex(field: str, pattern: str) -> None:
    """Raises GrammarTooLarge for one that is long, or whose counts multiply to too much."""
    _most(field, "characters", len(pattern), MOST_REGEX)
    _Reader(field, pattern).read()


class _Reader:
    """Reads an expression once, from left to right, and multiplies the counts of repeats within
    each other. What is wrong in it, the engine says."""

    def __init__(self, field: str, pattern: str) -> None:
        self._field = field
        self._pattern = pattern
        self._at = 0

    def read(self) -> None:
        """Read the whole expression."""
        while self._at < len(self._pattern):
            self._alternatives(0)
            self._at += 1  # a closing bracket that nothing has opened

    def _alternatives(self, depth: int) -> int:
        if depth > MOST_DEPTH:
            raise GrammarTooLarge(self._field, f"has over {MOST_DEPTH} groups within each other")
        repeats = 1
        while self._at < len(self._pattern) and self._pattern[self._at] != ")":
            repeats = max(repeats, self._repeated(self._atom(depth)))
        return repeats

    def _atom(self, depth: int) -> int:
        character = self._pattern[self._at]
        self._at += 1
        match character:
            case "\\":
                self._at += 1
            case "[":
                self._skip_set()
            case "(":
                begun = _GROUP.match(self._pattern, self._at)
                assert begun is not None  # it matches nothing, too
                self._at = begun.end()
                repeats = self._alternatives(depth + 1)
                self._at += 1
                return repeats
        return 1

    def _skip_set(self) -> None:
        first = self._at + self._pattern.startswith("^", self._at)
        self._at = first
        while self._at < len(self._pattern):
            if self._pattern[self._at] == "]" and self._at > first:
                break
            self._at += 1 + (self._pattern[self._at] == "\\")
        self._at += 1

    def _repeated(self, repeats: int) -> int:
        while (count := self._count()) is not None:
            inner, repeats = repeats, repeats * max(1, count)
            if inner > 1 and repeats > MOST_REPEATS:
                sentence = f"has repeats within repeats, {repeats} in all, at most {MOST_REPEATS}"
                raise GrammarTooLarge(self._field, sentence)
        return repeats

    def _count(self) -> int | None:
        """The count of a quantifier, if one is next; 1: it isn't counted."""
        rest = self._pattern[self._at : self._at + 1]
        if rest and rest in "*+?":
            self._at += 1
            return 1
        if rest != "{":
            return None
        closing = self._pattern.find("}", self._at)
        least, _, most = self._pattern[self._at + 1 : closing].partition(",")
        if closing < 0 or not (least + most).replace(" ", "").isdecimal():
            return None
        self._at = closing + 1
        return int((most.strip() or least.strip() or "1")[:18])
