"""The prose ratchet: how often the documents and `kvmig/` use wording that a reader stumbles over.

`python -m scripts.prose` prints each place, `--write` renews `tests/house/prose.json`, which holds
the counts, and refuses to write one that has risen. `tests/house/test_prose.py` lets no count rise,
and asks for a renewal once one has fallen.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "house" / "prose.json"
COMMAND = "python -m scripts.prose --write"

COUNTED = (
    r"(?:\d(?:[\d,.]*\d)?|one|two|three|four|bytes|blocks|tokens|requests|messages|steps|copies|files|"
    r"threads|processes|connections|GPUs|[KMG]i?B|ms|checksum|latent|row|table|pool)"
)
WORDING = {
    "anew": r"\banew\b",
    "whoever": r"\bwho(?:so)?ever\b",
    "whatever": r"\bwhatever\b",
    "but for": r"\bbut for\b",
    "tell": r"\b(?:tells?|told|telling)\b",
    "hear": r"\b(?:hears?|heard|hearing)\b",
    "for ever": r"\bfor ever\b",
    "sentence": r"\bsentences?\b",
    "so many": r"\bso (?:many|much|long|few)\b(?! (?:that|as)\b)",
    "beside": r"\bbeside\b",
    "nobody": r"\b(?:nobody|somebody|anybody|everybody)\b",
    "per without a preposition": rf"\b{COUNTED} an? "
    r"(?:second|minute|hour|day|instance|request|step|token|block|key|layer|model|process|GPU|"
    r"wave|source|pair|call|run|user|account|sequence|worker)\b",
    "door": r"\bdoors?\b",
    "nursery": r"\bnurser(?:y|ies)\b",
    "init": r"\binit(?:'s)?\b(?!\.)",
    "say": r"\b(?:says?|said) (?:so|it|that|how|what|which|why|when|whether)\b",
    "ail": r"\bail(?:s|ing|ment|ments)?\b",
}
"""Patterns of wording, by the name that they have in the file of counts."""

OPENINGS = {
    "opens with a preposition": r"(?:Of|In|On|At|By|For|From|With|Without|To|Under|Beside|After|"
    r"Before|Until|Since|As|Among|Between|Beyond|Out of)\b",
    "opens with a pronoun": r"(?:It|Its|He|She|They|Them|Those|These|That|This|Such|Who|Whose|"
    r"Whom|There|One of|Some|Any|All|None|Nothing|Nobody|Everybody|Each|Both|Others?)\b",
    "opens with a conjunction": r"(?:And|Or|But|So|If|Because|Where|While|Though|Unless)\b",
    "opens with a verb and a pronoun": (
        r"(?!(?:How|What|When|Whether|Why)\b)[A-Z][a-z]+ (?:it|them)\b"
    ),
}
"""Openings of docstrings that leave out the noun that they speak of."""

CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|https?://\S+", re.DOTALL)
WORDINGS = {
    name: re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE)
    for name, pattern in WORDING.items()
}
OPENED = {name: re.compile(pattern) for name, pattern in OPENINGS.items()}
Counts = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Place:
    """One use of a pattern: in which part, by which pattern, and where."""

    part: str
    pattern: str
    where: str
    text: str


def documents(root: Path) -> list[Path]:
    """The pages whose wording is counted; figures.md is made from results."""
    pages = sorted((root / "docs").glob("*.md"))
    return [root / "README.md", *(page for page in pages if page.name != "figures.md")]


def places_in_text(part: str, where: str, first_line: int, text: str) -> Iterator[Place]:
    """The places in one text at which it uses counted wording; code in it is left out."""
    plain = CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for name, pattern in WORDINGS.items():
        for found in pattern.finditer(plain):
            line = first_line + plain.count("\n", 0, found.start())
            yield Place(part, name, f"{where}:{line}", " ".join(found[0].split()))


def places_in_module(where: str, source: str) -> Iterator[Place]:
    """The places in a module's docstrings and in its strings of several words."""
    yield from places_in_tree(where, ast.parse(source))


def places_in_tree(where: str, tree: ast.Module) -> Iterator[Place]:
    """The places in a module that is parsed; docstrings of fields are docstrings, too."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):  # a statement comes before the string in it
        if isinstance(node, ast.Expr):
            docstrings.add(id(node.value))
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if " " in node.value.strip():
            yield from places_in_text("kvmig", where, node.lineno, node.value)
        if id(node) in docstrings:
            for name, pattern in OPENED.items():
                if pattern.match(node.value.strip()):
                    text = node.value.strip().splitlines()[0]
                    yield Place("kvmig", name, f"{where}:{node.lineno}", text)


def places_in_documents(root: Path = ROOT) -> Iterator[Place]:
    """Each place in the documents that uses a counted pattern."""
    for page in documents(root):
        yield from places_in_text("docs", str(page.relative_to(root)), 1, page.read_text())


def places(root: Path = ROOT) -> Iterator[Place]:
    """Each place in the documents and in `kvmig/` that uses a counted pattern."""
    yield from places_in_documents(root)
    for path in sorted((root / "kvmig").rglob("*.py")):
        yield from places_in_module(str(path.relative_to(root)), path.read_text())


def counts(found: Iterator[Place]) -> Counts:
    """The number of places by part and pattern, zeros included."""
    seen = Counter((place.part, place.pattern) for place in found)
    patterns = {"docs": [*WORDING], "kvmig": [*WORDING, *OPENINGS]}
    return {part: {one: seen[part, one] for one in names} for part, names in patterns.items()}


def accepted() -> Counts:
    """The counts that the file holds."""
    held: Counts = json.loads(TARGET.read_text())
    return held


def changes(now: Counts, held: Counts) -> tuple[list[str], list[str]]:
    """The counts that have risen, and those that have fallen, one line each."""
    risen: list[str] = []
    fallen: list[str] = []
    for part, patterns in now.items():
        for name, count in patterns.items():
            before = held.get(part, {}).get(name, 0)
            line = f"{part}, {name!r}: {count}, was {before}"
            if count > before:
                risen.append(line)
            elif count < before:
                fallen.append(line)
    return risen, fallen


def main(arguments: list[str] | None = None) -> int:
    """Print each place, or renew the file of counts."""
    parser = argparse.ArgumentParser(prog="python -m scripts.prose", description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew tests/house/prose.json")
    parser.add_argument("--only", default="", help="places whose file or pattern contains this")
    chosen = parser.parse_args(arguments)
    found = list(places())
    if chosen.write:
        now = counts(iter(found))
        if risen := changes(now, accepted())[0]:
            print("\n".join(["more than before, which is not written:", *risen]), file=sys.stderr)
            return 1
        TARGET.write_text(json.dumps(now, indent=1) + "\n")
        return 0
    for place in found:
        if chosen.only in place.where or chosen.only in place.pattern:
            print(f"{place.where}: {place.pattern}: {place.text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
