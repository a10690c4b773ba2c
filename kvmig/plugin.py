"""vLLM's entry point for plugins: `KVMIG=1 vllm serve MODEL` becomes a server whose requests move.

vLLM calls `start` in each of its processes, before it has done anything (the group
`vllm.general_plugins`). Without KVMIG nothing of kvmig is imported but this module, and nothing
changes. With it the server's process, which has read no flag so far, becomes `kvmig.serve` with the
same flags: same process id, same output, vLLM's own API on kvmig's instances.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath

SWITCH = "KVMIG"
"""The environment variable that turns the plugin on."""
VALUES = ("", "0", "1")
HELP = ("-h", "--help")
ALLOW_UNTESTED = "--allow-untested-vllm"
MODULE = PurePath("vllm/entrypoints/openai/api_server.py")
"""The server as a module, which `python -m` gives as a path."""
LOADS_FROM_HUB = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def start() -> None:
    """Become `kvmig.serve` where this process is a vLLM server and KVMIG is 1; else return."""
    value = os.environ.get(SWITCH, "")
    if value in ("", "0"):
        return
    words = server_words(sys.argv)
    if words is None or is_child():
        return
    if value not in VALUES:
        sys.exit(f"{SWITCH} is {value!r:.100}, must be 1, or 0 for vLLM without kvmig")
    from kvmig.core.errors import StartupError
    from kvmig.engines.vllm.kind import check_version

    if ALLOW_UNTESTED not in words:
        try:
            check_version()
        except StartupError as error:
            print(f"kvmig: requests of this server can't move: {error}", file=sys.stderr)
            return
    become([sys.executable, "-m", "kvmig.serve", *serve_words(words)], environment(os.environ))


def server_words(argv: Sequence[str]) -> list[str] | None:
    """MODEL and flags of a command line that starts a vLLM server; None: it is another command, or
    asks for help."""
    program = PurePath(argv[0] if argv else "")
    if program.name == "vllm" and argv[1:2] == ["serve"]:
        words = list(argv[2:])
    elif program.parts[-len(MODULE.parts) :] == MODULE.parts:
        words = list(argv[1:])
    else:
        return None
    return None if any(word.partition("=")[0] in HELP for word in words) else words


def serve_words(words: Sequence[str]) -> list[str]:
    """The words for `kvmig.serve`, with vLLM's defaults where kvmig has others: one engine, on all
    of the host's addresses.

    Of a flag that is given twice the last one counts. A file of flags (--config) may have a host,
    which a word here would overrule.
    """
    filed = any(word.partition("=")[0] == "--config" for word in words)
    return ["--instances=1", *([] if filed else ["--host=0.0.0.0"]), *words]


def environment(present: Mapping[str, str]) -> dict[str, str]:
    """The environment for `kvmig.serve`: it may load from hubs, as vLLM may, and what it starts has
    no server to become."""
    kept = {name: value for name, value in present.items() if name != SWITCH}
    return {**dict.fromkeys(LOADS_FROM_HUB, "0"), **kept}


def is_child() -> bool:
    """Whether this process is one that the server started: it has the server's command line."""
    import multiprocessing

    return multiprocessing.parent_process() is not None


def become(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run the command in the place of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), environment)  # noqa: S606 - a list of words, no shell
