"""What the tests of the house ask of each module, read in one pass over the source.

To parse `kvmig` takes a second or more, and each of these tests would parse it. Trees aren't kept:
they are large, and the garbage collector would walk them again and again in all later tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from scripts import prose

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvmig", "kvmig_tools")


class ModuleFacts(NamedTuple):
    """A module by its path below the root; imports: packages that are imported with it."""

    path: str
    imports: frozenset[str]
    places: tuple[prose.Place, ...]
    """Places that the prose ratchet counts; none outside of `kvmig`."""


@cache
def module_facts() -> tuple[ModuleFacts, ...]:
    """The modules of `kvmig` and `kvmig_tools`."""
    return tuple(
        _facts_of(file, str(file.relative_to(ROOT)))
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
    )


def _facts_of(file: Path, path: str) -> ModuleFacts:
    tree = ast.parse(file.read_text())
    places = prose.places_in_tree(path, tree) if path.startswith("kvmig/") else ()
    return ModuleFacts(path, frozenset(imports(tree.body)), tuple(places))


def imports(body: list[ast.stmt]) -> Iterator[str]:
    """Top-level packages that a module imports when it is imported."""
    for one in body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.dump(one.test):
            continue
        if isinstance(one, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in one.names)
        elif isinstance(one, ast.ImportFrom):
            yield str(one.module).partition(".")[0]
        elif isinstance(inner := getattr(one, "body", None), list):
            yield from imports(inner)
