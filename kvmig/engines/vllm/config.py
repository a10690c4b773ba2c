"""From parsed flags to vLLM's configuration of one instance."""

from __future__ import annotations

import json
import re
from argparse import Namespace

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from kvmig.engines.vllm.flag_list import REFUSED
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
    refuse_settings(config)
    refuse_workers(config.device_config.device_type, args.tensor_parallel_size)
    return config


def refuse_settings(config: VllmConfig) -> None:
    """Refuse what vLLM has made of the flags, where that can't hold with kvmig, however it came.

    The flags are in `flag_list`; others, the model or a plugin may lead to the same. Raises
    ConfigError.
    """
    parallel = config.parallel_config
    none_of = (
        ("kv_transfer_config", config.kv_transfer_config, "kvmig moves KV blocks itself"),
        ("ec_transfer_config", config.ec_transfer_config, "instances encode for themselves"),
        ("kv_events_config", config.kv_events_config, "all instances would publish on one port"),
        ("hisparse_config", config.attention_config.hisparse_config, "it keeps KV on the host"),
        ("scheduler_cls", config.scheduler_config.scheduler_cls, "kvmig drives vLLM's own"),
    )
    for name, value, why in none_of:
        if value is not None:
            raise ConfigError(f"vLLM's {name} is set, must be none: {why}")
    one_of = (
        ("data_parallel_size", parallel.data_parallel_size),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
        ("nnodes", parallel.nnodes),
        ("prefill_schedule_interval", config.scheduler_config.prefill_schedule_interval),
    )
    for name, count in one_of:
        if count != 1:
            raise ConfigError(f"vLLM's {name} is {count}, must be 1: {REFUSED[name]}")


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


def why_not(error: BaseException, args: Namespace) -> str:
    """Why vLLM can't make an engine of these flags; a cache that is too small by its own flag."""
    said, given = first_sentence(error), args.kv_cache_memory_bytes
    if given is not None and "No available memory" in said:
        return f"--kv-cache-memory-bytes {given} holds no block of this model's cache: raise it"
    if given is None or "KV cache is needed" not in said:
        return said
    length = re.search(r"max seq len \((\d+)\)", said)
    return (
        f"--kv-cache-memory-bytes {given} holds no request of --max-model-len"
        f" {length[1] if length else args.max_model_len}: raise the one or lower the other"
    )
