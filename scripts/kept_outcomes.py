"""Outcomes of runs of all long tests, which a later run goes on from (`--long --resume`).

An outcome is kept when its check ends, so a run that is interrupted loses only the checks that were
under way. It stands for the very files that it was found with: a later run takes it over only if no
file of the repository has changed since.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from scripts.long_slices import SECONDS, ask_git
from scripts.outcomes import Outcome

FOLDER = ".long-results"
"""In the repository, which doesn't keep it."""
WRITTEN = f"tests/{SECONDS.name}"
"""A run writes this file itself, so it isn't one of those that must not change."""


@dataclass(frozen=True)
class CheckRun:
    """One run of the checks. content: names what its files hold; empty: nothing says that. commit:
    also whether files differ from it."""

    content: str
    commit: str
    began: str

    def __str__(self) -> str:
        return f"the run of {self.began} at {self.commit}"


@dataclass(frozen=True)
class KeptOutcome:
    """As a file has it."""

    run: CheckRun
    outcome: Outcome


class KeptOutcomes:
    """A file for each check, with its latest outcome."""

    def __init__(self, root: Path) -> None:
        self._root, self._folder = root, root / FOLDER
        self.run = CheckRun(
            content_of(root), commit_of(root), f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        )

    def keep(self, outcome: Outcome) -> str:
        """Says why it can't be kept; empty: it is."""
        if not self.run.content:
            return "no git says which files there are"
        if content_of(self._root) != self.run.content:
            return "files have changed since the run began"
        self._folder.mkdir(exist_ok=True)
        file = self._folder / f"{outcome.name.replace(' ', '-')}.json"
        (whole := file.with_suffix(".new")).write_bytes(
            msgspec.json.encode(KeptOutcome(self.run, outcome))
        )
        whole.replace(file)  # a run that is killed meanwhile leaves the former one
        return ""

    def passed(self) -> list[Outcome]:
        """Those of earlier runs that passed with the files as they are now, by name."""
        found = [
            msgspec.json.decode(file.read_bytes(), type=KeptOutcome)
            for file in sorted(self._folder.glob("*.json"))
        ]
        return [
            replace(one.outcome, taken_from=str(one.run))
            for one in found
            if one.outcome.passed and one.run.content == self.run.content != ""
        ]


def content_of(root: Path) -> str:
    """Names what all files of a repository hold, also those that git would add; empty: none is."""
    listed = ask_git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if not listed:
        return ""
    digest = hashlib.sha256()
    for name in sorted(set(listed.split("\0")) - {"", WRITTEN}):
        digest.update(f"\0{name}\0".encode())
        digest.update(_held_by(root / name))
    return digest.hexdigest()


def commit_of(root: Path) -> str:
    """The commit that is checked out, and whether files differ from it."""
    changed = ask_git(root, "status", "--porcelain", "--", ".", f":!{WRITTEN}")
    return ask_git(root, "rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def _held_by(file: Path) -> bytes:
    if file.is_symlink():
        return b"link " + os.fsencode(file.readlink())
    if not file.is_file():
        return b"none"
    runs = b"runs " if file.stat().st_mode & stat.S_IXUSR else b"file "
    return runs + hashlib.sha256(file.read_bytes()).digest()
