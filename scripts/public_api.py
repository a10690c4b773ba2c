"""What is public of kvmig: one list, and docs/signatures.txt, the signatures of all of it.

`python -m scripts.public_api` (in `make docs`) renews the file; `--check` changes nothing and
exits with 1, and the difference, when it isn't current. A change of it is a change that others
must hear of: a fragment in changelog.d says why. Everything is read from the sources, nothing is
imported.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from difflib import unified_diff
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "signatures.txt"

PAGES: dict[str, tuple[str, ...]] = {
    "embedding": (
        "kvmig",
        "kvmig.migrator:OnCommit",
        "kvmig.kvtransfer.report",
        "kvmig.core.config:Transport,MigrationConfig,SchedulerConfig,ClusterConfig,FaultConfig,"
        "LifecycleConfig,ScalingConfig",
        "kvmig.core.priorities:PriorityClass",
        "kvmig.core.errors",
    ),
    "engine-port": (
        "kvmig.engines.base",
        "kvmig.core.layout",
        "kvmig.engines.block_copies:BlockCopies,CopyBackend",
    ),
    "conformance": (
        "kvmig.testing.subject",
        "kvmig.engines.checked:CheckedEngine,CheckedServingEngine",
    ),
    "engines": (
        "kvmig.engines.vllm:factory",
        "kvmig.engines.vllm.embedded",
        "kvmig.engines.transformers:factory",
        "kvmig.engines.transformers:pooled",
        "kvmig.engines.transformers.config:EngineConfig",
    ),
    "data-plane": (
        "kvmig.kernels.copy",
        "kvmig.kernels.layouts",
        "kvmig.kernels.select:kernels",
        "kvmig.kernels.api",
    ),
    "simulator": ("kvmig_tools.sim.run", "kvmig_tools.sim.cost", "kvmig_tools.sim.policies"),
}
"""By page of the API reference: modules, with all that they define, or `module:name,name`."""

PACKAGES = ("kvmig", "kvmig_tools")
INNER = ("T", "log")
"""Names that modules have for themselves."""
SPECIAL = ("__init__", "__enter__", "__aenter__")

HEAD = """\
What is public of kvmig, made by `python -m scripts.public_api` (or `make docs`).
A change of it comes with a fragment in changelog.d that says why.
"""


def copy_sources(folder: Path) -> Path:
    """Copy the packages below `folder`; kernels becomes a regular package, as griffe wants it."""
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package,
            folder / package,
            ignore=lambda at, names: [
                name for name in names if not (name.endswith(".py") or Path(at, name).is_dir())
            ],
        )
    (folder / "kvmig" / "kernels" / "__init__.py").touch()
    return folder


def load(folder: Path) -> griffe.ModulesCollection:
    """The packages as `copy_sources` left them."""
    loader = griffe.GriffeLoader(search_paths=[folder], allow_inspection=False)
    for package in PACKAGES:
        loader.load(package, try_relative_path=False)
    loader.resolve_aliases(implicit=False)
    return loader.modules_collection


def parsed(entry: str) -> tuple[str, list[str]]:
    """`module:name,name` as the module and the names, which are none if all are meant."""
    module, _, names = entry.partition(":")
    return module, names.split(",") if names else []


def names_of(module: griffe.Module, wanted: list[str]) -> list[str]:
    """The public names of a module, in the order of its source."""
    if wanted:
        return wanted
    if module.exports is not None:
        return [str(name) for name in module.exports]
    own = [one for one in module.members.values() if not one.is_alias and not one.is_module]
    return [one.name for one in own if not (one.name.startswith("_") or one.name in INNER)]


def described(one: griffe.Object | griffe.Alias, indent: str = "") -> Iterator[str]:
    """The lines of one name and, of a class, those of its public members."""
    if isinstance(one, griffe.Alias):
        one = one.final_target
    if isinstance(one, griffe.Class):
        yield f"{indent}class {one.name}{_bases(one)}"
        for member in one.members.values():
            if not member.is_alias and (member.name[0] != "_" or member.name in SPECIAL):
                yield from described(member, indent + "    ")
    elif isinstance(one, griffe.Function):
        kind = "async def" if "async" in one.labels else "def"
        for decorator in one.decorators:
            yield f"{indent}@{decorator.value}"
        yield f"{indent}{kind} {one.signature()}"
    elif isinstance(one, griffe.Attribute):
        kind = "property " if "property" in one.labels else ""
        annotation = "" if one.annotation is None else f": {one.annotation}"
        inner = one.value is None or one.labels == {"instance-attribute"}
        value = "" if inner else f" = {one.value}"
        yield f"{indent}{kind}{one.name}{annotation}{value}"


def _bases(of: griffe.Class) -> str:
    words = [str(base) for base in of.bases]
    words += [f"{key}={value}" for key, value in of.keywords.items()]
    return f"({', '.join(words)})" if words else ""


@cache
def signatures() -> str:
    """The whole file."""
    lines = [HEAD]
    with tempfile.TemporaryDirectory() as folder:
        modules = load(copy_sources(Path(folder)))
        for entry in (entry for entries in PAGES.values() for entry in entries):
            path, wanted = parsed(entry)
            module = modules[path]
            lines.append(f"\n{path}\n")
            for name in names_of(module, wanted):
                lines += [f"    {line}\n" for line in described(module[name])]
    return "".join(lines)


def difference() -> str:
    """What `signatures` would change in the committed file; empty when it is current."""
    old = TARGET.read_text() if TARGET.exists() else ""
    lines = (old.splitlines(), signatures().splitlines())
    return "\n".join(unified_diff(*lines, TARGET.name, "the sources", lineterm="", n=1))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    if not options.check:
        TARGET.write_text(signatures())
        return 0
    if changed := difference():
        print(changed)
        print(
            f"error: docs/{TARGET.name} isn't current: run `python -m scripts.public_api`,"
            " and say in changelog.d why what is public changes",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
