"""What a process of kvmig's prints, how it loads, and how it ends."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import warnings
from typing import NoReturn


def say(text: str, who: str = "kvmig") -> None:
    """One line of progress for whoever started us; lost where nobody can take it.

    A full disk, or a reader that has gone, is no reason not to serve.
    """
    with contextlib.suppress(OSError):
        # In one write: several processes say their lines at the same place.
        print(f"{who}: {text}\n", end="", file=sys.stderr, flush=True)


def quiet(name: str) -> None:
    """Log kvmig's warnings, and of libraries only errors; to be called before vLLM is imported.

    name: of this process, in each line. vLLM has a logger of its own: VLLM_LOGGING_LEVEL.
    """
    logging.basicConfig(format=f"%(asctime)s {name} %(levelname)s %(message)s", level=logging.ERROR)
    logging.getLogger("kvmig").setLevel(logging.WARNING)
    # torch's C++ side, which warns of every NUMA binding.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Libraries tell each other of coming changes; `python -W` and PYTHONWARNINGS still show them.
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)


def begin_loading() -> None:
    """Collect no garbage until `end_loading`.

    What an engine's libraries make while they are imported stays, and to walk it again and again
    is a fifth of the time that they take.
    """
    gc.disable()


def end_loading() -> None:
    """Collect garbage again, but never walk what is there by now: that would stop this process,
    or copy the pages that its forks share, for tens of ms each time.

    Of what imports leave behind 3 % is garbage, and stays.
    """
    gc.freeze()
    gc.enable()


def leave(status: int) -> NoReturn:
    """End the process, once everything of ours is closed.

    The interpreter's own end would only tear down torch and Triton, which takes seconds and
    prints pages about objects that nobody frees.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # see `say`
            stream.flush()
    os._exit(status)
