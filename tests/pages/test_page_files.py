"""The page's files: all in the wheel, and small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from setuptools import Distribution
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "kvmig" / "pages"
MOST_BYTES = 200_000


def files(folder: str) -> set[str]:
    return {f"{folder}/{one.name}" for one in (PAGES / folder).iterdir()}


def test_the_wheel_has_all_templates_and_static_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files()
    command = distribution.get_command_obj("build_py")
    assert isinstance(command, build_py)
    command.ensure_finalized()
    packed = {name: found for name, _, _, found in command.data_files}["kvmig.pages"]
    assert set(packed) == files("static") | files("templates")


def test_what_a_browser_loads_is_small() -> None:
    assert sum(one.stat().st_size for one in (PAGES / "static").iterdir()) <= MOST_BYTES


@pytest.mark.parametrize(
    "template", sorted((PAGES / "templates").iterdir()), ids=lambda one: one.name
)
def test_a_template_has_no_inline_scripts_styles_or_handlers(template: Path) -> None:
    text = template.read_text()
    assert re.findall(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)|javascript:", text) == []


@pytest.mark.parametrize(
    "template", sorted((PAGES / "templates").iterdir()), ids=lambda one: one.name
)
def test_a_template_marks_nothing_as_safe_html(template: Path) -> None:
    assert re.findall(r"\|\s*safe|autoescape|Markup", template.read_text()) == []
