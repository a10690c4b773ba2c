"""Compiled code is kept where this user can write, and nobody else."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kvmig.engines.vllm.cache_places import USUAL, choose_caches


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_home_that_can_be_written_to_is_the_place(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path / "home")}
    assert choose_caches(environment) is None
    assert environment == {"HOME": str(tmp_path / "home")}


@pytest.mark.parametrize("home", ["file", ""])
def test_without_a_home_that_takes_files_all_is_kept_in_a_folder_of_this_user(
    tmp_path: Path, home: str
) -> None:
    (tmp_path / "file").touch()
    environment = {"HOME": str(tmp_path / "file")} if home else {"HOME": "/proc"}
    folder = choose_caches(environment)
    assert folder is not None
    assert folder.parent.parent == tmp_path
    assert folder.stat().st_mode & 0o077 == 0
    assert folder.parent.stat().st_mode & 0o077 == 0
    assert {environment[name] for name in USUAL} == {str(folder)}
    again = {"HOME": environment["HOME"]}
    assert choose_caches(again) == folder, "the next start finds it"


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    own = {"XDG_CACHE_HOME": str(tmp_path / "own")}
    environment = {"HOME": "/proc", **own}
    assert choose_caches(environment) is not None
    assert environment["XDG_CACHE_HOME"] == own["XDG_CACHE_HOME"]


def test_a_folder_that_others_can_write_to_is_not_taken(temporary: Path) -> None:
    environment = {"HOME": "/proc"}
    folder = choose_caches(dict(environment))
    assert folder is not None
    folder.parent.chmod(0o777)
    assert choose_caches(environment) is None
    assert environment == {"HOME": "/proc"}
