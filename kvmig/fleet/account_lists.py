"""Lists of users and keys: which part of them is asked for, and what was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Select, and_, or_, true

Row = TypeVar("Row")


class ListWindow(NamedTuple):
    """The part of a list that is asked for."""

    find: str = ""
    """Words; a row is found if each of them is in one of its names, in small letters or large."""
    limit: int | None = None
    """Most rows; None: all."""
    skip: int = 0
    """Rows to leave out, from the first one on."""


class FoundRows(NamedTuple, Generic[Row]):
    """A part of a list."""

    rows: list[Row]
    total: int
    """Rows of the whole list, those outside of the window included."""


def with_words(find: str, columns: Sequence[ColumnElement[str]]) -> ColumnElement[bool]:
    """A condition: each word is in one of the columns."""
    words = find.split()
    found = (or_(*(one.icontains(word, autoescape=True) for one in columns)) for word in words)
    return and_(true(), *found)


def in_window(wanted: Select[Any], window: ListWindow) -> Select[Any]:
    """The rows of a query that are in the window."""
    if window.limit is not None:
        wanted = wanted.limit(window.limit)
    return wanted.offset(window.skip) if window.skip else wanted
