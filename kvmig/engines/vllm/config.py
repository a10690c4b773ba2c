"""vLLM's configuration of one instance, from parsed flags, and the identity of what it runs."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from vllm import __version__
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core import EngineCore

from kvmig.core.errors import ConfigError, KernelUnavailable
from kvmig.engines.identity import identity_of, numerics_class, updated
from kvmig.engines.vllm.connectors import KNOWN, NATIVE, is_known
from kvmig.engines.vllm.flag_errors import why_invalid
from kvmig.engines.vllm.flags import ALLOWED, REFUSED
from kvmig.engines.vllm.loaders import check_device, weights_word
from kvmig.engines.vllm.runner import WORKER_TIMEOUT_S, uses_v2
from kvmig.kernels.peers import unreached


def engine_config(args: Namespace) -> VllmConfig:
    """vLLM's own checks; raises ConfigError with the first line of their message."""
    # Several workers are processes of their own; a single one runs in the engine's.
    args.distributed_executor_backend = "uni" if args.tensor_parallel_size == 1 else "mp"
    # With it the front end sends an image once, and later its name: to whichever instance.
    args.mm_processor_cache_gb = 0
    args.use_tqdm_on_load = False  # the bars of several instances would overwrite each other
    inspect_here()
    try:
        engine_args = AsyncEngineArgs.from_cli_args(args)
        config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except json.JSONDecodeError as error:
        raise ConfigError(f"MODEL is {args.model}, and a file in it is broken: {error}") from error
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        raise ConfigError(first_sentence(error)) from error
    refuse_settings(config)
    refuse_experts(config)
    refuse_sleep(config)
    check_device(config.load_config.load_format, config.device_config.device_type)
    model, own_allocator = config.model_config, ""
    if model.enable_sleep_mode or model.enable_cumem_allocator:
        own_allocator = SLEEP_FLAG if model.enable_sleep_mode else "--enable-cumem-allocator"
    refuse_workers(config.device_config.device_type, args.tensor_parallel_size, own_allocator)
    return config


def inspect_here() -> None:
    """Let vLLM look at a model's class in this process, on a CPU.

    By itself it starts another one for that, lest a module of a model initialise CUDA here. Such a
    process imports all of vLLM: where a model starts for the first time, the launcher's and each
    instance's take ten seconds of a core each.
    """
    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda look: look()


def refuse_settings(config: VllmConfig) -> None:
    """Refuse what vLLM has made of the flags, where that can't hold with kvmig, however it came.

    The flags are in `flags`; others, the model or a plugin may lead to the same. Raises
    ConfigError.
    """
    parallel = config.parallel_config
    none_of = (
        ("ec_transfer_config", config.ec_transfer_config, "instances encode for themselves"),
        ("kv_events_config", config.kv_events_config, "all instances would publish on one port"),
        ("hisparse_config", config.attention_config.hisparse_config, "it keeps KV on the host"),
        ("scheduler_cls", config.scheduler_config.scheduler_cls, "kvmig drives vLLM's own"),
    )
    for name, value, why in none_of:
        if value is not None:
            raise ConfigError(f"vLLM's {name} is set, must be none: {why}")
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector != NATIVE and not is_known(transfer):
        raise ConfigError(
            f"vLLM's kv_connector is {transfer.kv_connector}, must be {NATIVE}"
            f" (--kv-offloading-size), {', '.join(KNOWN)} or none: what others hold of requests"
            " isn't known"
        )
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


def refuse_experts(config: VllmConfig) -> None:
    """Refuse what ends vLLM's workers on a CPU in their first step. Raises ConfigError."""
    parallel = config.parallel_config
    on_cpu = config.device_config.device_type == "cpu"
    if parallel.enable_expert_parallel and parallel.tensor_parallel_size > 1 and on_cpu:
        raise ConfigError(
            "--enable-expert-parallel is set, must not be with several workers on a CPU: vLLM's"
            " experts there can't be spread, and its workers crash"
        )


SLEEP_FLAG = "--enable-sleep-mode"


def sleeps(config: VllmConfig) -> bool:
    """Whether the engine's memory on a GPU is made so that it can be taken away."""
    return bool(config.model_config.enable_sleep_mode)


def refuse_sleep(config: VllmConfig) -> None:
    """Refuse what has not been tried with an engine that sleeps. Raises ConfigError."""
    if sleeps(config) and config.kv_transfer_config is not None:
        raise ConfigError(
            f"{SLEEP_FLAG} can't be used with --kv-offloading-size or --kv-transfer-config: what a"
            " connector keeps of the KV cache would not follow"
        )


ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables with settings of torch's allocator."""


def refuse_workers(device: str, workers: int, own_allocator: str = "") -> None:
    """Refuse, before anything is loaded, several workers whose KV caches one process can't open.

    own_allocator: the flag that puts vLLM's own in the place of torch's. Raises ConfigError.
    """
    if workers == 1 or device == "cpu":
        return
    flag = f"--tensor-parallel-size is {workers}"
    if device != "cuda":
        raise ConfigError(f"{flag}, must be 1 on {device}: KV caches there can't be shared")
    pieces = [name for name in ALLOCATOR if "expandable_segments:True" in os.environ.get(name, "")]
    if own_allocator:
        pieces.append(own_allocator)
    if pieces:
        raise ConfigError(
            f"{flag}, must be 1 with {pieces[0]}, which makes memory in pieces: a llumlet opens"
            " its workers' KV caches as they were allocated"
        )
    try:
        missed = unreached(workers)
    except KernelUnavailable as error:
        raise ConfigError(f"{flag}, must be 1: {error}") from error
    if missed:
        others = ", ".join(f"GPU {gpu}" for gpu in missed)
        raise ConfigError(
            f"{flag}, must be 1 here: GPU 0 of this instance has no peer access to {others}, whose"
            " workers' KV caches it would copy"
        )


def first_sentence(error: BaseException) -> str:
    """The part of an error message that a person needs, on one line."""
    if isinstance(error, ValidationError):
        return why_invalid(error, ALLOWED | REFUSED.keys())
    return " ".join(str(error).split()) or type(error).__name__


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


Identify = Callable[[], str]
"""The identity of what is on disk now."""

HARMLESS = frozenset(
    {"init_weight_transfer_engine", "check_health", "profile", "reset_mm_cache", "get_model"}
)
"""Methods of vLLM's workers that leave the weights alone. Any other one that is called over
`collective_rpc` counts as an update: trainers bring their own."""


def identity_of_args(args: Namespace) -> str:
    """The identity of the weights of an instance with these flags that is started now."""
    how = weights_word(args.load_format)
    words = [args.quantization, how, args.hf_overrides, args.revision]
    return identity_of(args.model, words + _given(args.quantization_config))


def identity_of_config(config: VllmConfig, folder: str = "") -> str:
    """The identity of the weights of an engine made of this configuration now.

    folder: of weights that it would have in place of its model's.
    """
    model = config.model_config
    how = weights_word(config.load_config.load_format)
    revision = None if folder else model.revision
    words = [model.quantization, how, model.hf_overrides, revision]
    return identity_of(folder or model.model, words + _given(model.quantization_config))


def _given(setting: object) -> list[object]:
    """A word of an identity that only those have where it is set: others keep theirs."""
    return [setting] if setting else []


def after_call(weights: str, method: str, args: Sequence[Any], identify: Identify) -> str:
    """The identity of weights once a client's call of an engine's method has been carried out.

    Tensors that a trainer sends can't be read here: equal updates, in their order, give equal
    identities. A checkpoint that is loaded again as a whole has its own.
    """
    if method == "sleep" and args and isinstance(args[0], int) and args[0] >= 2:
        return updated(weights, "discarded")
    if method != "collective_rpc" or not args or args[0] in HARMLESS:
        return weights
    called, more = str(args[0]), [one for one in args[2:] if one]
    if called == "reload_weights" and not more:
        return identify()
    return updated(weights, called, *more)


def numerics_of(core: EngineCore, probe: str = "") -> str:
    """The numerics class of a loaded engine. probe: see `warmup.Probe`; empty: vLLM's minor counts.

    Two minors of vLLM are one class where they compute the same bits, which only a probe can show.
    """
    config = core.vllm_config
    workers: list[Mapping[str, str]] = core.model_executor.collective_rpc(
        describe_arithmetic, timeout=WORKER_TIMEOUT_S
    )
    return numerics_class(
        engine="vllm-" + (probe or ".".join(__version__.split(".")[:2])),
        runner="v2" if uses_v2(core) else "v1",
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        kv=config.cache_config.cache_dtype,
        workers=workers_word(config),
        compiled=int(config.compilation_config.mode or 0),
        **answer_words(config),
        **workers[0],
    )


def answer_words(config: VllmConfig) -> dict[str, str]:
    """Settings by which the same logits give other tokens or log-probabilities, where they are not
    vLLM's defaults."""
    model, guided = config.model_config, config.structured_outputs_config
    mark = config.watermark_config
    ways = ("enable_in_reasoning", "disable_any_whitespace", "disable_additional_properties")
    words = {
        "logprobs": "" if model.logprobs_mode == "raw_logprobs" else model.logprobs_mode,
        "processors": "+".join(map(str, model.logits_processors or ())),
        "noise": "fp64" if model.use_fp64_gumbel else "",
        "guided": "+".join(way for way in ways if getattr(guided, way, False)),
        "watermark": "" if mark is None else updated(repr(mark), mark.key),  # which repr leaves out
    }
    return {name: word for name, word in words.items() if word}


def workers_word(config: VllmConfig) -> str:
    """How many, and whether each has whole experts: that sums their outputs in another order."""
    parallel = config.parallel_config
    by_expert = parallel.enable_expert_parallel and config.model_config.is_moe
    return f"{parallel.tensor_parallel_size}{'-by-expert' if by_expert else ''}"


def describe_arithmetic(worker: Any) -> dict[str, str]:
    """What a worker computes with; runs in the workers."""
    groups = [one for some in getattr(worker.model_runner, "attn_groups", ()) for one in some]
    backends = {group.backend.get_name() for group in groups}
    words = {
        "attention": "+".join(sorted(backends)) or "none",
        "device": current_platform.get_device_name(),
    }
    if current_platform.is_cpu():
        # Sums over threads are added up in another order where there are more of them.
        words["threads"] = str(torch.get_num_threads())
        words["device"] = "cpu-" + torch.backends.cpu.get_cpu_capability().lower()
    return words


def compile_nothing() -> None:
    """Keep --enforce-eager to the letter in this process, an instance's own, on a CPU.

    vLLM compiles some small functions of its sampler all the same (`torch.compile` with
    `simple_compile_backend`, such as `vllm.v1.sample.ops.logprobs.batched_count_greater_than`).
    Each takes seconds of a core, in every instance's process again, to save microseconds a step:
    an instance that comes back or is added would serve that much later.
    """
    if current_platform.is_cpu():
        torch.compiler.set_stance("force_eager")
