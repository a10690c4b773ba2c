"""Command lines and texts as answers, pages and logs may show them. Pure.

They are shown without the values of flags and variables with names of secrets, and without the
secrets of URLs. A command line that was shown comes back once it is edited:
`restored_words` puts what is hidden in its place again.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvmig.core.errors import ConfigError
from kvmig.core.shown_urls import HIDDEN, shown_url

_PARTS = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_SECRET_ENDS = (
    "token", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "credential",
    "credentials", "apikey", "apikeys", "accesskey", "secretkey", "privatekey",
)  # fmt: skip
"""Ends of a name's last part, which may be written in one: hftoken, authtoken."""
_SECRET_LAST = frozenset({"key", "keys", "pwd", "pass", "auth", "authorization", "jwt", "bearer"})
_SECRET_ANYWHERE = frozenset(
    {"secret", "password", "passwd", "passphrase", "credentials", "apikey"}
)
_PLACES = frozenset({"file", "files", "path", "dir", "folder", "name", "type", "length", "size"})
"""Last parts of names of what is not itself secret, such as --ssl-password-file."""
_TOKENS_OF = frozenset({"api", "access", "auth", "bearer", "hf"})
"""`tokens` behind these are no tokens of a model."""

_BEGIN = r"(?<![\w.-])(?P<dashes>-{0,2})(?P<name>[A-Za-z_][\w.-]{0,127}+)"
_NAMED = re.compile(
    _BEGIN + r"(?P<between>=(?!=)"  # NAME=VALUE
    r"|\\*[\"']\s*[:=]\s*\\*"  # "NAME": VALUE
    r"|[\"'],\s*(?=[\"'\\])"  # '--NAME', 'VALUE'
    r"|:\s+"  # Authorization: VALUE
    r"|\s+(?:is\s+)?(?!-))"  # --NAME VALUE, --NAME is VALUE
)
_SCHEME = re.compile(r"(?:Bearer|Basic|Token)\s+", re.IGNORECASE)
_VALUE = re.compile(
    r"\"(?:[^\"\\]|\\.)*+\"|'(?:[^'\\]|\\.)*+'|\[[^\]]*+\]|[^\s\"'<>,;&)\]}]++|[\"'\[]\S*+"
)
_NO_VALUE = re.compile(r"(?:None|null|true|false|True|False|\{.*|\(.*|\[\]|\"\"|'')", re.DOTALL)
_PROSE = re.compile(
    r"(?:is|was|are|has|have|must|may|can|needs|takes|and|or|of|in|for|with|without|requires)\b"
)
_ASSIGNED = re.compile(r"(?P<name>-{0,2}[A-Za-z_][\w.-]*+)=(?P<value>.*)", re.DOTALL)
_FIELD = re.compile(r"\{[a-z_]+\}")
"""A word of a command that a server's own value takes the place of."""
_PROBE = "shown0probe"


def is_secret_name(name: str) -> bool:
    """Whether a flag or variable of this name has a secret: by KEY, TOKEN, SECRET, PASSWORD and the
    like in it."""
    parts = [part.lower() for part in _PARTS.split(name) if part]
    while len(parts) > 1 and parts[-1].isdigit():
        parts.pop()
    if not parts or parts[-1] in _PLACES:
        return False
    last = parts[-1]
    if last == "tokens":
        return not _TOKENS_OF.isdisjoint(parts)
    return (
        last.endswith(_SECRET_ENDS)
        or last in _SECRET_LAST
        or not _SECRET_ANYWHERE.isdisjoint(parts)
    )


def shown_text(text: str) -> str:
    """A text without secrets of URLs, and without what secret names in it are given."""
    text = shown_url(text)
    parts, at, end = [], 0, 0
    while (found := _NAMED.search(text, at)) is not None:
        at = found.end()
        if not _is_assigned(found) or not is_secret_name(found["name"]):
            continue
        if (scheme := _SCHEME.match(text, at)) is not None:
            at = scheme.end()
        value = _VALUE.match(text, at)
        if value is None or _NO_VALUE.fullmatch(value[0]):
            continue
        if found["between"].isspace() and _PROSE.match(value[0]):
            continue
        parts += [text[end:at], _hidden(value[0])]
        at = end = value.end()
    return "".join([*parts, text[end:]])


def _is_assigned(found: re.Match[str]) -> bool:
    """Whether a name stands as one that is given a value, and not as a word of prose."""
    between = found["between"]
    if between.strip() in ("", "is"):
        return found["dashes"] != ""
    if between.strip() == ":":
        return found["dashes"] == "" and re.search(r"[-_]|uthorization", found["name"]) is not None
    return True


def _hidden(value: str) -> str:
    quote = value[0] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else ""
    return f"{quote}{HIDDEN}{quote}"


class ShownWord(NamedTuple):
    """A word of a command line as it may be shown."""

    flag: str
    """The secret flag before it, whose value it is; empty: of none."""
    text: str


def shown_words(words: Sequence[str]) -> tuple[str, ...]:
    """The words of a command line, secret values hidden: those behind a flag with a secret name,
    up to the next flag, those behind `=`, and those of URLs."""
    return tuple(one.text for one in _shown(words))


def shown_line(line: str) -> str:
    """The same of a command line as one text, which stays as it is where nothing is hidden."""
    try:
        words = shlex.split(line)
    except ValueError:
        return shown_text(line)
    found = shown_words(words)
    return line if list(found) == words else shlex.join(found).replace(f"'{HIDDEN}'", HIDDEN)


def _shown(words: Sequence[str]) -> list[ShownWord]:
    found, flag, is_first = [], "", False
    for word in words:
        if flag and _is_value(word, is_first):
            found.append(ShownWord(flag, HIDDEN))
            is_first = False
            continue
        flag = word if word.startswith("-") and is_secret_name(word) and "=" not in word else ""
        is_first = True
        found.append(ShownWord("", word if flag else _shown_word(word)))
    return found


def _is_value(word: str, is_first: bool) -> bool:
    """Whether a word behind a secret flag is its value. is_first: whether it is next to it."""
    if _FIELD.fullmatch(word):
        return False
    return not word.startswith("--" if is_first else "-")


def _shown_word(word: str) -> str:
    given = _ASSIGNED.fullmatch(word)
    if given is None:
        return shown_text(word)
    name, value = given["name"], given["value"]
    if value and is_secret_name(name):
        return f"{name}={HIDDEN}"
    return f"{name}={_shown_word(value)}"


def restored_words(field: str, given: Sequence[str], kept: Sequence[str]) -> tuple[str, ...]:
    """A command line that was made from a shown one, with what is hidden in it as `kept` has it.

    field: named in errors. Raises ConfigError where it is not clear what a hidden value stands for.
    """
    places = [ShownWord(place.flag, word) for place, word in zip(_shown(given), given, strict=True)]
    hidden = Counter(one for one in places if _has_hidden(one))
    if not hidden:
        return tuple(given)
    originals: dict[ShownWord, list[str]] = {}
    for place, word in zip(_shown(kept), kept, strict=True):
        if place.text != word:
            originals.setdefault(place, []).append(word)
    for one, count in hidden.items():
        _check_known(field, one, originals.get(one, []), count)
    left = {place: iter(_repeated(words, hidden[place])) for place, words in originals.items()}
    return tuple(next(left[one]) if one in hidden else one.text for one in places)


def _repeated(words: Sequence[str], count: int) -> Sequence[str]:
    return words if len(words) == count else [words[0]] * count


def _check_known(field: str, one: ShownWord, originals: Sequence[str], count: int) -> None:
    if originals and (len(originals) == count or len(set(originals)) == 1):
        return
    what = "several values" if originals else "a value that is not known here"
    shown = f"{one.flag} {one.text}" if one.flag else one.text
    raise ConfigError(
        f"{field} has {shown!r:.200}, where {HIDDEN} stands for {what}: must be the value itself"
    )


def _has_hidden(one: ShownWord) -> bool:
    """Whether a word has the sign for what is hidden in a place where something would be."""
    if HIDDEN not in one.text:
        return False
    if one.flag:
        return one.text == HIDDEN
    probed = one.text.replace(HIDDEN, _PROBE)
    return _shown_word(probed).count(_PROBE) < probed.count(_PROBE)
