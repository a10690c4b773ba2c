"""Mistakes on command lines."""

from __future__ import annotations

import pytest

from kvmig.core.errors import ConfigError
from kvmig.core.flag_parser import FlagParser


def test_a_mistake_with_lines_in_it_is_told_in_one() -> None:
    with pytest.raises(ConfigError, match=r"^unrecognized arguments: one two$"):
        FlagParser(prog="program").parse_args(["one\n  two"])
