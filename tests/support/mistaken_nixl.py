"""NIXL where UCX knows no GPU: a GPU's memory of the tests' own is the host's to it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvmig.kvtransfer.transports import nixl
from tests.support import fake_gpu


class Mistaken:
    """NIXL's API; the CPU may read and write in a GPU's memory that is registered with it."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self.gpus: list[int] = []
        """Of the memory that was registered."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def nixl_agent(self, *arguments: Any) -> Any:
        agent = self._api.nixl_agent(*arguments)
        register, listed = agent.register_memory, agent.get_xfer_descs

        def register_memory(memory: Sequence[tuple[int, int, int, str]], kind: str) -> Any:
            if kind == "VRAM":
                ((address, _, gpu, _),) = memory
                self.gpus.append(gpu)
                fake_gpu.library().fakegpu_host(ctypes.c_void_p(address))
            return register(memory, "DRAM")

        agent.register_memory = register_memory
        agent.get_xfer_descs = lambda those, kind: listed(those, "DRAM")
        return agent


@contextlib.contextmanager
def installed() -> Iterator[Mistaken]:
    """This process has it until it is left; its GPUs are fake_gpu's."""
    made = Mistaken(nixl.load())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nixl, "load", lambda: made)
        yield made
