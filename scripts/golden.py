"""Keeps what kvmig shows to its users, to see whether a change of the code has changed any of it.

    python -m scripts.golden compare                 # with tests/golden, as a test does
    python -m scripts.golden write                   # after a change that is meant
    python -m scripts.golden write FOLDER            # all outputs, before a change of form
    python -m scripts.golden compare FOLDER          # after it

A difference is printed, and the exit status is 1. `scripts/golden_outputs.py` has the list of
outputs; --only picks some of them by name, --quick leaves out those that take longest. `compare`
looks at what FOLDER has, and so does `write` in tests/golden. Tests are compared by their names:
that one has moved to another file is printed, and is no difference. Of the numbers of tests only
one that fell is a difference.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path

from kvmig.core.errors import ConfigError
from scripts.golden_outputs import COUNTS, OUTPUTS, ROOT, SLOW, TEST_IDS, make_environment

KEPT = ROOT / "tests" / "golden"
COMMAND = "python -m scripts.golden write --only"
"""And the name of an output: it renews what is kept of that one."""
MOST_LINES = 100
"""Of one file's difference that are printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0: written, or equal. 1: different. 2: bad input."""
    options = _options(arguments)
    make_environment()
    try:
        if options.order == "write":
            known = kept_in(KEPT) if options.folder == KEPT and not options.only else OUTPUTS
            write(options.folder, _chosen(options, known))
            return 0
        return compare(options.folder, _chosen(options, kept_in(options.folder)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def write(folder: Path, names: Sequence[str]) -> None:
    """Write the outputs of those names below the folder, in place of earlier ones."""
    for name in names:
        files, below = made(name), folder / name
        below.mkdir(parents=True, exist_ok=True)
        for old in below.iterdir():
            old.unlink()
        for file, text in files.items():
            (below / file).write_text(text, encoding="utf-8")


def compare(folder: Path, names: Sequence[str]) -> int:
    """Print what differs from the folder; the exit status."""
    different = 0
    for name in names:
        before = {one.name: one.read_text(encoding="utf-8") for one in (folder / name).iterdir()}
        after = made(name)
        for file in sorted(before.keys() | after.keys()):
            lines = list(difference(file, before.get(file), after.get(file)))
            if file == TEST_IDS:
                for moved in moves(before.get(file, ""), after.get(file, "")):
                    print(f"{name}: {moved}")
            if lines:
                different += 1
                meant = f" (if that is meant: {COMMAND} {name})" if folder == KEPT else ""
                print(f"{name}/{file} differs{meant}:")
                shown = [*lines[:MOST_LINES], *_rest(lines)]
                print("\n".join(f"  {line}" for line in shown))
    print(f"{different} files differ." if different else f"Equal: {', '.join(names)}.")
    return 1 if different else 0


def made(name: str) -> Mapping[str, str]:
    """One output as it is now, by file."""
    began = time.monotonic()
    files = OUTPUTS[name]()
    seconds = time.monotonic() - began
    print(f"{name}: {len(files)} files in {seconds:.1f} s", file=sys.stderr, flush=True)
    return files


def difference(file: str, before: str | None, after: str | None) -> Iterator[str]:
    """What has changed, line by line; nothing where both are equal."""
    if before is None or after is None:
        yield "the file is new" if before is None else "the file is gone"
    elif file == TEST_IDS:
        gone, new = (Counter(_names(text)) for text in (before, after))
        yield from (f"-{name}" for name in (gone - new).elements())
        yield from (f"+{name}" for name in (new - gone).elements())
    elif file == COUNTS:
        yield from fewer(before, after)
    else:
        changed = unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
        yield from list(changed)[2:]


def fewer(before: str, after: str) -> Iterator[str]:
    """Say which files have fewer tests than before."""
    now = dict(line.split() for line in after.splitlines())
    for path, count in (line.split() for line in before.splitlines()):
        if int(now.get(path, "0")) < int(count):
            yield f"{path} had {count} tests, and has {now.get(path, 'none')}"


def moves(before: str, after: str) -> Iterator[str]:
    """Say how many tests went from which file to which."""
    were, are = (_files_by_name(text) for text in (before, after))
    counted: Counter[tuple[str, str]] = Counter()
    for name in were.keys() & are.keys():
        left, came = were[name] - are[name], are[name] - were[name]
        counted.update(zip(sorted(left.elements()), sorted(came.elements()), strict=False))
    for (old, new), count in sorted(counted.items()):
        yield f"{count} tests moved from {old} to {new}"


def _names(text: str) -> list[str]:
    return [line.partition("\t")[0] for line in text.splitlines()]


def _files_by_name(text: str) -> dict[str, Counter[str]]:
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for line in text.splitlines():
        name, _, file = line.partition("\t")
        found[name][file] += 1
    return found


def _rest(lines: Sequence[str]) -> list[str]:
    more = len(lines) - MOST_LINES
    return [f"... and {more} lines more"] if more > 0 else []


def kept_in(folder: Path) -> list[str]:
    """Names of the outputs that the folder has. Raises ConfigError."""
    found = [name for name in OUTPUTS if (folder / name).is_dir()]
    if not found:
        raise ConfigError(f"FOLDER is {folder}, must be one that `write` has written")
    return found


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.golden",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("order", choices=("write", "compare"))
    parser.add_argument("folder", type=Path, metavar="FOLDER", nargs="?", default=KEPT)
    parser.add_argument(
        "--only", nargs="+", choices=tuple(OUTPUTS), metavar="NAME", help=", ".join(OUTPUTS)
    )
    parser.add_argument("--quick", action="store_true", help=f"without {', '.join(SLOW)}")
    return parser.parse_args(arguments)


def _chosen(options: argparse.Namespace, names: Sequence[str] | Mapping[str, object]) -> list[str]:
    """Those of the names that the flags pick. Raises ConfigError."""
    wanted: Sequence[str] = options.only or list(names)
    if missing := [one for one in wanted if one not in names]:
        raise ConfigError(
            f"--only is {missing[0]}, must be one that FOLDER has: {', '.join(names)}"
        )
    return [one for one in wanted if not (options.quick and one in SLOW)]


if __name__ == "__main__":
    sys.exit(main())
