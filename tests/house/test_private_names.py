"""Tests use a class as others use it: its private names only in `tests/support`, and in a list of
files that may only shrink."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
EXCEPTIONS: dict[str, int] = {
    "bench/test_bench_adbs.py": 1,
    "bench/test_bench_gpu.py": 2,
    "bench/test_bench_ledger.py": 1,
    "engines/test_examples.py": 1,
    "engines/test_shares.py": 1,
    "engines/test_step_marks.py": 5,
    "engines/transformers/test_transformers_headwise.py": 1,
    "engines/transformers/test_transformers_pool.py": 2,
    "engines/vllm/test_device_copies.py": 3,
    "engines/vllm/test_vllm_adapter.py": 1,
    "engines/vllm/test_vllm_grammar_caches.py": 2,
    "engines/vllm/test_vllm_ranks_real.py": 3,
    "engines/vllm/test_vllm_threads.py": 2,
    "fleet/test_fleet_api.py": 1,
    "kernels/test_kernels_emulated.py": 1,
    "kvtransfer/test_cuda_ipc.py": 1,
    "launcher/test_local_launcher.py": 1,
    "process/test_processes.py": 1,
    "sharing/test_unit_agent.py": 1,
    "tools/test_check.py": 4,
    "tools/test_check_two.py": 2,
}
"""By file: how often it uses private names of `kvmig`'s own."""

THEIRS = frozenset(
    (
        "_backend",
        "_create_grammar",
        "_get_waiting_candidates",
        "_handle_client_request",
        "_http",
        "_process_engine_step",
        "_sock",
        "_transport",
    )
)
"""Names of vLLM's, transformers' and the standard library's classes, which kvmig has, too."""

MAY_USE = re.compile(r"(?<!\bself)(?<!\bcls)\.\s*_(?!_)|\bsetattr\b")
"""What a file has that uses a private name; most have none, and needn't be parsed."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.Module) -> Iterator[str]:
    """The names of functions, of variables, and of what methods assign to `self`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def own_names(wanted: set[str]) -> frozenset[str]:
    """Those of some private names that kvmig, its tools or its benchmarks define."""
    texts = (
        file.read_text()
        for part in ("kvmig", "kvmig_tools", "bench")
        for file in (ROOT / part).rglob("*.py")
    )
    any_of_them = re.compile(rf"\b(?:{'|'.join(map(re.escape, wanted))})\b")
    defining = (defined(ast.parse(text)) for text in texts if any_of_them.search(text))
    return frozenset(name for names in defining for name in names if name in wanted) - THEIRS


def used(tree: ast.Module) -> Iterator[str]:
    """Names that are read from, or put into, another object than `self`."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                yield name
            case ast.Call(
                func=ast.Name(id="setattr") | ast.Attribute(attr="setattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ) if is_private(name):
                yield name


def test_private_names_are_used_where_they_were_and_in_no_more_places() -> None:
    uses = {
        str(file.relative_to(TESTS)): [*used(ast.parse(text))]
        for file in sorted(TESTS.rglob("*.py"))
        if not file.is_relative_to(TESTS / "support") and MAY_USE.search(text := file.read_text())
    }
    own = own_names({name for names in uses.values() for name in names})
    found = Counter({file: sum(name in own for name in names) for file, names in uses.items()})
    more = {file: count for file, count in found.items() if count > EXCEPTIONS.get(file, 0)}
    assert not more, "use what is public, or what tests/support has"
    fewer = {file: found[file] for file, count in EXCEPTIONS.items() if found[file] < count}
    assert not fewer, "renew EXCEPTIONS: it may only shrink"
