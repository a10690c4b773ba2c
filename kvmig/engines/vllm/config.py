"""From parsed flags to vLLM's configuration of one instance."""

from __future__ import annotations

import json
from argparse import Namespace

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from kvmig.ground.errors import ConfigError


def engine_config(args: Namespace) -> VllmConfig:
    """vLLM's own checks; ConfigError with their first sentence."""
    # Several workers are processes of their own; a single one runs in the engine's.
    args.distributed_executor_backend = "uni" if args.tensor_parallel_size == 1 else "mp"
    # With it the front end sends an image once, and later its name: to whichever instance.
    args.mm_processor_cache_gb = 0
    args.use_tqdm_on_load = False  # the bars of several instances would overwrite each other
    try:
        engine_args = AsyncEngineArgs.from_cli_args(args)
        config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except json.JSONDecodeError as error:
        raise ConfigError(f"MODEL is {args.model}, and a file in it is broken: {error}") from error
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        raise ConfigError(first_sentence(error)) from error
    refuse_workers(config.device_config.device_type, args.tensor_parallel_size)
    return config


def refuse_workers(device: str, workers: int) -> None:
    """Refuse, before anything is loaded, several workers whose memory can't be mapped here."""
    if workers > 1 and device != "cpu":
        raise ConfigError(
            f"--tensor-parallel-size is {workers}, must be 1 on {device} for now:"
            " KV caches of several workers are shared on a CPU only"
        )


def first_sentence(error: BaseException) -> str:
    """The part of an error message that a person needs, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic: "1 validation error for X", the field, then "Value error, why [type=...]".
    if lines and "validation error" in lines[0]:
        lines = [line for line in lines[1:] if not line.startswith("For further")]
    text = " ".join(lines) or type(error).__name__
    return text.split(" [type=")[0].removeprefix("Value error, ")
