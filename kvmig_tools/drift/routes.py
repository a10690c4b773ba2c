"""Routes of an engine's server: each is open to clients by our table, or known to be closed."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from kvmig.core.errors import ConfigError
from kvmig_tools.drift.contract import Contract
from kvmig_tools.drift.source import Tree

METHODS = ("get", "post", "put", "delete", "patch", "head", "options", "websocket")
NAMED = ("api_route", "add_api_route", "add_route", "add_websocket_route", "mount")
"""Other ways to add a route, whose methods may be named beside it."""
ANY = "ANY"
_CALLS = re.compile(rf"\.({'|'.join((*METHODS, *NAMED))})\(\s*[\"'f]?[\"'/]?")
_SEGMENT = re.compile(r"\{[^}]*\}")

Route = tuple[str, str]
"""Method and path, `{id}` for each segment that is any."""


def unknown_routes(contract: Contract, tree: Tree) -> list[tuple[str, Route]]:
    """Those that are in no list of ours, with the files that have them. Raises ConfigError."""
    if contract.routes is None:
        return []
    name, folder = contract.routes
    try:
        known: frozenset[Route] = importlib.import_module(name).KNOWN_ROUTES
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{contract.file}: routes: {error}") from error
    base = tree.folder / tree.package / folder
    found = {
        (str(path.relative_to(tree.folder)), route)
        for path in sorted(base.rglob("*.py"))
        for route in routes_of(path)
    }
    return sorted((file, route) for file, route in found if route not in known)


def routes_of(path: Path) -> Iterator[Route]:
    """Of one file."""
    text = path.read_text("utf-8")
    if _CALLS.search(text) is None:
        return
    for node in ast.walk(ast.parse(text)):
        decorators = getattr(node, "decorator_list", [])
        calls = [one for one in decorators if isinstance(one, ast.Call)]
        for call in calls:
            yield from _added(call, (*METHODS, *NAMED))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _added(node.value, NAMED)


def _added(call: ast.Call, ways: Collection[str]) -> Iterator[Route]:
    how = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    given = [*call.args, *(one.value for one in call.keywords if one.arg == "path")]
    if how not in ways or not given:
        return
    path = _path(given[0])
    if path is None:
        return
    if how in METHODS:
        yield how.upper(), path
        return
    methods = next((one.value for one in call.keywords if one.arg == "methods"), None)
    try:
        named: list[str] = [ANY] if methods is None else ast.literal_eval(methods)
    except ValueError:  # computed
        named = [ANY]
    for one in named:
        yield one.upper(), path


def _path(node: ast.expr) -> str | None:
    """As text; of one that is computed, how. None: it is no path."""
    if isinstance(node, ast.Constant):
        text = node.value
        if not isinstance(text, str) or not text.startswith("/"):
            return None
        return _SEGMENT.sub("{id}", text)
    return ast.unparse(node)
