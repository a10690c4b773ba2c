"""A part of a GPU's SMs for an engine's steps, on GPUs of the tests' own: which SMs, and what is
said where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import product
from types import SimpleNamespace

import pytest

from kvmig.core.errors import ConfigError, KvmigError
from kvmig.engines.gate import PARTS, ComputeShares
from kvmig.engines.shares import PERCENTAGE, SmShares, groups_of, open_shares, place_in
from kvmig.kernels.green import GreenStream, smallest_groups
from tests.support import fake_gpu
from tests.support.fake_gpu import FakeGpu

SMS, GROUP = 44, 8
"""Five groups, and four SMs that are in none."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.setenv("KVMIG_FAKE_SMS", str(SMS))
    monkeypatch.setenv("KVMIG_FAKE_MPS", "1")
    with fake_gpu.installed():
        yield FakeGpu()


def test_two_engines_of_a_unit_have_no_sm_in_common_that_they_neednt(gpu: FakeGpu) -> None:
    for groups, one, other in product(range(1, 40), range(1, PARTS + 1), range(1, PARTS + 1)):
        first, second = groups_of(one, 0, groups), groups_of(other, 1, groups)
        assert len(first) == one * groups // PARTS
        assert len(set(first)) == len(first)
        assert set(first + second) <= set(range(groups))
        common = len(first) + len(second) - groups
        assert len({*first} & {*second}) == max(0, common)


def test_a_third_engine_begins_where_the_first_ends() -> None:
    assert [groups_of(4, place, 10) for place in range(3)] == [
        [0, 1, 2, 3], [9, 8, 7, 6], [4, 5, 6, 7]
    ]  # fmt: skip


def test_work_on_a_streams_share_takes_whole_groups_of_sms_rounded_down(gpu: FakeGpu) -> None:
    assert [group.sms for group in smallest_groups(gpu)] == [GROUP] * (SMS // GROUP)
    shares = SmShares(gpu, ComputeShares(8, 5), "unit")
    assert {parts: stream.sms for parts, stream in shares.streams.items()} == {8: 32, 5: 16}
    for stream in shares.streams.values():
        assert len(gpu.sms(stream.handle)) == stream.sms
    shares.close()


def test_engines_of_one_unit_take_other_sms_and_one_that_ends_leaves_its_own(gpu: FakeGpu) -> None:
    def sms(one: SmShares) -> set[int]:
        return gpu.sms(one.streams[4].handle)

    first, second = (SmShares(gpu, ComputeShares(10, 4), "unit") for _ in range(2))
    elsewhere = SmShares(gpu, ComputeShares(10, 4), "another unit")
    assert not sms(first) & sms(second)
    assert sms(first) == sms(elsewhere)
    left = sms(first)
    first.close()
    again = SmShares(gpu, ComputeShares(10, 4), "unit")
    assert sms(again) == left
    for one in (second, elsewhere, again):
        one.close()


def test_a_share_of_all_sms_needs_no_stream(gpu: FakeGpu) -> None:
    shares = SmShares(gpu, ComputeShares(10, 10), "unit")
    assert shares.streams == {}
    shares.close()


def test_a_share_smaller_than_the_smallest_group_is_refused_in_one_sentence(gpu: FakeGpu) -> None:
    with pytest.raises(ConfigError) as refused:
        open_shares(gpu, ComputeShares(8, 1), "unit")
    assert str(refused.value) == (
        "--unit-shares is 80,10: 10 % are less than the 8 SMs that this GPU gives at least,"
        " must be 20 or more"
    )


def test_a_gpu_too_small_for_any_share_says_so(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMIG_FAKE_SMS", "7")
    told = open_shares(gpu, ComputeShares(8, 4), "unit")
    assert told == "cuDevSmResourceSplitByCount: invalid resource configuration (CUDA error 915)"


def test_without_mps_shares_limit_no_sms(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVMIG_FAKE_MPS")
    told = open_shares(gpu, ComputeShares(8, 4), "unit")
    assert told == "no daemon of MPS is there, so the engines on this GPU take turns"


def test_beside_a_percentage_of_mps_shares_limit_no_sms(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PERCENTAGE, "60")
    told = open_shares(gpu, ComputeShares(8, 4), "unit")
    assert told == f"{PERCENTAGE} is 60, which limits all of its steps alike"


def test_a_driver_without_such_streams_is_told_and_nothing_is_left_behind(gpu: FakeGpu) -> None:
    gpu.lose("cuGreenCtxStreamCreate")
    told = open_shares(gpu, ComputeShares(8, 4), "unit")
    assert told == "NVIDIA's driver is too old: it has no cuGreenCtxStreamCreate"


@pytest.mark.parametrize(
    "name",
    ["cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc",
     "cuGreenCtxCreate", "cuGreenCtxStreamCreate"],
)  # fmt: skip
def test_a_driver_that_fails_leaves_nothing_behind(gpu: FakeGpu, name: str) -> None:
    fake_gpu.fail(name)
    assert str(open_shares(gpu, ComputeShares(8, 4), "unit")).startswith(name)
    fake_gpu.fail("")
    with place_in("unit") as place:
        assert place == 0


def test_a_stream_whose_green_context_is_gone_is_an_error(gpu: FakeGpu) -> None:
    stream = GreenStream(gpu, smallest_groups(gpu)[:2])
    gpu.call("cuGreenCtxDestroy", stream._context)
    with pytest.raises(KvmigError, match="stream is detached"):
        gpu.finish(stream.handle)
    gpu.destroy_stream(stream.handle)


def test_groups_of_different_splits_make_no_stream(gpu: FakeGpu) -> None:
    with pytest.raises(KvmigError, match="invalid resource configuration"):
        GreenStream(gpu, [smallest_groups(gpu)[0], smallest_groups(gpu)[1]])


@pytest.mark.engine
def test_model_runner_v2_computes_on_the_stream_that_it_is_told(gpu: FakeGpu) -> None:
    pytest.importorskip("vllm")
    from kvmig.engines.vllm.worker import compute_on

    class V2:
        @cached_property
        def main_stream(self) -> str:
            return "the first"

    worker = SimpleNamespace(model_runner=V2())
    compute_on(worker, "of a share")  # type: ignore[arg-type]
    assert worker.model_runner.main_stream == "of a share"
    compute_on(SimpleNamespace(model_runner=object()), "of a share")  # type: ignore[arg-type]
