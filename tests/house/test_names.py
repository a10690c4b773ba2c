"""Names that a reader can search for: what `kvmig` may not have more of than it has.

Each list of exceptions may only shrink: a name that is mended must leave its list.
"""

from __future__ import annotations

import ast
import re
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

ONE_WORD = {
    "Abort",
    "Aborted",
    "Body",
    "Bundle",
    "Cadence",
    "Chunk",
    "Clock",
    "Commit",
    "Committed",
    "Completion",
    "Discard",
    "Downtime",
    "Emitted",
    "Engine",
    "Estimator",
    "Expect",
    "Export",
    "Fence",
    "Fenced",
    "Hello",
    "Kernels",
    "Limits",
    "Listing",
    "Llumlet",
    "Members",
    "Message",
    "Migrate",
    "Migrated",
    "Migrator",
    "Model",
    "Models",
    "Offer",
    "Output",
    "Outputs",
    "Overrun",
    "Pairs",
    "Placement",
    "Policy",
    "Preempted",
    "Problem",
    "Refused",
    "Region",
    "Reserve",
    "Reserved",
    "Resolve",
    "Resolved",
    "Router",
    "Scheduler",
    "Sharing",
    "Stage",
    "Submit",
    "Suite",
    "Tail",
    "Usage",
    "Welcome",
}
"""Classes with a name of one word.

Most of them are messages, which are called as on the wire, and names that users import.
"""


@cache
def classes() -> tuple[ast.ClassDef, ...]:
    """The public classes of the package."""
    return tuple(
        node
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


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
