"""Names that a reader can search for: what `kvmig` may not have more of than it has.

Each list of exceptions may only shrink: a name that is mended must leave its list.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "kvmig"

VAGUE = frozenset(
    (
        "again",
        "ask",
        "asks",
        "be",
        "beat",
        "fit",
        "gives",
        "go",
        "go_on",
        "goes_on",
        "hear",
        "heard",
        "hears",
        "knows",
        "look",
        "note",
        "of",
        "one",
        "take",
        "tell",
        "tells",
        "told",
        "turn",
        "verdict",
        "want",
    )
)
"""Names of methods that say neither what is done nor with what."""

MESSAGES = {
    "Abort", "Aborted", "Bundle", "Chunk", "Commit", "Committed", "Discard", "Expect", "Fence",
    "Fenced", "Hello", "Members", "Migrate", "Migrated", "Outputs", "Overrun", "Pairs", "Refused",
    "Reserve", "Reserved", "Resolve", "Resolved", "Submit", "Welcome",
}  # fmt: skip
"""Messages of the control sockets, which are called as on the wire."""
SCHEMAS = {"Completion", "Message", "Model", "Models", "Problem", "Usage"}
"""Bodies and answers that clients' code knows by these names of `/openapi.json`."""
IMPORTED = {"Engine", "Llumlet", "Migrator", "Policy"}
"""What programs import that embed kvmig."""
ONE_WORD = MESSAGES | SCHEMAS | IMPORTED
"""Public classes with a name of one word."""

ERROR_NAME = r"(?:\w+\.)*[A-Z]\w+"
PROMISE = re.compile(rf"\b[Rr]aises? ((?:{ERROR_NAME}(?:, (?:and |or )?| and | or )?)+)")
"""A docstring that says what is raised."""
NO_ERRORS = {"Ray"}
"""Names after "Raises" that are none: "Raises Ray's errors"."""


@cache
def trees() -> dict[Path, ast.Module]:
    """The package, file by file."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def classes() -> tuple[ast.ClassDef, ...]:
    """The public classes of the package."""
    return tuple(
        node
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def last_word(node: ast.AST) -> str:
    """The name of a class as it is written, without its module."""
    if isinstance(node, ast.Call):
        return last_word(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def caught_in(tree: ast.AST) -> Iterator[str]:
    """Names that are raised, caught or suppressed."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.expr() as error):
                yield last_word(error)
            case ast.ExceptHandler(type=ast.Tuple(elts=errors)):
                yield from map(last_word, errors)
            case ast.ExceptHandler(type=ast.expr() as error):
                yield last_word(error)
            case ast.Call(args=errors) if last_word(node) == "suppress":
                yield from map(last_word, errors)


def promised_in(tree: ast.AST) -> Iterator[str]:
    """Names that texts say are raised."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for found in PROMISE.finditer(" ".join(node.value.split())):
                yield from re.findall(ERROR_NAME, found[1])


def words(name: str) -> list[str]:
    """The words of a name in camel case: `RpcServer` has two."""
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name)


def test_a_class_name_stands_once() -> None:
    names = [node.name for node in classes()]
    assert {name for name in names if names.count(name) > 1} == set()


def test_a_public_class_has_a_name_of_two_words() -> None:
    found = {node.name for node in classes() if len(words(node.name)) == 1}
    assert found - ONE_WORD == set(), "classes with a name of one word"
    assert ONE_WORD - found == set(), "exceptions that are no longer needed"


def test_a_method_has_a_name_that_says_what_is_done() -> None:
    found = {
        f"{node.name}.{one.name}"
        for node in classes()
        for one in node.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name in VAGUE
    }
    assert found == set(), "methods with a vague name"


def test_docstrings_name_errors_that_can_be_caught() -> None:
    known = {name for tree in trees().values() for name in caught_in(tree)} | NO_ERRORS
    known |= {name for name in dir(builtins) if name.endswith(("Error", "Exit", "Interrupt"))}
    wrong = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, tree in trees().items()
        for name in promised_in(tree)
        if "." not in name and name not in known  # with a dot: of another package
    }
    assert wrong == set()


def test_a_fork_server_has_no_other_name() -> None:
    """Neither in code nor in what a process, a log or a socket is called."""
    named = [path for path in trees() if "nurser" in path.read_text().lower()]
    assert named == []
