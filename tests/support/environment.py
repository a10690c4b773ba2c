"""Environment variables that hold for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """`wanted` inside the block; afterwards all is as before, whatever was set in it."""
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
