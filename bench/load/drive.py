"""The client's process, as a benchmark drives it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bench.load import process


class Driver:
    """Started by `with`, and ended."""

    def __init__(self, port: int, log: Path) -> None:
        self._log = log.open("ab")
        self._process = process.start("bench.load.client", port, log=self._log, talks=True)

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        """One of the methods of `bench.load.client.Client`, and what it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **words}).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client has ended, see {os.fspath(self._log.name)}")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("errors"):
            raise RuntimeError(f"the client met with errors: {answer['errors']}")
        return answer

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        process.end(self._process)
        self._log.close()
