"""Two engines in two processes, asked one thing after the other."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bench.gpu.engine_process import END_TIMEOUT_S, Came, Setting, run
from kvmig.core.errors import TransportError

START_TIMEOUT_S = 90.0
CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A LLaMA's. Keys and values are as the name's; MLP and vocabulary are smaller."""

    name: str
    layers: int
    heads: int
    head_size: int
    mlp: int
    vocabulary: int
    itemsize: int

    @property
    def token_bytes(self) -> int:
        """KV cache of a token."""
        return 2 * self.layers * self.heads * self.head_size * self.itemsize

    def config(self) -> dict[str, Any]:
        """For transformers."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_size,
            "hidden_size": self.heads * self.head_size,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 1 << 16,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
        }


class Remote:
    """One of the processes; `call` raises RuntimeError with what went wrong there."""

    def __init__(self, name: str, process: BaseProcess, control: Connection) -> None:
        self.name = name
        self._process = process
        self._control = control

    def call(self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """A method of `EngineProcess`. Raises TransportError if the process is silent or gone."""
        self._control.send((method, arguments))
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> Any:
        """Of the call that was sent."""
        try:
            if not self._control.poll(timeout_s):
                raise TransportError(f"engine {self.name} is silent for {timeout_s:g} s")
            good, value = self._control.recv()
        except (EOFError, OSError) as error:
            raise TransportError(f"engine {self.name} has ended") from error
        if not good:
            raise RuntimeError(f"engine {self.name}: {value}")
        return value

    def wait(self, request_id: str, tokens: int) -> Came:
        """See `EngineProcess.wait`."""
        came: Came = self.call("wait", request_id, tokens, CALL_TIMEOUT_S - 5)
        return came

    def end(self) -> None:
        """Let it go; kill it if it doesn't in time."""
        with suppress(OSError):  # it is gone
            self._control.send(None)
        self._process.join(END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_TIMEOUT_S)
        self._control.close()


@contextmanager
def engines(shape: Shape, setting: Setting) -> Iterator[tuple[Remote, Remote]]:
    """`a` and `b`, warm; both are ended whatever happens. Raises TransportError, RuntimeError."""
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        Path(folder, "config.json").write_text(json.dumps(shape.config()))
        setting = replace(setting, model=folder)
        found: list[Remote] = []
        for name, peer in zip("ab", spawning.Pipe(), strict=True):
            control, far = spawning.Pipe()
            process = spawning.Process(target=run, args=(name, setting, far, peer), daemon=True)
            process.start()
            far.close()
            peer.close()
            found.append(Remote(name, process, control))
            held.callback(found[-1].end)
        for one in found:
            one.answer(START_TIMEOUT_S)
        yield found[0], found[1]
