"""What is worth a try where a model does not fit."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvmig.core.model_sizes import LayerSizes, ModelSizes
from kvmig.fleet.device_claims import KnownSizes
from kvmig.fleet.evaluate import DeviceVerdict, FitVerdict, HostVerdict, verdict
from kvmig.fleet.fit_suggestions import changes, suggestion
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.worker_nodes import WorkerNode

TOKEN, LENGTH, WINDOW, BLOCK = 1000, 8192, 50_000, 16_000
SPEC = ModelSpec(name="a", source="path:/a", flags=("--seed=1",))
LAYERS = (
    LayerSizes(kind="full", layers=2, token=TOKEN, request=TOKEN * LENGTH),
    LayerSizes(kind="window", layers=2, token=0, request=WINDOW),
)
SIZES = ModelSizes(weights=9000, files=9000, tokens=LENGTH, layers=LAYERS, reserved=BLOCK)
WHOLE = TOKEN * LENGTH + WINDOW + BLOCK


def evaluated(kv: int, need: int, free: int) -> FitVerdict:
    """On a host without GPUs."""
    host = HostVerdict(need_bytes=need, total_bytes=free, free_bytes=free, fits=need <= free)
    known = KnownSizes(9000, SIZES)
    return verdict("a", 1, host, known, kv, (5, ""), None, None, WorkerNode("local", free, free))


def on_gpus(number: int, need: int, free: int, **more: Any) -> FitVerdict:
    found = evaluated(WHOLE, 1, 1)
    gpus = [
        DeviceVerdict(
            gpu=f"GPU {at}", uuid=str(at), need_bytes=need, total_bytes=free, free_bytes=free,
            others_bytes=0, models={}, fits=need <= free,
        )
        for at in range(number)
    ]  # fmt: skip
    return replace(found, fits=need <= free, gpus=gpus, **more)


def test_a_kv_cache_that_holds_no_request_of_the_models_length_is_no_fit() -> None:
    assert evaluated(WHOLE, 10, 20).fits
    short = evaluated(WHOLE - 1, 10, 20)
    assert not short.fits
    assert short.why == (
        f"a KV cache of {WHOLE - 1} bytes has no room for a request of {LENGTH} tokens, which takes"
        f" {WHOLE} bytes with the block that its engine keeps for itself"
    )


def test_it_is_tried_with_the_longest_requests_that_its_kv_cache_holds() -> None:
    (tried,) = changes(SPEC, evaluated(WINDOW + BLOCK + 1000 * TOKEN, 10, 20), heads=0)
    assert tried.flags == ("--seed=1", "--max-model-len=896")


def test_a_block_that_no_request_gets_is_left_where_requests_would_fill_the_cache() -> None:
    (tried,) = changes(SPEC, evaluated(WINDOW + 1024 * TOKEN, 10, 20), heads=0)
    assert tried.flags[1:] == ("--max-model-len=896",)
    (tried,) = changes(SPEC, evaluated(WINDOW + 1024 * TOKEN + BLOCK, 10, 20), heads=0)
    assert tried.flags[1:] == ("--max-model-len=1024",)


def test_it_is_tried_with_a_smaller_kv_cache_where_memory_is_short() -> None:
    missing = 2048 * TOKEN
    (tried,) = changes(SPEC, evaluated(WHOLE, 30 + missing, 30), heads=0)
    assert tried.flags[1:] == (
        f"--max-model-len={LENGTH - 2048}",
        f"--kv-cache-memory-bytes={WHOLE - missing}",
    )


def test_a_cache_with_room_for_several_shrinks_before_requests_do() -> None:
    (tried,) = changes(SPEC, evaluated(3 * WHOLE, 30 + WHOLE, 30), heads=0)
    assert tried.flags[1:] == (
        f"--max-model-len={LENGTH}",
        f"--kv-cache-memory-bytes={2 * WHOLE}",
    )


@pytest.mark.parametrize("kv", [WINDOW, WINDOW + 100 * TOKEN])
def test_what_leaves_no_room_for_a_request_is_not_tried(kv: int) -> None:
    assert list(changes(SPEC, evaluated(kv, 10, 20), heads=0)) == []


def test_it_is_tried_on_more_gpus_that_its_heads_are_divided_among() -> None:
    found = on_gpus(8, need=20, free=10, kv_bytes=0, request_bytes=0, token_bytes=0)
    assert [one.flags[-1] for one in changes(SPEC, found, heads=12)] == [
        "--tensor-parallel-size=2", "--tensor-parallel-size=4",
    ]  # fmt: skip
    two = replace(SPEC, gpus_per_instance=2)
    (four,) = changes(two, found, heads=12)
    assert (four.workers, four.gpus_per_instance) == (4, 4)
    chosen = replace(SPEC, tensor_parallel="auto")
    assert list(changes(chosen, found, heads=12)) == []


def test_a_suggestion_names_what_is_to_be_added_and_what_it_takes() -> None:
    changed = replace(SPEC, flags=(*SPEC.flags, "--max-model-len=896"))
    found = evaluated(WHOLE, 10, 20)
    said = suggestion(SPEC, changed, found)
    assert (said.flags, said.gpus_per_instance) == (("--max-model-len=896",), 0)
    assert (said.need_bytes, said.max_tokens) == (10, LENGTH)
