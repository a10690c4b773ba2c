"""What a deployment's command line says of GPUs, and of how weights are read."""

from __future__ import annotations

from kvmig.fleet.deployment_words import gpu_words, words
from kvmig.fleet.device_claims import DeviceClaim
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec

CLAIM = DeviceClaim(1 << 30, "estimated", bounds=True)
SLEEP = "--enable-sleep-mode"


def test_one_that_may_be_parked_on_a_gpu_can_sleep() -> None:
    parked = ModelSpec(name="a", source="path:/a", warm="parked")
    own = gpu_words(parked, CLAIM, [["0"]])
    assert own == ["--instance-gpus=i0: 0", f"--instance-gpu-memory={1 << 30}", SLEEP]


def test_no_other_has_vllm_make_its_memory_for_that() -> None:
    for other in (
        ModelSpec(name="a", source="path:/a"),
        ModelSpec(name="a", source="path:/a", engine="toy", warm="parked"),
    ):
        assert SLEEP not in gpu_words(other, CLAIM, [["0"]])
    assert gpu_words(ModelSpec(name="a", source="path:/a", warm="parked"), None, []) == []


def test_a_first_instance_has_as_many_workers_as_its_unit_has_gpus() -> None:
    mixed = ModelSpec(name="a", source="path:/a", flags=("--mixed-shapes",))
    own = gpu_words(mixed, CLAIM, [["0"], ["1", "2"]])
    assert own[:3] == [
        "--instance-gpus=i0: 0",
        "--instance-gpus=i1: 1,2",
        "--instance-flags=i1: --tensor-parallel-size=2",
    ]


def test_weights_are_read_in_the_fastest_way_where_the_specification_wants_that() -> None:
    settings = FleetSettings(data="/d")
    plain = ModelSpec(name="a", source="path:/a")
    fastest = ModelSpec(name="a", source="path:/a", load="auto")
    assert "--load=auto" not in words(plain, "d", settings)
    assert "--load=auto" in words(fastest, "d", settings)
