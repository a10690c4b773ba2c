"""What pip installs: the base package serves, and what an extra brings is named where it lacks."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from kvmig.core.errors import StartupError
from kvmig.engines.vllm import kind as vllm_kind
from tests.support.module_facts import module_facts

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
APART = (
    "kvmig/engines/transformers/",
    "kvmig/engines/vllm/",
    "kvmig/kernels/",
    "kvmig/sources/bucket.py",
    "kvmig/sources/modelscope_hub.py",
    "kvmig/frontend/openai/media_fetch.py",
    "kvmig/frontend/openai/vllm/",
    "kvmig/testing/",
    "kvmig_tools/fleet.py",
    "kvmig_tools/train_count.py",
)
"""What is imported with an engine, by a developer, or for a test only."""
BROUGHT = {"anyio": "starlette", "pydantic-core": "pydantic"}
"""Packages that another one pins to itself."""
BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""
EXTRAS = ("vllm", "torch", "transformers", "psutil", "ray", "nixl", "triton", "cupy")


def plain(name: str) -> str:
    """A distribution's name, normalised."""
    return re.sub(r"[-_.]+", "-", name).lower()


BASE = {plain(re.split(r"[<>=\[; ]", one)[0]) for one in PROJECT["dependencies"]}


def test_the_base_dependencies_are_all_that_is_imported_without_an_engine() -> None:
    known = packages_distributions()
    lacking = set()
    for module in module_facts():
        if module.path.startswith(APART):
            continue
        for package in module.imports:
            if package in sys.stdlib_module_names or package.startswith("kvmig"):
                continue
            found = {plain(one) for one in known.get(package, [package])}
            if not BASE & (found | {BROUGHT.get(one, one) for one in found}):
                lacking.add((module.path, package))
    assert not lacking


def run_without(blocked: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Of a Python in which these packages can't be imported."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED.format(blocked=blocked) + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    "code",
    [
        "import kvmig.cli.app as it; sys.argv = ['kvmig', '--help']; it.main()",
        "import kvmig.serve as it; sys.exit(it.main(['--help']))",
        "import kvmig.serve as it; sys.exit(it.main(['--check', 'm', '--engine', 'toy']))",
        "import kvmig.fleet.supervisor, kvmig.fleet.server; import kvmig.proxy.__main__"
        "; import kvmig.sharing.__main__",
    ],
)
def test_the_commands_work_where_no_extra_is_installed(code: str) -> None:
    done = run_without(EXTRAS, code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("package", ["transformers", "torch", "jinja2", "psutil"])
def test_a_lacking_package_of_the_transformers_engine_names_the_extra(package: str) -> None:
    code = "import kvmig.serve as it; sys.exit(it.main(['m', '--engine', 'transformers']))"
    hide = f"import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == {package!r} else f(n, *a)\n"  # noqa: E501
    done = run_without((package,), hide + code)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f'{package} is not installed: pip install "kvmig[transformers]"' in done.stderr


def test_a_lacking_vllm_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kind, "PACKAGES", ("no-such-vllm",))
    with pytest.raises(StartupError, match=r'pip install "kvmig\[vllm\]".*or choose another'):
        vllm_kind.check_version()


def test_every_extra_that_a_sentence_or_a_page_names_is_there() -> None:
    extras = set(PROJECT["optional-dependencies"])
    texts = [*ROOT.glob("kvmig/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    named = {
        extra.strip()
        for path in texts
        for found in re.findall(r"kvmig\[([a-z0-9, ]+)\]", path.read_text())
        for extra in found.split(",")
    }
    assert "vllm" in named
    assert named <= extras
