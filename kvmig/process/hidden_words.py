"""`python -m kvmig.process.hidden_words MODULE WORDS`: a process whose command line hides secrets.

Any user of a host can read the command lines of its processes (`ps`); their environment only the
same user can. So a process whose words have secrets gets them in its environment, and its command
line has `***` in their place.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvmig.core.shown_secrets import shown_words
from kvmig.process.child import leave

MODULE = "kvmig.process.hidden_words"
TRUE_WORDS = "KVMIG_TRUE_WORDS"
"""Environment variable: the words as they are, in JSON. The process removes it at once, so that
nothing that it starts gets them."""


class ProcessStart(NamedTuple):
    """How a process is started."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def start_of(
    module: str, words: Sequence[str], environment: Mapping[str, str], *descriptors: int
) -> ProcessStart:
    """`python -m module words`, without the secrets of its words in `command`.

    descriptors: those that the process gets; their numbers follow the words.
    """
    shown = shown_words(words)
    numbers = map(str, descriptors)
    if shown == tuple(words):
        return ProcessStart((sys.executable, "-m", module, *words, *numbers), environment)
    hidden = {TRUE_WORDS: msgspec.json.encode(words).decode()}
    return ProcessStart(
        (sys.executable, "-m", MODULE, module, *shown, *numbers), {**environment, **hidden}
    )


def main(argv: Sequence[str]) -> int:
    """Run the module with its true words; its exit status."""
    module, *shown = argv[1:]
    words = msgspec.json.decode(os.environ.pop(TRUE_WORDS), type=list[str])
    words += shown[len(words) :]
    sys.argv = [module, *words]
    status: int = importlib.import_module(module).main(words)
    return status


if __name__ == "__main__":
    leave(main(sys.argv))
