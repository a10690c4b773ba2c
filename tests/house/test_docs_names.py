"""What the documents name exists: files of this repository, modules, and what modules define."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

from scripts.public_api import PAGES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"))
    if path.name != "CHANGELOG.md"  # it says what there was
)
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
FILE = re.compile(r"(?<![\w./-])([\w-][\w./-]*\.(?:cu|md|py|sh|svg|toml))(?![\w/-])")
DOTTED = re.compile(r"(?<![\w./-])((?:bench|examples|kvmig|kvmig_tools|scripts|tests)(?:\.\w+)+)")
OURS = ("bench", "docs", "examples", "kvmig", "kvmig_tools", "scripts", "tests")
PAGES_THAT_ARE_MADE = frozenset(f"{folder}{page}.md" for page in PAGES for folder in ("", "api/"))
"""Of the documentation's site, by `scripts/site_hooks.py`."""
NO_FILES = frozenset(
    (
        "FILE.svg",
        "FILE.toml",
        "mine.toml",
        "models.toml",
        "my_engine.py",
        "unpack.sh",
        "activate.sh",
    )
)
"""Files that users write, and those of a GPU's kit."""
FILES_OF_A_FLEET = frozenset(("kvmig.sqlite", "kvmig.sqlite.lock"))
GENERATED = "docs/figures.md"
"""Its figures have names with dots."""


@cache
def tracked() -> frozenset[str]:
    """The repository's files."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return frozenset(done.stdout.splitlines())


@cache
def ends() -> frozenset[str]:
    """All ends of paths of files: a document may leave the first folders out."""
    paths = (path.split("/") for path in tracked())
    return frozenset("/".join(parts[at:]) for parts in paths for at in range(len(parts)))


def texts(document: str) -> str:
    """The document without links to other sites."""
    return re.sub(r"https?://\S+", "", (ROOT / document).read_text())


def defines(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What statements give a name to."""
    found: dict[str, ast.stmt] = {}
    for one in body:
        match one:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found[one.name] = one
            case ast.Assign(targets=targets):
                found |= {target.id: one for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = one
            case ast.Import() | ast.ImportFrom():
                found |= {(name.asname or name.name): one for name in one.names}
            case ast.If(body=inner, orelse=other):
                found |= defines(inner) | defines(other)
    return found


@cache
def exists(dotted: str) -> bool:
    """Whether it is a module, or what one defines, or a member of a class there."""
    parts = dotted.split(".")
    if Path(ROOT, *parts).is_dir():
        return True
    for count in range(len(parts), 0, -1):
        path = "/".join(parts[:count])
        file = next((one for one in (f"{path}.py", f"{path}/__init__.py") if one in tracked()), "")
        if not file:
            continue
        body = ast.parse((ROOT / file).read_text()).body
        for name in parts[count:]:
            made = defines(body).get(name)
            if made is None:
                return False
            if not isinstance(made, ast.ClassDef):  # what it is made of isn't looked at
                return True
            body = [*made.body, *self_attributes(made)]
        return True
    return False


def self_attributes(of: ast.ClassDef) -> list[ast.stmt]:
    """The attributes that a class's methods assign, as assignments of names."""
    return [
        ast.Assign([ast.Name(one.attr)], ast.Constant(None))
        for one in ast.walk(of)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    ]


@pytest.mark.parametrize("document", NAMES)
def test_every_file_that_a_document_names_is_there(document: str) -> None:
    named = {name.removeprefix("../") for name in FILE.findall(texts(document))}
    missing = {name for name in named if name not in ends()}
    assert sorted(missing - PAGES_THAT_ARE_MADE - NO_FILES) == []


@pytest.mark.parametrize("document", [one for one in NAMES if one != GENERATED])
def test_every_module_that_a_document_names_is_there(document: str) -> None:
    found = texts(document)
    named = {*DOTTED.findall(found)} - {*FILE.findall(found)} - FILES_OF_A_FLEET
    assert sorted(name for name in named if not exists(name)) == []


def test_the_floors_of_the_architecture_are_those_that_are_held() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (floors,) = (one for one in contracts["contracts"] if one["id"] == "floors")
    held = [set(re.findall(r"\w+", floor)) - {"__main__"} for floor in floors["layers"]]
    table = (ROOT / "docs" / "architecture.md").read_text().partition("| floor |")[2]
    rows = [line.split("|")[1] for line in table.partition("\n\n")[0].splitlines()[2:]]
    assert [set(re.findall(r"`kvmig\.(\w+)`", row)) for row in rows] == [*filter(None, held)]
