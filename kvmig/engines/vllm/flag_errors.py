"""What is wrong with a value of one of vLLM's flags, in one line: field, value and what is allowed.

vLLM's own messages have several lines where a flag takes JSON, and name Python's functions.
"""

from __future__ import annotations

import re
from argparse import Action, ArgumentParser
from collections.abc import Callable, Container, Iterable, Iterator
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any

from kvmig.core.errors import ConfigError
from kvmig.engines.vllm.json_flags import reads_json, why_unfit

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_JSON = "must be JSON"
_NUMBERS = (
    ("invalid literal for int()", "must be a whole number"),
    ("could not convert string to float", "must be a number"),
)
"""Beginnings of what Python says of a text that is no number, and what is allowed."""
_KINDS = frozenset({"int", "float", "str", "bool"})
"""What pydantic puts behind a field that may be of several kinds, besides dict[...]."""
MOST = 200
"""Characters of a value that are shown."""


def name_bad_values(parser: ArgumentParser) -> None:
    """Let each flag of the parser refuse a value that it can't read with a ConfigError."""
    for action in parser._actions:
        if action.option_strings and action.type is not None:
            action.type = _named(action)


def _named(action: Action) -> Callable[[str], Any]:
    """The action's reader of values, whose errors name the flag."""
    flag, read = action.option_strings[0], action.type
    assert callable(read)
    takes_json = reads_json(action)

    def reads(text: str) -> Any:
        try:
            value = read(text)
        except Exception as error:  # a flag's own checks raise what they like
            raise ConfigError(why_refused(flag, text, error)) from error
        if takes_json and (allowed := why_unfit(action, text, value)):
            raise ConfigError(f"{_is(flag, text)}, {allowed}")
        return value

    return reads


def why_refused(flag: str, text: str, error: BaseException) -> str:
    """One line on why a flag can't have the value `text`."""
    from pydantic import ValidationError

    for one in _causes(error):
        if isinstance(one, ValidationError):
            return "; ".join(_why_field(flag, one.title, wrong) for wrong in one.errors())
        if isinstance(one, JSONDecodeError):
            return f"{_is(flag, text)}, {_JSON}: {one}"
        for beginning, allowed in _NUMBERS:
            if str(one).startswith(beginning):
                return f"{_is(flag, text)}, {allowed}"
    return f"{_is(flag, text)}: {_line(error)}"


def why_invalid(error: ValidationError, flags: Container[str]) -> str:
    """One line on all that is wrong with one of vLLM's configurations. flags: names of all, with
    underscores."""
    whole = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", error.title).lower()
    flag = _flag(whole) if whole in flags else ""
    return "; ".join(_why_field(flag, error.title, one) for one in error.errors())


def _why_field(flag: str, title: str, one: ErrorDetails) -> str:
    """flag: that has the configuration; empty: each of its fields has a flag of its own."""
    names = [name for name in map(str, one["loc"]) if "[" not in name and name not in _KINDS]
    if not flag:
        flag = _flag(names.pop(0)) if names else f"vLLM's {title}"
    field = ".".join((flag, *names))
    said = " ".join(one["msg"].split())
    if one["type"] == "json_invalid":
        return f"{_is(flag, one['input'])}, {_JSON}: {said.removeprefix('Invalid JSON: ')}"
    if one["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = sorted(name for name in _fields(title) if not name.startswith("_"))
        listed = f": {', '.join(known)}" if known else ""
        return f"{_is(field, one['input'])}, must be a field of vLLM's {title}{listed}"
    if one["type"] == "missing":
        return f"{field} is missing, must be given"
    if allowed := _after("Input should be ", said):
        return f"{_is(field, one['input'])}, must be {allowed}"
    return f"{_is(field, one['input'])}: {said.removeprefix('Value error, ')}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _fields(title: str) -> Iterable[str]:
    """Fields of one of vLLM's configurations."""
    import vllm.config

    found: dict[str, object] = getattr(
        getattr(vllm.config, title, None), "__dataclass_fields__", {}
    )
    return found


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came of."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__ or at.__context__


def _is(field: str, value: object) -> str:
    return f"{field} is {value!r:.{MOST}}"


def _after(beginning: str, text: str) -> str:
    return text.removeprefix(beginning) if text.startswith(beginning) else ""


def _line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return said if isinstance(error, ValueError) and said else f"{type(error).__name__} {said}"
