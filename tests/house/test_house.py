"""The layout and the rules of the house."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from kvmig.launcher.flags import parser

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvmig"
TOOLS = ROOT / "kvmig_tools"
MODULES = [
    path
    for package in (PACKAGE, TOOLS)
    for path in package.rglob("*.py")
    if "__pycache__" not in path.parts
]
MAX_LINES = 800
KERNELS = sorted(f"kvmig.kernels.{path.stem}" for path in (PACKAGE / "kernels").glob("*.py"))


def run(command: list[str], cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def python(code: str, path: str = "") -> str:
    """What `code` prints in a Python of its own that starts at the root."""
    done = run([sys.executable, "-c", code], PYTHONPATH=path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    return done.stdout


def lint_imports(cwd: Path) -> subprocess.CompletedProcess[str]:
    return run([str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"], cwd)


def test_kernels_is_no_regular_package() -> None:
    # With an __init__.py the link at the root hides the registry's package `kernels`.
    assert not (PACKAGE / "kernels" / "__init__.py").exists()


def test_every_other_folder_is_a_regular_package() -> None:
    folders = {path.parent for path in MODULES} - {PACKAGE / "kernels"}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("name", ["kernels", "kvtransfer", "controlplane"])
def test_the_folders_at_the_root_are_links_into_the_package(name: str) -> None:
    assert (ROOT / name).readlink() == Path("kvmig", name)


def test_files_stay_small() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in MODULES}
    assert {path: count for path, count in lines.items() if count >= MAX_LINES} == {}


def test_files_do_not_import_each_other_in_a_circle() -> None:
    """Imports for type checkers count, too: a Protocol replaces them."""
    graph = grimp.build_graph("kvmig", "kvmig.kernels", cache_dir=None)
    TopologicalSorter(
        {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    ).prepare()


def test_the_import_floors_see_kernels(tmp_path: Path) -> None:
    for path in [*MODULES, ROOT / "pyproject.toml"]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    wrong = tmp_path / "kvmig" / "kernels" / "wrong.py"
    wrong.write_text("import kvmig.controlplane.messages\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert "kvmig.kernels.wrong -> kvmig.controlplane.messages" in done.stdout


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = {"vllm", "torch", "ray", "fastapi", "transformers", "zmq", "numpy"}
    out = python("import sys, kvmig, kvmig.core.config; print(*sys.modules)")
    assert heavy & set(out.split()) == set()


START = "\n".join(
    [
        "import transformers.integrations.hub_kernels",
        "from transformers import LlamaForCausalLM",
        *(f"import {name}" for name in KERNELS),
        "import kernels",
        "print(kernels.__file__)",
    ]
)


@pytest.mark.long
def test_the_start_from_the_root_works_with_the_registrys_kernels(tmp_path: Path) -> None:
    registrys = tmp_path / "kernels" / "__init__.py"
    registrys.parent.mkdir()
    registrys.write_text("__version__ = '0.0.1'\n")
    assert python(START, str(tmp_path)).strip() == str(registrys)


@pytest.mark.long  # engines' tests start there, too
@pytest.mark.skipif(
    getattr(importlib.util.find_spec("kernels"), "origin", None) is not None,
    reason="the registry's package kernels is installed",
)
def test_the_start_from_the_root_works_without_the_registrys_kernels() -> None:
    assert python(START).strip() == "None"


@pytest.mark.long  # servers start there, too
def test_vllm_starts_from_the_root() -> None:
    python("import vllm.v1.engine.core")


def test_the_targets_that_the_readme_names_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", readme(), re.MULTILINE))
    wanted = {first or second for first, second in named}
    assert {"serve", "test"} <= wanted <= targets


def test_the_flags_that_the_readme_names_are_there() -> None:
    table = [line for line in readme().splitlines() if line.startswith("| `--")]
    named = {flag for line in table for flag in re.findall(r"--[a-z-]+", line.split("|")[1])}
    assert named
    assert named <= set(re.findall(r"--[a-z-]+", parser().format_help()))


def test_the_links_in_the_documents_lead_somewhere() -> None:
    for document in (ROOT / "README.md", ROOT / "docs" / "architecture.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not link.startswith("http"):
                assert (document.parent / link).exists(), f"{document.name}: {link}"


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_a_test_that_starts_a_server_says_so() -> None:
    """Or it would run beside others, which its times don't bear."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text()
        if re.search(r"\bserved import\b.*\bServed\b", text):
            assert "pytest.mark.server" in text, file.name
