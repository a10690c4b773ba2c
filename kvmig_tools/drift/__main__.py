"""What another version of an engine changes under kvmig's adapter.

    python -m kvmig_tools.drift                  # the versions that kvmig supports
    python -m kvmig_tools.drift 0.33.0 FOLDER    # these; a version is fetched from the registry
    python -m kvmig_tools.drift --newest         # the newest in the registry
    python -m kvmig_tools.drift 0.33.0 --accept  # ... and note what it is now as read and accepted

A version is compared with its own lock file or, if it has none, with the newest one before it. Exit
status: 0 if nothing drifted, 1 if something did, 2 if it can't be told.
"""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
import time
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path

import msgspec

from kvmig.core.errors import ConfigError
from kvmig_tools.drift.checks import BREAKS, Facts, facts, findings
from kvmig_tools.drift.contract import Contract, load, ref
from kvmig_tools.drift.source import Tree
from kvmig_tools.drift.trees import ROOT, newest, numbers, tree
from kvmig_tools.drift.uses import uses

CONTRACT = ROOT / "kvmig" / "engines" / "vllm" / "drift.toml"


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        "python -m kvmig_tools.drift",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trees", nargs="*", metavar="VERSION|FOLDER")
    parser.add_argument("--newest", action="store_true", help="the newest in the registry, too")
    parser.add_argument("--accept", action="store_true", help="write the lock files")
    parser.add_argument("--diff", metavar="VERSION|FOLDER", help="show changed bodies beside its")
    parser.add_argument("--contract", type=Path, default=CONTRACT, help="of another engine")
    options = parser.parse_args(argv)
    try:
        contract = load(options.contract, ROOT)
        known = None
        if options.diff:
            known = tree(options.diff, contract.package, contract.distributions)
        names = options.trees or ([] if options.newest else list(contract.supported))
        if options.newest:
            names = [*names, newest(contract.distributions)]
        drifted = [report(contract, name, options.accept, known) for name in names]
    except ConfigError as error:
        print(f"kvmig_tools.drift: {error}", file=sys.stderr)
        return 2
    return int(any(drifted))


def report(contract: Contract, name: str, accept: bool, known: Tree | None = None) -> bool:
    """Print what is to be said of one tree; whether something drifted that isn't accepted now.

    known: the tree that changed bodies are shown as differences to.
    """
    began = time.monotonic()
    looked_at = tree(name, contract.package, contract.distributions)
    used = uses(contract)
    lock = locked(contract, looked_at.version)
    found = findings(contract, used, looked_at, lock)
    breaks = sum(one.how == BREAKS for one in found)
    against = f"against {lock.version}" if lock else "without a lock"
    print(
        f"{contract.package} {looked_at.version or name} {against}: {breaks} break,"
        f" {len(found) - breaks} to read ({time.monotonic() - began:.1f} s)"
    )
    for one in sorted(found, key=lambda each: (each.how, each.check, each.where)):
        print(f"  {one}")
        if known is not None and one.check == "body":
            print(textwrap.indent(difference(known, looked_at, one.where), "    "))
    if accept:
        file = contract.locks / f"{looked_at.version}.json"
        file.parent.mkdir(exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(facts(contract, used, looked_at)), indent=1)
        file.write_bytes(text + b"\n")
        print(f"  accepted: {file}")
    return bool(breaks) or (bool(found) and not accept)


def difference(was: Tree, now: Tree, where: str) -> str:
    """How the source of a method changed; where: module:Class.method."""
    of, _, name = where.rpartition(".")
    before, after = (
        ast.unparse(found[1]).splitlines()
        if (cls := each.cls(*ref(of))) is not None and (found := each.method(cls, name))
        else []
        for each in (was, now)
    )
    return "\n".join(unified_diff(before, after, was.version, now.version, lineterm=""))


def locked(contract: Contract, version: str) -> Facts | None:
    """The lock of a version; else the newest one before it, or the oldest there is."""
    known = {
        numbers(path.stem): path for path in contract.locks.glob("*.json") if numbers(path.stem)
    }
    if not known:
        return None
    before = [one for one in known if one <= numbers(version)]
    path = known[max(before) if before else min(known)]
    return msgspec.json.decode(path.read_bytes(), type=Facts)


if __name__ == "__main__":
    sys.exit(main())
