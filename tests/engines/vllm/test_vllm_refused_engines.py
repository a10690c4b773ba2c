"""Settings of vLLM that kvmig can't serve: one sentence, before anything is loaded."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from kvmig.core.errors import ConfigError, MigrationRefused, UnsupportedLayout
from kvmig.engines.vllm import lora
from kvmig.engines.vllm.config import refuse_experts, refuse_workers, why_not, workers_word
from kvmig.engines.vllm.kind import VllmKind
from kvmig.engines.vllm.subblocks import LayerCache, RankCache, SubBlocks, UnitMap
from kvmig.kernels.driver import LIBRARY, _initialised
from kvmig.models import BUNDLED
from tests.support import fake_gpu

pytestmark = pytest.mark.engine

try:
    from vllm.v1.core.kv_cache_planning import _check_enough_kv_cache_memory
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started find the driver of two GPUs of the tests' own."""
    (tmp_path / LIBRARY).symlink_to(fake_gpu.path())
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


@pytest.mark.parametrize(("device", "workers"), [("cuda", 2), ("cpu", 1)])
def test_experts_may_be_spread_over_workers_on_gpus(device: str, workers: int) -> None:
    refuse_experts(with_experts(device, workers))


def test_experts_that_are_spread_on_a_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="--enable-expert-parallel is set, must not be with sev"):
        refuse_experts(with_experts("cpu", 2))


def with_experts(device: str, workers: int) -> Any:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(is_moe=True),
        parallel_config=SimpleNamespace(enable_expert_parallel=True, tensor_parallel_size=workers),
    )


def test_an_engine_with_spread_experts_is_of_a_numerics_class_of_its_own() -> None:
    """A worker with whole experts sums their outputs in another order."""
    spread = with_experts("cuda", 2)
    assert workers_word(spread) == "2-by-expert"
    spread.model_config.is_moe = False
    assert workers_word(spread) == "2"


def test_several_workers_on_a_cpu_need_no_gpu() -> None:
    refuse_workers("cpu", 2)
    refuse_workers("cuda", 1)
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 2, must be 1 on xpu"):
        refuse_workers("xpu", 2)


def test_a_server_that_is_to_sleep_is_refused_on_a_cpu_at_the_door() -> None:
    kind = VllmKind()
    args = kind.parse([str(BUNDLED), "--enable-sleep-mode"])

    kind.check_gpus(args, ["0"])
    with pytest.raises(ConfigError, match=r"--enable-sleep-mode can't be used: .* no GPU"):
        kind.check_gpus(args, [])


def test_several_workers_are_taken_on_gpus_that_the_first_one_reaches(driver: None) -> None:
    _initialised.cache_clear()
    refuse_workers("cuda", 2)
    assert not _initialised.cache_info().currsize  # here it isn't begun: workers are forked


def test_gpus_without_peer_access_are_refused_by_name(
    driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMIG_FAKE_NO_PEERS", "1")
    words = "--tensor-parallel-size is 2, must be 1 here: GPU 0 .* no peer access to GPU 1, whose"
    with pytest.raises(ConfigError, match=words):
        refuse_workers("cuda", 2)


def test_a_gpu_that_is_not_there_is_refused_in_the_drivers_words(driver: None) -> None:
    with pytest.raises(ConfigError, match=r"must be 1: GPUs can't be asked .*: cuDeviceGet: inval"):
        refuse_workers("cuda", 3)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_several_workers_with_expandable_segments_are_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "garbage_collection_threshold:0.9,expandable_segments:True")
    with pytest.raises(ConfigError, match=f"must be 1 with {name}, which makes memory in pieces"):
        refuse_workers("cuda", 2)


def test_several_workers_with_vllms_own_allocator_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="must be 1 with --enable-cumem-allocator, which makes"):
        refuse_workers("cuda", 2, own_allocator="--enable-cumem-allocator")


def test_a_cache_that_holds_no_request_is_refused_by_its_flag() -> None:
    args = Namespace(kv_cache_memory_bytes=32 << 20, max_model_len=None)
    with pytest.raises(ValueError, match="at least one request") as caught:
        _check_enough_kv_cache_memory(32 << 20, lambda: 64 << 20, 1216, lambda free: 600)
    assert why_not(caught.value, args) == (
        "--kv-cache-memory-bytes 33554432 holds no request of --max-model-len 1216:"
        " raise the one or lower the other"
    )
    with pytest.raises(ValueError, match="No available memory") as caught:
        _check_enough_kv_cache_memory(0, lambda: 64 << 20, 1216, lambda free: 0)
    assert "holds no block of this model's cache" in why_not(caught.value, args)
    assert why_not(ValueError("no such model"), args) == "no such model"


def cache(shape: tuple[int, ...] = (4, 2, 32, 64), **other: Any) -> RankCache:
    """Of one layer whose blocks are one run of bytes each, unless told otherwise."""
    _, heads, tokens, content = shape
    row = content * 2
    strides = other.pop("strides", (heads * tokens * row, tokens * row, row, 2))
    return RankCache(4096, 1 << 20, (), (LayerCache(4096, shape, strides, 2, "x", **other),))


def test_kernel_blocks_that_are_no_multiple_of_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="4 kernel blocks for 3 blocks"):
        UnitMap([cache()], 2, 3, SubBlocks(32), "LBHNC")


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
        UnitMap(ranks, heads, 4, SubBlocks(tokens), "LBHNC")


def lora_core(max_loras: int | None, *running: int) -> Any:
    """An engine that runs requests with these adapters."""
    config = None if max_loras is None else SimpleNamespace(max_loras=max_loras)
    made = object.__new__(Scheduler)
    made.lora_config = cast("Any", config)
    made.running = [cast("Any", adapted(one)) for one in running]

    def broken(adapter: object) -> None:
        raise ValueError("no such file")

    return SimpleNamespace(
        scheduler=made, load_adapter=broken, is_sleeping=lambda: False, clears=False
    )


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
