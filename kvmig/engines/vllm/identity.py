"""The identity of a vLLM engine's weights and its numerics class, and what changes the weights."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from vllm import __version__
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore

from kvmig.engines.numerics import numerics_class
from kvmig.engines.vllm.runner import WORKER_TIMEOUT_S, uses_v2
from kvmig.engines.weights import identity_of, updated

Identify = Callable[[], str]
"""The identity of what is on disk now."""

HARMLESS = frozenset(
    {"init_weight_transfer_engine", "check_health", "profile", "reset_mm_cache", "get_model"}
)
"""Methods of vLLM's workers that leave the weights alone. Any other one that is called over
`collective_rpc` counts as an update: trainers bring their own."""


def identity_of_args(args: Namespace) -> str:
    """Of an instance with these flags that is started now."""
    words = (args.quantization, args.load_format, args.hf_overrides, args.revision)
    return identity_of(args.model, words)


def identity_of_config(config: VllmConfig) -> str:
    """Of an engine made of this configuration now."""
    model = config.model_config
    words = (model.quantization, config.load_config.load_format, model.hf_overrides, model.revision)
    return identity_of(model.model, words)


def after_call(weights: str, method: str, args: Sequence[Any], identify: Identify) -> str:
    """The identity of weights once a client's call of an engine's method has been carried out.

    Tensors that a trainer sends can't be read here: equal updates, in their order, give equal
    identities. A checkpoint that is loaded anew as a whole has its own.
    """
    if method == "sleep" and args and isinstance(args[0], int) and args[0] >= 2:
        return updated(weights, "discarded")
    if method != "collective_rpc" or not args or args[0] in HARMLESS:
        return weights
    called, more = str(args[0]), [one for one in args[2:] if one]
    if called == "reload_weights" and not more:
        return identify()
    return updated(weights, called, *more)


def replaced_adapter(method: str, args: Sequence[Any]) -> int | None:
    """The number of the LoRA adapter that a client's call has removed, or loaded in place."""
    if method == "remove_lora" and args:
        return int(args[0])
    if method == "add_lora" and args:
        adapter = msgspec.convert(args[0], LoRARequest)
        return adapter.lora_int_id if adapter.load_inplace else None
    return None


def numerics_of(core: EngineCore) -> str:
    """The class of a loaded engine."""
    config = core.vllm_config
    workers: list[Mapping[str, str]] = core.model_executor.collective_rpc(
        describe_arithmetic, timeout=WORKER_TIMEOUT_S
    )
    return numerics_class(
        engine="vllm-" + ".".join(__version__.split(".")[:2]),
        runner="v2" if uses_v2(core) else "v1",
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        kv=config.cache_config.cache_dtype,
        workers=config.parallel_config.tensor_parallel_size,
        compiled=int(config.compilation_config.mode or 0),
        **workers[0],
    )


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
