"""What runs in vLLM's workers: a KV cache moved into shared memory, drafts sampled on a CPU."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

from kvmig.core.errors import UnsupportedLayout
from kvmig.engines.vllm import worker as worker_module
from kvmig.engines.vllm.memory import SharedCache
from kvmig.engines.vllm.subblocks import BlockPage
from kvmig.engines.vllm.worker import describe_cache, repeat_for_drafts, share_cache

pytestmark = pytest.mark.engine

NAMES = ["first", "second", "shares the first's"]


def a_worker(rank: int = 0) -> Any:
    """Two layers of [5 blocks, 2 heads, 4 tokens, 8] in one allocation, as vLLM makes them."""
    whole = torch.zeros(2 * 5 * 2 * 4 * 8 * 2, dtype=torch.int8)
    layers = list(whole.view(torch.bfloat16).view(2, 5, 2, 4, 8))
    caches = dict(zip(NAMES, [*layers, layers[0]], strict=True))
    context = {name: SimpleNamespace(kv_cache=cache, isa="vec") for name, cache in caches.items()}
    compilation = SimpleNamespace(static_forward_context=context)
    return SimpleNamespace(
        rank=rank,
        vllm_config=SimpleNamespace(compilation_config=compilation),
        model_runner=SimpleNamespace(kv_caches=layers, kv_cache_config=a_config()),
    )


def a_config() -> KVCacheConfig:
    """What vLLM makes of these layers: one group."""
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4, dtype=torch.bfloat16)
    tensor = KVCacheTensor(2 * 5 * 128, NAMES[:2], layer_stride=5 * 128, block_stride=128)
    return KVCacheConfig(5, [tensor], [KVCacheGroupSpec(NAMES[:2], spec)])


def caches(worker: Any) -> list[torch.Tensor]:
    context = worker.vllm_config.compilation_config.static_forward_context
    return [context[name].kv_cache for name in NAMES]


@pytest.fixture
def memory() -> Iterator[int]:
    """Memory without a name."""
    file = os.memfd_create("test")
    yield file
    os.close(file)


def path_of(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"


def test_a_cache_is_described_by_where_each_layer_lies() -> None:
    worker = a_worker()

    told = describe_cache(worker, NAMES)

    first, second = told.layers
    assert (first.shape, first.strides, first.itemsize) == ((5, 2, 4, 8), (128, 64, 16, 2), 2)
    assert second.address - first.address == 5 * 128
    assert (told.address, told.nbytes) == (first.address, 2 * 5 * 128)
    assert (first.dtype, first.attention) == ("torch.bfloat16", "vec")
    assert told.pages == (BlockPage(0, 128, 128), BlockPage(5 * 128, 128, 128))


def test_all_that_see_the_cache_see_it_where_it_was_moved(memory: int) -> None:
    worker = a_worker(rank=1)

    told = share_cache(worker, NAMES, ["no such file", path_of(memory)])

    with mmap.mmap(memory, told.nbytes) as mapped:
        first, second, shared = caches(worker)
        assert first is shared
        assert worker.model_runner.kv_caches[0] is first
        assert worker.model_runner.kv_caches[1] is second
        first[3, 1] = 1.5
        second[4, 0] = 2.5
        seen = torch.frombuffer(bytearray(mapped), dtype=torch.bfloat16).view(2, 5, 2, 4, 8)
        assert (seen[0, 3, 1] == 1.5).all()
        assert (seen[1, 4, 0] == 2.5).all()
        assert int((seen != 0).sum()) == 64
        mapped[:2] = torch.tensor([4.5], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert shared[0, 0, 0, 0] == 4.5


def test_a_mapping_has_the_layers_at_the_same_distances(memory: int) -> None:
    told = share_cache(a_worker(), NAMES, [path_of(memory)])

    elsewhere = told.mapped_at(1 << 40)

    assert [one.address - (1 << 40) for one in elsewhere.layers] == [0, 5 * 128]


def test_memory_that_somebody_else_still_sees_is_not_moved_in_silence(memory: int) -> None:
    worker = a_worker()
    kept = caches(worker)[1][2:]

    with pytest.raises(UnsupportedLayout, match="tensors of the worker still use"):
        share_cache(worker, NAMES, [path_of(memory)])

    assert kept.shape[0] == 3


def test_no_room_for_the_cache_is_an_error_before_the_first_step() -> None:
    with pytest.raises(OSError, match=r"\[Errno"):
        share_cache(a_worker(), NAMES, ["/dev/full"])


def test_a_cache_in_several_allocations_is_refused() -> None:
    worker = a_worker()
    context = worker.vllm_config.compilation_config.static_forward_context
    context["second"].kv_cache = torch.zeros(5, 2, 4, 8, dtype=torch.bfloat16)

    with pytest.raises(UnsupportedLayout, match="several allocations"):
        describe_cache(worker, NAMES)


def test_a_state_is_described_by_its_pages_and_moved_with_them(memory: int) -> None:
    worker = a_worker()
    context = worker.vllm_config.compilation_config.static_forward_context
    whole = context["second"].kv_cache
    context["second"].kv_cache = (whole[:, :1], whole[:, 1:])
    worker.model_runner.kv_caches[1] = context["second"].kv_cache
    del whole

    told = share_cache(worker, NAMES, [path_of(memory)])

    assert len(told.layers) == 1
    assert told.pages == (BlockPage(0, 128, 128), BlockPage(5 * 128, 128, 128))
    first, second = context["second"].kv_cache
    assert worker.model_runner.kv_caches[1][1] is second
    assert second.data_ptr() - first.data_ptr() == 64
    assert first.data_ptr() - told.address == 5 * 128


class Executor:
    """In the place of vLLM's for workers of their own, which tells an error's words and no more."""

    def __init__(self, worker: Any) -> None:
        self.workers = [worker]

    def collective_rpc(self, function: Any, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        try:
            return [function(self.workers[0], *args)]
        except UnsupportedLayout as error:
            raise RuntimeError(f"Worker failed with error '{error}'") from None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_worker_of_its_own_refuses_has_its_name_here(device: str) -> None:
    """A cache that can't be moved keeps requests where they are; it doesn't end the start."""
    worker = a_worker()
    context = worker.vllm_config.compilation_config.static_forward_context
    context["second"].kv_cache = torch.zeros(5, 2, 4, 8, dtype=torch.bfloat16)
    config: Any = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    with pytest.raises(UnsupportedLayout, match="several allocations"):
        SharedCache(config, Executor(worker), NAMES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_value_is_repeated_for_its_drafts_in_every_type(dtype: torch.dtype) -> None:
    output = torch.full((3,), 99, dtype=dtype)
    values = torch.tensor([5, 7, 6], dtype=dtype)
    repeat_for_drafts(output, values, torch.tensor([2, 2, 3], dtype=torch.int32), 6, 1)
    assert output.tolist() == [5, 5, 1]


# -- repairs of vLLM's own bugs


def fake_worker(**of: Any) -> Any:
    return SimpleNamespace(model_runner=SimpleNamespace(device=torch.device("cpu"), **of))


@pytest.mark.parametrize("mended", [False, True])
def test_samples_spare_generators_only_where_a_cpus_have_no_offset(
    monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    monkeypatch.setattr(worker_module, "has_offset", lambda generator: mended)
    worker = fake_worker(sample_tokens=(vllms := object()))
    worker_module.keep_cpu_generators_from_chunks(worker)
    assert (worker.model_runner.sample_tokens is vllms) == mended


def test_generators_of_a_cpu_have_no_offset_yet() -> None:
    assert not worker_module.has_offset(torch.Generator("cpu"))


@pytest.mark.parametrize("mended", [False, True])
def test_states_are_forgotten_only_where_vllm_keeps_them(mended: bool) -> None:
    states: dict[str, int] = {"left": 3}

    def vllms(request_id: str, state: object) -> None:
        if mended:
            states.pop(request_id, None)

    worker = fake_worker(mamba_state_idx=states, _on_request_state_removed=vllms)
    worker_module.forget_states_of_the_ended(worker)
    assert (worker.model_runner._on_request_state_removed is vllms) == mended
    worker.model_runner._on_request_state_removed("left", None)
    assert states == {}


def test_a_stand_in_that_repeats_rightly_is_left_alone() -> None:
    assert worker_module.repeats(repeat_for_drafts)
    assert not worker_module.repeats(lambda output, *args: None)
