"""A parser of command lines whose mistakes are errors of ours, and end no process."""

from __future__ import annotations

import argparse
from typing import NoReturn

from kvmig.core.errors import ConfigError


class FlagParser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises ConfigError, of one line, where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(" ".join(message.split()))
