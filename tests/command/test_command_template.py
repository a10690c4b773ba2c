"""The command of a server: its fields, and what is refused of it."""

from __future__ import annotations

import pytest

from kvmig.command.template import check_template, filled, uses
from kvmig.core.errors import ConfigError

VALUES = {"model": "/m", "name": "a", "port": "81", "socket": "/s", "device": "0,1"}


def test_fields_are_filled_in_and_doubled_braces_stay_braces() -> None:
    words = ["serve", "{model}", "--port={port}", '{{"a": {{"b": 1}}}}', "{device}"]
    check_template(words)
    assert filled(words, VALUES) == ["serve", "/m", "--port=81", '{"a": {"b": 1}}', "0,1"]


def test_a_template_knows_which_field_it_uses() -> None:
    assert uses(["serve", "--uds={socket}"], "socket")
    assert not uses(["serve", "{{socket}}"], "socket")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "command is empty, must be a program"),
        (["serve", "{prot}"], "has the field {prot}, must be one of model, name, port, socket"),
        (["serve", "{}", "{port}"], "has the field {}, must be one of"),
        (["serve", "{port!r}"], "has the field {port!r}, must be one of"),
        (["serve", "{port:>9}"], "has the field {port:>9}, must be one of"),
        (["serve", "{port.real}"], "has the field {port.real}, must be one of"),
        (["serve", '{"a": 1}', "{port}"], "braces of its own are doubled"),
        (["serve", "{port"], "braces of its own are doubled"),
        (["serve"], "must have one of {port} and {socket}"),
        (["serve", "{port}", "{socket}"], "must have one of {port} and {socket}"),
        (["serve", "{port}", "|", "tee"], "has '|', which is a shell's"),
        (["{model}", "{port}"], "begins with '{model}', must begin with a program"),
    ],
)
def test_what_is_wrong_with_a_command_is_said_by_name(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_template(words)
    assert sentence in str(error.value)
