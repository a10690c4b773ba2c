"""transformers as a kind of engine: implements `kvmig.engines.kind.EnginePlugin`; and its flags."""

from __future__ import annotations

import argparse
import importlib
from argparse import Namespace
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from kvmig.core.config import ClusterConfig, UnitConfig
from kvmig.core.errors import ConfigError, KvmigError, StartupError
from kvmig.engines.base import ServingEngine
from kvmig.engines.kind import UnsizedEngineKind, api_keys, check_model, flag_parser, set_offline
from kvmig.engines.transformers import factory
from kvmig.engines.transformers.config import EngineConfig
from kvmig.engines.transformers.config import parse as parse_config
from kvmig.engines.transformers.versions import check_version


class TransformersKind(UnsizedEngineKind):
    """`argv` is what `parser` has: names as of vLLM where they mean the same."""

    name = "transformers"

    def prepare(self) -> None:
        set_offline()
        check_version()

    def set_environment(self, environment: MutableMapping[str, str]) -> None:
        set_offline(environment)

    def load(self) -> None:
        importlib.import_module("kvmig.engines.transformers.serving")

    def parse(self, argv: list[str]) -> Namespace:
        return parse(argv)

    def check_words(self, argv: list[str]) -> None:
        parse(argv)

    def check_config(self, args: Namespace) -> None:
        check_model(args.model)
        parse_config(engine_fields(args))

    def check_gpus(self, args: Namespace, gpu_ids: Sequence[str]) -> None:
        if args.device == "cuda" and not gpu_ids:
            raise ConfigError("--device is cuda, but this machine has no GPU that may be used")

    def print_help(self) -> None:
        parser().print_help()

    def flags_for(self, words: Sequence[str], config: ClusterConfig) -> list[str]:
        if len(config.priorities) > 1:
            raise ConfigError(
                "--priority-class can't be used with --engine transformers: it runs requests"
                " in order of arrival"
            )
        if config.ray is not None:
            raise ConfigError("--ray can't be used with --engine transformers for now")
        # It has no salts: where users are kept apart, no two requests share a prefix.
        return ["--no-share-prefixes"] if config.http.isolate_users else []

    def weights(self, args: Namespace) -> str:
        from kvmig.engines.transformers.config import identify, parse

        return identify(parse(engine_fields(args)))

    def make(
        self, argv: list[str], unit_tokens: int, unit: UnitConfig | None = None
    ) -> ServingEngine:
        args = parse(argv)
        try:
            return factory(**engine_fields(args))
        except KvmigError:
            raise
        except Exception as error:
            # Whatever transformers says about the model or the machine: the launcher prints it.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise StartupError(f"can't serve {args.model}: {reason}") from error


_FIELDS = {
    "dtype": "dtype",
    "device": "device",
    "block_size": "block_tokens",
    "num_blocks": "num_blocks",
    "max_num_batched_tokens": "max_batch_tokens",
    "max_num_seqs": "max_batch_requests",
    "random_weights": "random_weights",
    "weights_seed": "weights_seed",
    "share_prefixes": "share_prefixes",
}
"""Flag -> field of EngineConfig."""
SERVED_BLOCKS = 2048
"""KV blocks of an instance, unless --num-blocks is given."""


def parser() -> argparse.ArgumentParser:
    """MODEL and flags, in groups."""
    usual = EngineConfig(num_blocks=SERVED_BLOCKS)
    root = flag_parser("transformers")
    root.add_argument("model", metavar="MODEL", nargs="?", help="folder of a checkpoint")
    http = root.add_argument_group("HTTP")
    http.add_argument("--host", help="address to listen on")
    http.add_argument("--port", type=int, default=8000, help="port to listen on")
    http.add_argument("--api-key", nargs="+", help="keys of which calls must bear one")
    http.add_argument("--served-model-name", nargs="+", help="names of the model for clients")
    http.add_argument("--chat-template", help="file with a template in place of the model's own")
    http.add_argument("--disable-uvicorn-access-log", action="store_true", help="say less")
    http.add_argument("--max-model-len", type=int, help="tokens of a request at most")
    engine = root.add_argument_group("engine")
    engine.add_argument("--dtype", default=usual.dtype, help="of weights and KV cache")
    engine.add_argument(
        "--device", default=usual.device, help="of weights and KV cache: cpu, or cuda for a GPU"
    )
    engine.add_argument(
        "--block-size", type=int, default=usual.block_tokens, help="tokens a KV block"
    )
    engine.add_argument(
        "--num-blocks", type=int, default=usual.num_blocks, help="KV blocks of an instance"
    )
    engine.add_argument(
        "--max-num-seqs", type=int, default=usual.max_batch_requests, help="requests per step"
    )
    engine.add_argument(
        "--max-num-batched-tokens", type=int, default=usual.max_batch_tokens, help="tokens per step"
    )
    engine.add_argument(
        "--random-weights", action="store_true", help="draw weights instead of loading them"
    )
    engine.add_argument(
        "--no-share-prefixes",
        dest="share_prefixes",
        action="store_false",
        help="let no request take over KV blocks of another one's prompt",
    )
    engine.add_argument("--weights-seed", type=int, default=usual.weights_seed, help="of these")
    return root


def parse(argv: list[str]) -> Namespace:
    """Raises ConfigError with the flag, its value and what is allowed."""
    args = parser().parse_args(argv)
    if args.model is None:
        raise ConfigError("MODEL is missing, must be a folder with a config.json")
    check_model(args.model)
    args.api_key = api_keys(args.api_key)
    parse_config(engine_fields(args))
    if args.max_model_len is not None and args.max_model_len < 2:
        raise ConfigError(f"--max-model-len is {args.max_model_len}, must be 2 or more")
    if args.chat_template is not None and not Path(args.chat_template).is_file():
        raise ConfigError(f"--chat-template is {args.chat_template}, must be a file")
    return args


def engine_fields(args: Namespace) -> dict[str, Any]:
    """The fields that `kvmig.engines.transformers.factory` takes."""
    return {"model": args.model} | {field: getattr(args, flag) for flag, field in _FIELDS.items()}
