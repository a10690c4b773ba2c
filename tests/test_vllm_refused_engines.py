"""Settings of vLLM that kvmig can't serve: one sentence, before anything is loaded."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kvmig.engines.vllm import lora
from kvmig.engines.vllm.cache_shape import LayerCache, RankCache, whole_blocks
from kvmig.engines.vllm.config import refuse_workers
from kvmig.engines.vllm.flags import refuse_conflicts
from kvmig.engines.vllm.memory import layer_names
from kvmig.engines.vllm.units import UnitMap, Units
from kvmig.ground.errors import ConfigError, MigrationRefused, UnsupportedLayout

ALLOWED = {
    "data_parallel_size": 1,
    "data_parallel_rank": None,
    "data_parallel_start_rank": None,
    "data_parallel_external_lb": False,
    "data_parallel_hybrid_lb": False,
    "scheduler_cls": None,
    "kv_transfer_config": None,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "nnodes": 1,
    "distributed_executor_backend": None,
    "api_server_count": None,
    "headless": False,
    "grpc": False,
    "enable_elastic_ep": False,
}


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("data_parallel_size", 2, "data-parallel flags can't be used.*use --instances N"),
        ("data_parallel_rank", 0, "data-parallel flags can't be used.*use --instances N"),
        ("data_parallel_start_rank", 0, "data-parallel flags can't be used"),
        ("data_parallel_external_lb", True, "data-parallel flags can't be used"),
        ("data_parallel_hybrid_lb", True, "data-parallel flags can't be used"),
        ("scheduler_cls", "a.B", "--scheduler-cls can't be used.*leave it out"),
        ("kv_transfer_config", "{}", "--kv-transfer-config can't be used.*use --transport"),
        ("pipeline_parallel_size", 2, "--pipeline-parallel-size 2 can't.*--tensor-parallel-size"),
        ("decode_context_parallel_size", 2, "context parallelism can't be used"),
        ("prefill_context_parallel_size", 2, "context parallelism can't be used"),
        ("nnodes", 3, "--nnodes 3 can't be used: an instance runs on one host"),
        ("distributed_executor_backend", "ray", "--distributed-executor-backend ray.*leave it out"),
        ("api_server_count", 2, "--api-server-count can't be used.*leave it out"),
        ("headless", True, "--headless can't be used"),
        ("grpc", True, "--grpc can't be used"),
        ("enable_elastic_ep", True, "--enable-elastic-ep can't be used: use --instances N"),
    ],
)
def test_a_flag_for_another_owner_of_the_engines_is_refused(
    flag: str, value: object, sentence: str
) -> None:
    refuse_conflicts(Namespace(**ALLOWED))
    with pytest.raises(ConfigError, match=sentence):
        refuse_conflicts(Namespace(**{**ALLOWED, flag: value}))


def test_several_workers_are_refused_where_their_memory_cannot_be_mapped() -> None:
    refuse_workers("cpu", 2)
    refuse_workers("cuda", 1)
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 2, must be 1 on cuda for now"):
        refuse_workers("cuda", 2)


def scheduler(*kinds: type) -> Scheduler:
    """With one KV cache group of each kind."""
    groups = [
        SimpleNamespace(kv_cache_spec=object.__new__(kind), layer_names=[f"layer.{at}"])
        for at, kind in enumerate(kinds)
    ]
    return cast(
        "Scheduler", SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups))
    )


def test_one_group_of_full_attention_is_what_moves() -> None:
    assert layer_names(scheduler(FullAttentionSpec)) == ["layer.0"]


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        ((FullAttentionSpec, SlidingWindowSpec), "2 KV cache groups; kvmig moves one"),
        ((), "0 KV cache groups; kvmig moves one"),
        ((SlidingWindowSpec,), "KV cache kind SlidingWindowSpec; kvmig moves full attention"),
        ((MambaSpec,), "KV cache kind MambaSpec; kvmig moves full attention"),
    ],
)
def test_other_kinds_of_kv_cache_are_refused_by_name(
    kinds: tuple[type, ...], sentence: str
) -> None:
    with pytest.raises(UnsupportedLayout, match=sentence):
        layer_names(scheduler(*kinds))


def cache(shape: tuple[int, ...] = (4, 2, 32, 64), **other: Any) -> RankCache:
    """Of one layer whose blocks are one run of bytes each, unless told otherwise."""
    _, heads, tokens, content = shape
    row = content * 2
    strides = other.pop("strides", (heads * tokens * row, tokens * row, row, 2))
    return RankCache(4096, 1 << 20, (LayerCache(4096, shape, strides, 2, "x", **other),))


def test_kernel_blocks_that_are_no_multiple_of_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="4 kernel blocks for 3 blocks"):
        whole_blocks([cache()], 3, "LBHNC")


@pytest.mark.parametrize(
    ("ranks", "heads", "tokens", "sentence"),
    [
        ([cache()] * 2, 3, 32, "2 workers with 2 of 3 KV heads each"),
        ([cache()], 2, 24, "units of 24 tokens in attention's blocks of 32"),
        ([cache(attention="amx")], 2, 8, "units of 8 tokens in attention's blocks of 32"),
        (
            [cache(strides=(8192 + 100, 4096, 128, 2))],
            2,
            32,
            "KV blocks are 8292 bytes apart, no multiple of 4096",
        ),
    ],
)
def test_caches_that_cannot_be_cut_in_units_are_refused_with_their_sizes(
    ranks: list[RankCache], heads: int, tokens: int, sentence: str
) -> None:
    with pytest.raises(UnsupportedLayout, match=sentence):
        UnitMap(ranks, heads, 4, Units(tokens), "LBHNC")


def lora_core(max_loras: int | None, *running: int) -> Any:
    """An engine that runs requests with these adapters."""
    config = None if max_loras is None else SimpleNamespace(max_loras=max_loras)
    made = object.__new__(Scheduler)
    made.lora_config = cast("Any", config)
    made.running = [cast("Any", adapted(one)) for one in running]

    def broken(adapter: object) -> None:
        raise ValueError("no such file")

    return SimpleNamespace(scheduler=made, add_lora=broken)


def adapted(adapter: int | None) -> Any:
    """A request with this LoRA adapter."""
    named = None if adapter is None else SimpleNamespace(lora_int_id=adapter, lora_name="sql")
    return SimpleNamespace(lora_request=named)


@pytest.mark.parametrize(
    ("core", "reason", "sentence"),
    [
        (lora_core(None), "incompatible", "a LoRA request, and --enable-lora is off here"),
        (lora_core(1, 5), "no_batch_slot", "as many LoRA adapters run as --max-loras allows"),
        (lora_core(2, 5), "incompatible", "LoRA adapter sql can't be loaded here: no such file"),
    ],
)
def test_a_destination_that_cannot_run_the_adapter_says_why(
    core: Any, reason: str, sentence: str
) -> None:
    lora.load_adapter(core, adapted(None))
    with pytest.raises(MigrationRefused, match=sentence) as refusal:
        lora.load_adapter(core, adapted(7))
    assert refusal.value.reason == reason
