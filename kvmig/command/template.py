"""The command that starts a server: words with fields in braces. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from string import Formatter

from kvmig.core.errors import ConfigError

FIELDS: Mapping[str, str] = {
    "model": "the folder or file of source",
    "name": "the model's name",
    "port": "a free port of 127.0.0.1",
    "socket": "the path of a Unix socket that the server is to listen on",
    "device": "its GPUs as CUDA_VISIBLE_DEVICES has them; cpu if it has none",
    "memory": "bytes of the host's memory that it may take",
    "gpu_memory": "bytes of each of its GPUs that it may take",
}
"""Fields of a template, and what they become."""
LISTENS = ("port", "socket")
"""Fields of which a template has one."""
SHELL = {"|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1"}
"""Words that only a shell understands."""


def check_template(words: Sequence[str]) -> None:
    """Raises ConfigError for a command that can't be filled in."""
    if not words:
        raise ConfigError("command is empty, must be a program and its arguments")
    for word in words:
        if word in SHELL:
            raise ConfigError(
                f"command has {word!r}, which is a shell's: no shell reads it; put it into a"
                " script, or write sh -c '...'"
            )
    used = [name for word in words for name in _fields(word)]
    allowed = ", ".join(FIELDS)
    for name in used:
        if name not in FIELDS:
            raise ConfigError(
                f"command has the field {{{name:.100}}}, must be one of {allowed}; braces of its"
                " own are doubled"
            )
    if len(set(used) & set(LISTENS)) != 1:
        raise ConfigError(
            "command must have one of {port} and {socket}: where the server listens for requests"
        )
    if _fields(words[0]):
        raise ConfigError(f"command begins with {words[0]!r:.100}, must begin with a program")


def uses(words: Iterable[str], field: str) -> bool:
    """Whether a checked template has the field."""
    return any(field in _fields(word) for word in words)


def filled(words: Iterable[str], values: Mapping[str, str]) -> list[str]:
    """The command line of a checked template. values: by field."""
    return [
        "".join(
            literal + ("" if name is None else values[name])
            for literal, name, _, _ in Formatter().parse(word)
        )
        for word in words
    ]


def _fields(word: str) -> list[str]:
    """Names of the fields in a word, conversions and formats included. Raises ConfigError."""
    try:
        parts = list(Formatter().parse(word))
    except ValueError as error:
        raise ConfigError(
            f"command has {word!r:.100}: {error}; braces of its own are doubled"
        ) from error
    return [
        name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
        for _, name, form, conversion in parts
        if name is not None
    ]
