"""Servers whose engines compute nothing, start in a moment, and stop where a test wants them to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvmig.engines.toy.script import ScriptFile, ToyScript
from kvmig_tools.nursery import Nursery
from kvmig_tools.served import Served


class Toys(Served):
    """`kvmig.serve --engine toy flags`: everything but the engines is what serves vLLM."""

    def __init__(
        self,
        flags: Sequence[str],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        nursery: Nursery | None = None,
        enter: Sequence[str] = (),
        admin_key: str = "",
    ) -> None:
        """folder: where its log and its script go."""
        path = folder / "script"
        super().__init__(
            ["--engine=toy", f"--script={path}", *flags],
            model="toy",
            environment=environment,
            nursery=nursery,
            log=folder / "log",
            enter=enter,
            admin_key=admin_key,
        )
        self._script = ScriptFile(str(path))
        self._usual = ToyScript()

    def play(self, script: ToyScript) -> None:
        """All engines do so from their next step on."""
        self._script.write(script)

    def replace_weights(self, counts_by: int) -> None:
        """Whoever starts from now on counts by so much."""
        self._usual = ToyScript(counts_by=counts_by)
        self.play(self._usual)

    @contextmanager
    def held(self, tokens: int) -> Iterator[None]:
        """Inside the block no request gets more output tokens, but for one wherever it moves to."""
        self.play(msgspec.structs.replace(self._usual, hold=tokens))
        try:
            yield
        finally:
            self.play(self._usual)
