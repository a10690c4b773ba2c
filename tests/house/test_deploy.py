"""What `deploy/` has: a container of the repository, a systemd unit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer

from kvmig.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text()
UNIT = (ROOT / "deploy" / "kvmig.service").read_text()
LEFT_OUT = (ROOT / ".dockerignore").read_text().split()
SET_UP = ("Makefile", "scripts/setup_env.py", "pyproject.toml", "setup.py", "README.md", "LICENSE")
"""What `make setup` reads, besides the sources."""
PRIVATE = ("deploy/compose/.env", "deploy/compose/models/qwen/model.safetensors")
"""What people have beside compose.yaml, as it says."""
NOT_KEPT = [one for one in (ROOT / ".gitignore").read_text().split() if one.startswith("deploy/")]
BUILT_HERE = (".venv", ".vllm", "kvmig/kernels/_lib/libkvmig_cpu.so", "kvmig/__pycache__")


def left_out(path: str) -> bool:
    """Whether .dockerignore keeps a path, or a folder above it, from a container."""
    names = {"**/": "(?:.*/)?", "*": "[^/]*"}
    patterns = [
        "".join(names.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*)", line))
        for line in LEFT_OUT
    ]
    return any(re.match(f"(?:{pattern})(?:/|$)", path) for pattern in patterns)


def instruction(word: str) -> str:
    """What follows a word that stands once in the Containerfile."""
    (found,) = re.findall(rf"^{word} (.+)$", CONTAINERFILE, re.MULTILINE)
    return str(found)


def test_a_container_gets_all_that_its_set_up_reads() -> None:
    sources = [
        path.relative_to(ROOT).as_posix()
        for folder in ("csrc", "kvmig", "kvmig_tools")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts
    ]
    assert [path for path in (*SET_UP, *sources) if left_out(path)] == []


@pytest.mark.parametrize("path", BUILT_HERE)
def test_a_container_gets_nothing_that_was_built_on_this_machine(path: str) -> None:
    assert left_out(path)


@pytest.mark.parametrize("path", PRIVATE)
def test_an_image_has_neither_passwords_nor_models_of_the_host_that_built_it(path: str) -> None:
    assert left_out(path)
    assert any(path.startswith(one) for one in NOT_KEPT)


def test_the_volume_of_a_container_is_the_fleets_folder() -> None:
    assert instruction("ENV") == f"KVMIG_DATA={instruction('VOLUME')}"


@pytest.mark.parametrize(
    "words",
    [
        [*json.loads(instruction("ENTRYPOINT")), *json.loads(instruction("CMD"))],
        re.findall("^ExecStart=(.+)$", UNIT, re.MULTILINE)[0].split(),
    ],
    ids=["container", "unit"],
)
def test_what_is_started_is_a_command_that_kvmig_knows(words: list[str]) -> None:
    program, name, *flags = words
    command = typer.main.get_group(app).commands[name]
    assert program == "/opt/kvmig/.venv/bin/kvmig"
    assert command.make_context(name, flags).params["port"] == 8080
