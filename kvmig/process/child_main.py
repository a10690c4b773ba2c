"""The `main` of a child process: its words, its launch document, and why it failed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvmig.core.errors import KvmigError, StartupError
from kvmig.process.child import StartAnnouncement, announce, read_launch, say

Launch = TypeVar("Launch", bound=msgspec.Struct)


def announce_failure(
    descriptor: int, error: Exception, *, refused: bool = False, said_if_unread: bool = True
) -> None:
    """Announce why a child can't start; one that has announced itself before prints it on stderr.

    refused: see `StartAnnouncement`. said_if_unread: on stderr, too, where the parent has gone or
    ends this start, so that the announcement is not read.
    """
    try:
        announce(descriptor, StartAnnouncement(failed=str(error), refused=refused))
    except StartupError as lost:
        if said_if_unread or not isinstance(lost.__cause__, BrokenPipeError):
            say(str(error))


def run_child(
    words: Sequence[str],
    form: str,
    kind: type[Launch],
    run: Callable[..., None],
    *,
    counts: Sequence[int] = (1,),
    report: Callable[[int, Exception], None] = announce_failure,
) -> int:
    """Run a child with the launch document from stdin; its exit status, 2 for wrong words.

    words: a title for `ps`, which may be missing, then descriptors, which `run` gets after the
    launch document. form: module and words, for who starts it by hand. counts: of descriptors,
    the most first. report: gets the first descriptor, and why `run` failed.
    """
    for count in counts:
        numbers = words[-count:]
        if count <= len(words) <= count + 1 and all(map(str.isdecimal, numbers)):
            break
    else:
        print(f"usage: python -m {form}", file=sys.stderr)
        return 2
    descriptors = [int(one) for one in numbers]
    try:
        run(read_launch(kind), *descriptors)
    except KvmigError as error:
        report(descriptors[0], error)
        return 1
    return 0
