"""The toy as a kind of engine: implements `kvmig.engines.kind.EnginePlugin`; and its tokenizer.

It tests what is around engines: an instance starts in a moment, and follows a script.
"""

from __future__ import annotations

import argparse
import time
from argparse import Namespace
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from kvmig.core.config import ClusterConfig, UnitConfig
from kvmig.core.errors import ConfigError
from kvmig.engines.base import ServingEngine
from kvmig.engines.kind import UnsizedEngineKind, api_keys, flag_parser
from kvmig.engines.toy.core import VOCABULARY
from kvmig.engines.toy.engine import STEP_MS, ToyEngine
from kvmig.engines.toy.script import ScriptFile

WAIT_S = 0.05


def parser() -> argparse.ArgumentParser:
    """MODEL, which may be any word, and flags."""
    root = flag_parser("toy")
    root.add_argument("model", metavar="MODEL", help="its name")
    root.add_argument("--host", help="address to listen on")
    root.add_argument("--port", type=int, default=8000, help="port to listen on")
    root.add_argument("--api-key", nargs="+", help="keys of which calls must bear one")
    root.add_argument("--served-model-name", nargs="+", help="names of the model for clients")
    root.add_argument("--disable-uvicorn-access-log", action="store_true", help="say less")
    root.add_argument("--max-model-len", type=int, help="tokens of a request at most")
    root.add_argument("--block-size", type=int, default=32, help="tokens a KV block")
    root.add_argument("--num-blocks", type=int, default=600, help="KV blocks of an instance")
    root.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="GPUs of an instance, if there are any"
    )
    root.add_argument("--max-num-seqs", type=int, default=16, help="requests per step")
    root.add_argument("--step-ms", type=float, default=STEP_MS, help="from one step to the next")
    root.add_argument("--numerics", default="toy", help="name of the class that it rounds like")
    root.add_argument("--script", help="file with what it shall do, see kvmig.engines.toy.script")
    return root


class ToyKind(UnsizedEngineKind):
    """The toy for the launcher; its start imports nothing of a real engine."""

    name = "toy"

    def prepare(self) -> None:
        """Do nothing: a toy has no version to check."""

    def set_environment(self, environment: MutableMapping[str, str]) -> None:
        """Do nothing: a toy imports no library."""

    def load(self) -> None:
        """Do nothing: a toy imports no library."""

    def parse(self, argv: list[str]) -> Namespace:
        args = parser().parse_args(argv)
        args.api_key = api_keys(args.api_key)
        for name in ("block_size", "num_blocks", "max_num_seqs", "step_ms", "tensor_parallel_size"):
            if (value := getattr(args, name)) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}, must be more than 0")
        return args

    def check_words(self, argv: list[str]) -> None:
        self.parse(argv)

    def check_config(self, args: Namespace) -> None:
        """Do nothing: a toy has no files."""

    def check_gpus(self, args: Namespace, gpu_ids: Sequence[str]) -> None:
        """Do nothing: a toy needs no GPU."""

    def print_help(self) -> None:
        parser().print_help()

    def flags_for(self, words: Sequence[str], config: ClusterConfig) -> list[str]:
        return []

    def weights(self, args: Namespace) -> str:
        return ScriptFile(args.script).read().weights

    def make(
        self, argv: list[str], unit_tokens: int, unit: UnitConfig | None = None
    ) -> ServingEngine:
        args = self.parse(argv)
        script = ScriptFile(args.script)
        while not script.read().load:
            time.sleep(WAIT_S)
        return ToyEngine(
            args.num_blocks,
            args.block_size,
            args.max_num_seqs,
            args.step_ms,
            script,
            args.numerics,
        )


class ByteTokenizer:
    """A `kvmig.frontend.openai.generation.TokenizerPort`: each byte of a text is a token."""

    max_tokens: int | None = None
    vocabulary = VOCABULARY
    longest = 1
    eos_ids: Sequence[int] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
    ) -> list[int]:
        """One line a message."""
        if options:
            raise ValueError(f"there is no option {next(iter(options))}")
        return self.encode("".join(f"{one['content']}\n" for one in messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def spell(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids)
