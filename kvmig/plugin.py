"""vLLM's entry point for plugins: `KVMIG=1 vllm serve MODEL` becomes a server whose requests move.

vLLM calls `start` in each of its processes, before it has done anything (the group
`vllm.general_plugins`). Without KVMIG nothing of kvmig is imported but this module, and nothing
changes. With it the server's process, which has read no flag so far, becomes `kvmig.serve` with the
same flags: same process id, same output, vLLM's own API on kvmig's instances. A server whose
requests can't move stays vLLM's, and prints one line with the reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from kvmig.engines.vllm.verdict import ServingVerdict

SWITCH = "KVMIG"
"""The environment variable that turns the plugin on."""
VALUES = ("", "0", "1")
HELP = ("-h", "--help")
ALLOW_UNTESTED = "--allow-untested-vllm"
MODULE = PurePath("vllm/entrypoints/openai/api_server.py")
"""The server as a module, which `python -m` gives as a path."""
ASKED = (
    "--config", "--decode-context-parallel-size", "-dcp", "--enable-expert-parallel", "-ep",
    "--kv-offloading-backend", "--kv-transfer-config", "--pipeline-parallel-size", "-pp",
    "--prefill-context-parallel-size", "-pcp",
)  # fmt: skip
"""Flags for which vLLM's parser is asked first, which takes a second: requests may have to stay."""
BAD_FLAGS = 2
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
    from kvmig.core.errors import ConfigError, KvmigError, StartupError
    from kvmig.engines.vllm.kind import check_version

    if ALLOW_UNTESTED not in words:
        try:
            check_version()
        except StartupError as error:
            print_stays(str(error))
            return
    try:
        if needs_verdict(words):
            from kvmig.engines.vllm.verdict import with_file

            words = with_file(words)
            verdict = judge(words)
            if verdict.what == "stays":
                refuse_join(verdict.why, os.environ)
                print_stays(verdict.why)
                return
            if verdict.what == "refused":
                raise ConfigError(verdict.why)
    except KvmigError as error:
        end(str(error))
    become([sys.executable, "-m", "kvmig.serve", *serve_words(words)], environment(os.environ))


def print_stays(why: str) -> None:
    """Print one line: this server is vLLM's own."""
    print(f"kvmig: requests of this server can't move: {why}", file=sys.stderr)


def end(why: str) -> NoReturn:
    """End this process as `kvmig.serve` does for flags that it refuses."""
    print(f"kvmig: {why}", file=sys.stderr)
    sys.exit(BAD_FLAGS)


def needs_verdict(words: Sequence[str]) -> bool:
    """Whether one of the words may be a flag of ASKED, as vLLM's parser reads them: shortened, with
    underscores, or with a field of its value behind a dot."""
    names = (word.partition("=")[0].partition(".")[0].replace("_", "-") for word in words)
    given = {name for name in names if name.startswith("-") and name.strip("-")}
    return any(flag.startswith(tuple(given)) for flag in ASKED)


def judge(words: Sequence[str]) -> ServingVerdict:
    """Judge the command line of a server. Raises KvmigError where a parser refuses it."""
    from kvmig.engines.vllm.verdict import judge_words
    from kvmig.launcher.flags import parser

    flags, rest = parser().parse_known_args(serve_words(words))
    return judge_words(words, rest, flags.instances)


def refuse_join(why: str, present: Mapping[str, str]) -> None:
    """Raise ConfigError where a server whose requests stay was to join others."""
    from kvmig.core.config import JOIN
    from kvmig.core.errors import ConfigError

    if present.get(JOIN):
        raise ConfigError(
            f"{JOIN} is {present[JOIN]}, but requests of this server can't move: {why}"
        )


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
    of the host's addresses. Of a flag that is given twice the last one counts."""
    return ["--instances=1", "--host=0.0.0.0", *words]


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
