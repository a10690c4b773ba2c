"""`python -m kvmig_tools.profile --shares`: costs for `kvmig.placement` from one's own device."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from kvmig.core.devices import DeviceRecord
from kvmig.core.errors import ConfigError
from kvmig.models import BUNDLED
from kvmig.placement.step_costs import DeviceCosts, FitErrors, ModelCost, StepCost, load
from kvmig_tools.cost_file import to_toml, with_model
from kvmig_tools.cost_fit import ShareTimes, fit_step_cost
from kvmig_tools.profile import ADVICE, main, share_errors
from kvmig_tools.share_profile import ProfiledDevice, own_device, points_of, shares_of
from kvmig_tools.sim.fit import PromptTime, StepTime

KNOWN = StepCost(
    (6.6, 53.3, 15.8, 0.78), (11.4, 2.29, 0.005, 0.049, 0.283, 0.057), FitErrors((0, 0), (0, 0))
)
CPU = ProfiledDevice("cpu", 1 << 34, None, (0, 1, 2, 3))


def times_of(cost: StepCost, share: float) -> ShareTimes:
    """What an engine with just these costs would show."""
    prompts = [
        PromptTime(n, 1e3 * cost.prefill_s(n, n**2, share)) for n in (16, 64, 256, 1024, 2048)
    ]
    steps = [
        StepTime(b, b * n, 1e3 * cost.decode_s(b, b * n, share))
        for b in (1, 4, 16, 64)
        for n in (32, 512, 2048)
    ]
    return ShareTimes(share, prompts, steps)


def device(models: dict[str, ModelCost], name: str = "mine") -> DeviceCosts:
    return DeviceCosts(name, "measured", 1 << 30, 2e10, 0.9, 5, models)


def model(*sizes: int) -> ModelCost:
    return ModelCost(1000, 64, {str(one): KNOWN for one in sizes})


def test_costs_are_found_again_from_the_times_that_they_give() -> None:
    pytest.importorskip("scipy")
    found = fit_step_cost([times_of(KNOWN, share) for share in (1.0, 0.6, 0.5, 0.3)])
    assert found.prefill == pytest.approx(KNOWN.prefill, rel=1e-3)
    assert found.decode == pytest.approx(KNOWN.decode, rel=1e-3)
    assert max(*found.errors.prefill, *found.errors.decode) < 0.01


def test_times_that_fall_with_the_work_give_no_coefficient_below_zero() -> None:
    pytest.importorskip("scipy")
    prompts = [PromptTime(n, 50 - n / 100) for n in (16, 256, 1024)]
    steps = [StepTime(b, b * 32, 20 - b) for b in (1, 4, 16)]
    found = fit_step_cost([ShareTimes(share, prompts, steps) for share in (1.0, 0.5)])
    assert min(*found.prefill, *found.decode) >= 0
    assert found.decode[0] > 0
    assert found.errors.prefill[1] > found.errors.prefill[0] > 0


def test_the_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    measured = device({"Qwen3-0.6B": model(2, 1), "chat": model(1)})
    file = tmp_path / "mine.toml"
    file.write_text(to_toml(measured))
    assert load(str(file)) == measured


def test_another_model_or_size_is_put_beside_those_of_the_file() -> None:
    before = with_model(None, device({"chat": model(1)}), "chat")
    both = with_model(before, device({"code": model(1)}), "code")
    again = with_model(both, device({"chat": model(2)}), "chat")
    assert {name: sorted(one.tp) for name, one in again.models.items()} == {
        "chat": ["1", "2"], "code": ["1"],
    }  # fmt: skip


def test_a_file_of_another_device_is_left_alone() -> None:
    with pytest.raises(ConfigError, match="name is mine, must be theirs"):
        with_model(device({"chat": model(1)}), device({"chat": model(1)}, "theirs"), "chat")


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        ("100", "--shares is 100, must have 100 and one smaller share"),
        ("50,25", "--shares is 50,25, must have 100"),
        ("100,40", "--shares has 40, must be whole cores of the 4 here: 25, 50, 75, 100"),
        ("100,half", "--shares is '100,half', must be percentages of 1 to 100"),
        ("100,0", "--shares is '100,0', must be percentages of 1 to 100"),
    ],
)
def test_shares_that_cant_be_measured_are_refused_by_name(shares: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        shares_of(shares, CPU)
    assert sentence in str(refused.value)


def test_a_gpu_has_shares_only_where_an_mps_daemon_listens() -> None:
    gpu = DeviceRecord(id="0", index=0, uuid="GPU-0", name="H100", total=1 << 36)
    with pytest.raises(ConfigError, match="no MPS daemon listens"):
        shares_of("100,50", CPU._replace(gpu=gpu))
    under_mps = CPU._replace(gpu=msgspec.structs.replace(gpu, mps=True))
    assert shares_of("30,100,60", under_mps) == [100, 60, 30]


def test_a_host_without_gpus_is_measured_as_its_cores() -> None:
    found = own_device("", {"CUDA_VISIBLE_DEVICES": ""})
    assert found.gpu is None
    assert found.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert found.name == f"cpu-{len(found.cores)}-cores"


def test_batches_are_what_the_engine_runs_at_once() -> None:
    assert points_of(4, 1000) == [(1, 32), (1, 256), (2, 32), (2, 256), (4, 32)]


def test_a_fit_that_is_far_off_comes_with_advice() -> None:
    def shown(*middle: float) -> str | None:
        fits = {
            str(at): msgspec.structs.replace(KNOWN, errors=FitErrors((one, 30), (1, 2)))
            for at, one in enumerate(middle, 1)
        }
        caption = share_errors("chat", device({"chat": ModelCost(1000, 64, fits)})).caption
        return None if caption is None else str(caption)

    assert shown(3, 14) is None
    assert shown(3, 16) == ADVICE


def test_nothing_starts_for_shares_that_cant_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out=x.toml", "--shares=100"]) == 2
    assert capsys.readouterr().err.startswith("kvmig_tools.profile: --shares is 100, must have")


@pytest.mark.server
@pytest.mark.long
def test_a_real_engine_is_measured_on_a_part_of_the_cores(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    cores = len(os.sched_getaffinity(0))
    if cores % 2:
        pytest.skip("half of the cores isn't a whole number")
    file = tmp_path / "costs" / "mine.toml"
    flags = ["--enforce-eager", "--dtype=float32", "--max-num-seqs=4", "--repeats=1"]
    assert main([str(BUNDLED), f"--out={file}", "--shares=100,50", "--name=count", *flags]) == 0
    cost = load(str(file)).models["count"].tp["1"]
    assert cost.decode_s(1, 64, 1.0) > 0
    assert cost.decode_s(4, 256, 0.5) >= cost.decode_s(4, 256, 1.0)
