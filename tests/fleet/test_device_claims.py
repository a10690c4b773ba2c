"""What an instance claims of a GPU, from its specification, files and measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvmig.core.devices import DeviceInventory, DeviceProcess, DeviceRecord
from kvmig.core.errors import ConfigError
from kvmig.core.model_sizes import LayerSizes, ModelSizes
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.device_claims import (
    OUTSIDE,
    REST,
    KnownSizes,
    claim_of,
    size_in,
)
from kvmig.fleet.device_watch import DeviceWatch
from kvmig.fleet.spec import InstanceCounts, ModelSpec

GIB = 1 << 30
TOTAL = 80 * GIB
REQUEST, BLOCK = GIB // 2, 1 << 20
SIZES = ModelSizes(
    weights=16 * GIB,
    files=16 * GIB,
    tokens=4096,
    layers=(LayerSizes(kind="FullAttentionSpec", layers=32, token=1 << 17, request=REQUEST),),
    shortest=BLOCK,
    reserved=BLOCK,
)
KNOWN = KnownSizes(16 * GIB, SIZES)


def spec(**more: Any) -> ModelSpec:
    return ModelSpec(name="a", source="path:/models/a", **more)


def each(known: KnownSizes = KNOWN, **more: Any) -> int:
    claim = claim_of(spec(**more), known, TOTAL)
    assert claim is not None
    return claim.each


@pytest.mark.parametrize(
    ("more", "bytes_"),
    [
        ({"gpu_memory": 5 * GIB}, 5 * GIB),
        ({"flags": ("--gpu-memory-utilization=0.5",)}, TOTAL // 2 + OUTSIDE),
        ({"flags": ("--kv-cache-memory-bytes", "2G")}, 16 * GIB + 2 * GIB + REST),
        ({}, 16 * GIB + 8 * REQUEST + BLOCK + REST),
        ({"instances": InstanceCounts(target=2)}, 16 * GIB + 2 * REQUEST + BLOCK + REST),
        ({"instances": InstanceCounts(target=900)}, 16 * GIB + TOTAL // 4 + REST),
    ],
)
def test_a_claim_is_what_the_specification_says_or_weights_cache_and_rest(
    more: dict[str, Any], bytes_: int
) -> None:
    assert each(**more) == bytes_


def test_a_model_in_a_unit_claims_no_cache_and_what_was_measured_with_one_counts_not() -> None:
    measured = replace(KNOWN, measured=70 * GIB)
    in_unit: dict[str, Any] = {"unit": "u", "unit_memory": 20 * GIB}
    for known in (KNOWN, measured):
        assert each(known, **in_unit) == 16 * GIB + REST
        assert each(known, **in_unit, gpu_memory=17 * GIB) == 17 * GIB
    claim = claim_of(spec(**in_unit), KNOWN, TOTAL)
    assert claim is not None
    assert not claim.bounds, "the launcher gives it the unit's flags"


def test_one_request_of_the_whole_length_fits_however_small_the_gpu() -> None:
    large = replace(KNOWN, sizes=SIZES)
    claim = claim_of(spec(), large, GIB)
    assert claim is not None
    assert claim.kv == REQUEST + BLOCK


def test_what_was_measured_goes_before_what_was_assumed() -> None:
    measured = replace(KNOWN, measured=17 * GIB)
    assert each(measured, flags=("--kv-cache-memory-bytes=2G",)) == 17 * GIB
    assert each(measured, gpu_memory=5 * GIB) == 5 * GIB
    assert each(measured) == each(), "vLLM may take all of its share at the next start"


@pytest.mark.parametrize(
    ("more", "bounds"),
    [
        ({}, True),
        ({"gpu_memory": 5 * GIB}, True),
        ({"gpu_memory": 5 * GIB, "flags": ("--kv-cache-memory-bytes", "2G")}, False),
        ({"flags": ("--gpu-memory-utilization=0.5",)}, False),
        ({"engine": "transformers", "flags": ("--device", "cuda")}, False),
    ],
)
def test_vllm_is_kept_to_its_claim_unless_its_flags_say_what_it_takes(
    more: dict[str, Any], bounds: bool
) -> None:
    claim = claim_of(spec(**more), KNOWN, TOTAL)
    assert claim is not None
    assert claim.bounds == bounds


def test_engines_that_use_no_gpu_claim_none() -> None:
    assert claim_of(spec(engine="transformers"), KNOWN, TOTAL) is None
    on_gpu = spec(engine="transformers", flags=("--device", "cuda"))
    assert claim_of(on_gpu, KNOWN, TOTAL) is not None


@pytest.mark.parametrize(
    ("text", "size"),
    [("64M", 64 << 20), ("64m", 64_000_000), ("7", 7), ("1.5k", 1500), ("", 0), ("x", 0)],
)
def test_sizes_are_read_as_vllm_reads_them(text: str, size: int) -> None:
    assert size_in(text) == size


# -- the GPUs of a host


def gpu(at: int, used: int = 0, *processes: DeviceProcess) -> DeviceRecord:
    return DeviceRecord(
        id=str(at), index=at, uuid=f"GPU-{at}", name="H100", total=TOTAL, used=used,
        processes=processes, peers=("GPU-0", "GPU-1"),
    )  # fmt: skip


def budget(*devices: DeviceRecord) -> DeviceBudget:
    watch = DeviceWatch(
        read=lambda: DeviceInventory(devices=devices, missing="NVML: it isn't there")
    )
    watch.read_sample()
    return DeviceBudget(watch)


def test_gpus_are_named_by_index_or_uuid() -> None:
    need = budget(gpu(0), gpu(1)).need(spec(engine="toy", gpus=("1", "GPU-0")))
    assert need is not None
    assert need.only == {"GPU-0", "GPU-1"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"gpus": ("2",)}, "gpus has '2', must be some of 0 \\(GPU-0\\)"),
        ({"instances": InstanceCounts(target_kind="freeness")}, "target_kind is 'freeness', must"),
        ({"gpu_memory": TOTAL + 1}, "needs .* of a GPU; GPU 0 .* 1 too few"),
    ],
)
def test_what_cannot_be_on_these_gpus_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        budget(gpu(0)).check(spec(engine="toy", **more))


@pytest.mark.parametrize("field", ["gpus", "gpus_per_instance", "gpu_memory"])
def test_without_a_gpu_each_field_of_gpus_is_refused_with_the_reason(field: str) -> None:
    value: Any = ("0",) if field == "gpus" else 1
    with pytest.raises(ConfigError, match=f"{field} is .*there is no GPU \\(NVML: it isn't there"):
        budget().check(spec(engine="toy", **{field: value}))
    assert budget().need(spec()) is None


def test_memory_of_others_is_what_no_process_of_the_fleet_has() -> None:
    watch = budget(gpu(0, 9 * GIB, DeviceProcess(7, 5 * GIB, "python"))).watch
    (named,) = watch.memory({"GPU-0": {"a": GIB}}, {})
    assert (named.others, named.claims) == (9 * GIB, {"a": GIB})
    assert "process 7 (python) has 5.00 GiB" in named.whose
    (unnamed,) = watch.memory({}, {"GPU-0": 8 * GIB})
    assert unnamed.others == GIB, "claims of instances that serve are in it"
