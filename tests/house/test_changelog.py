"""CHANGELOG.md, and the fragments that the next release adds to it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from kvmig import __version__

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
TYPES = [one["directory"] for one in SETTINGS["type"]]


def test_every_fragment_has_a_name_that_towncrier_takes() -> None:
    named = re.compile(rf"(\d+|\+[\w-]+)\.({'|'.join(TYPES)})\.md")
    fragments = [path.name for path in (ROOT / "changelog.d").iterdir()]
    assert [one for one in fragments if one != "README.md" and not named.fullmatch(one)] == []


def test_the_changelog_has_the_section_of_this_version_where_towncrier_adds_the_next() -> None:
    _, marker, sections = (ROOT / "CHANGELOG.md").read_text().partition(SETTINGS["start_string"])
    assert marker
    assert sections.lstrip().startswith(f"## [{__version__}] - ")


def test_fragments_become_a_section(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "+drain.changed.md").write_text("Drains take less time.\n")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "towncrier"), "build", "--draft",
         "--version", "9.9.9", "--date", "2030-01-31", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n\n")[:3] == [
        "## [9.9.9] - 2030-01-31", "### Changed", "- Drains take less time.",
    ]  # fmt: skip
