"""The documentation's site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import site_hooks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does: warnings, broken links among them, are errors."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.long
def test_the_site_is_built_without_a_warning(site: Path) -> None:
    assert (site / "index.html").exists()
    assert "kvmig.engines.base.Engine.suspend" in (site / "api" / "engine-port.html").read_text()


@pytest.mark.long
def test_a_page_needs_nothing_from_elsewhere(site: Path) -> None:
    wanted = re.compile(r"<(?:script|img|iframe)[^>]+src=\"(?:https?:)?//|<link[^>]+href=\"https?:")
    pages = {page: wanted.findall(page.read_text()) for page in site.rglob("*.html")}
    assert {page: found for page, found in pages.items() if found} == {}


@pytest.mark.parametrize(
    ("document", "link", "there"),
    [
        ("README.md", "docs/faults.md", "faults.md"),
        ("README.md", "LICENSE", "LICENSE"),
        ("docs/figures.md", "../bench/README.md", "bench/README.md"),
        ("docs/figures.md", "../bench/results", "bench/results/index.md"),
        ("docs/architecture.md", "data-plane.md#the-pause", "data-plane.md#the-pause"),
        ("docs/api/index.md", "../../CHANGELOG.md", "../CHANGELOG.md"),
        ("bench/README.md", "../docs/simulation.md", "../simulation.md"),
        ("bench/README.md", "paced.py", "paced.py"),
        ("README.md", "https://example.org/a", "https://example.org/a"),
    ],
)
def test_links_lead_to_where_files_lie_in_the_site(document: str, link: str, there: str) -> None:
    assert site_hooks.linked(f"see [it]({link}).", document) == f"see [it]({there})."
