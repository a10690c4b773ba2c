"""How many thread blocks a copy between GPUs takes: few beside an engine's steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvmig.engines.copy_width import CTAS_WHILE_IDLE, CopyWidth, copy_workers
from tests.support.fake_gpu import FakeGpu

pytestmark = pytest.mark.usefixtures("gpus")


@pytest.mark.parametrize("few", [4, 8])
def test_a_copy_is_wide_only_while_nothing_else_computes(few: int) -> None:
    assert copy_workers(few, idle=False, sm_count=132) == few
    assert copy_workers(few, idle=True, sm_count=132) == CTAS_WHILE_IDLE


@pytest.mark.parametrize(("sm_count", "ctas"), [(132, 16), (32, 16), (24, 12), (10, 5), (2, 4)])
def test_a_step_that_begins_finds_half_of_the_sms_without_the_copy(
    sm_count: int, ctas: int
) -> None:
    """Except where few are more than half."""
    assert copy_workers(4, idle=True, sm_count=sm_count) == ctas


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CopyWidth]]:
    """Of an engine on the second GPU, and of two engines on the first; all are idle."""
    monkeypatch.setenv("KVMIG_FAKE_SMS", "64")
    with ExitStack() as held:
        widths = [CopyWidth(FakeGpu(ordinal)) for ordinal in (1, 0, 0)]
        for one in widths:
            held.callback(one.close)
            one.engine_idle = lambda: True
        yield widths


def test_copies_of_idle_engines_are_wide(made: list[CopyWidth]) -> None:
    assert [one.choose_workers(4) for one in made] == [CTAS_WHILE_IDLE] * 3


def test_an_engine_that_says_nothing_is_taken_for_busy(made: list[CopyWidth]) -> None:
    width = CopyWidth(FakeGpu(1))
    assert width.choose_workers(4) == made[0].choose_workers(4) == 4
    width.close()
    assert made[0].choose_workers(4) == CTAS_WHILE_IDLE


def test_a_busy_engine_of_this_process_keeps_the_copies_on_its_gpu_narrow(
    made: list[CopyWidth],
) -> None:
    made[2].engine_idle = lambda: False
    assert [one.choose_workers(4) for one in made] == [CTAS_WHILE_IDLE, 4, 4]


def test_under_mps_no_copy_is_wide(made: list[CopyWidth], monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of other processes compute along with it."""
    monkeypatch.setenv("KVMIG_FAKE_MPS", "1")
    width = CopyWidth(FakeGpu(1))
    width.engine_idle = lambda: True
    assert width.choose_workers(4) == 4
    width.close()
