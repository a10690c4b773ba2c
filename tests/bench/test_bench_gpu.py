"""bench/gpu without a GPU: its parts at small sizes on the host, and the run as a whole."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu import __main__ as run_all
from bench.gpu import (
    ceilings,
    correctness,
    costs,
    downtime,
    gather,
    interference,
    kill,
    links,
    sanitizer,
    serving,
    sharing,
    transports,
    units,
)
from bench.gpu import migration as migration_part
from bench.gpu.device import SKIPPED, TMA, Copy, Site, Way, between_gpus
from bench.gpu.engine_pair import Remote
from bench.gpu.engine_process import Came
from bench.gpu.moves import Story, judged, slowed, told
from bench.gpu.shapes import SHAPES, Shape, ids
from bench.report import begin
from kvmig.core.errors import KvmigError, TransportError
from kvmig.core.layout import BlockRegion
from kvmig.engines.copy_width import CTAS_WHILE_IDLE
from kvmig.engines.device_copies import CTAS_OF_TMA, CTAS_WITHOUT_TMA
from kvmig.engines.kind import ALLOW_UNTESTED
from kvmig.engines.transformers import versions
from kvmig.engines.vllm import kind as vllm_kind
from kvmig.kernels import build, select
from kvmig.kernels.api import BlockCopy, FinishedWork, PendingWork
from kvmig.kernels.select import kernels
from tests.support.fake_gpu import FakeGpu, FakeKernels

ROOT = Path(__file__).parents[2]
CPU = ["--device", "cpu", "--quick"]


def document(file: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(file.read_text())
    assert {"name", "machine", "versions", "date", "summary", "targets", "samples"} <= {*loaded}
    assert all(isinstance(value, (int, float)) for value in loaded["summary"].values())
    return loaded


def result_of(part: Any, tmp_path: Path, *more: str) -> dict[str, Any]:
    file = tmp_path / "result.json"
    assert part.main([*CPU, "--out", str(file), *more]) == 0
    return document(file)


# -- the parts


def test_the_ceilings_are_measured(tmp_path: Path) -> None:
    summary = result_of(ceilings, tmp_path)["summary"]
    assert {"cpu_load_s", "device_copy_gb_s", "bf16_matmul_tflops"} == {*summary}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pages_that_come_and_go_are_measured(
    device: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if device == "cuda":
        request.getfixturevalue("gpus")
    summary = result_of(units, tmp_path, "--device", device)["summary"]
    assert summary["wrong"] == 0
    assert summary["take_us_a_page_p50"] > 0
    assert ("cover_s" in summary) == (device == "cuda")
    assert ("decode_ms_100" in summary) == (device == "cpu"), "torch has no CUDA here"


def test_the_checks_pass(tmp_path: Path) -> None:
    summary = result_of(correctness, tmp_path)["summary"]
    assert summary["wrong"] == 0
    assert summary["checks"] >= 15


def forgetful(copy: Copy) -> Way:
    """Copies all blocks but the last."""

    def copy_fewer(blocks: BlockCopy, *, checksums: bool, stream: int, workers: int) -> PendingWork:
        src, dst, src_ids, dst_ids = blocks
        fewer = BlockCopy(src, dst, src_ids[:-1].copy(), dst_ids[:-1].copy())
        return copy(fewer, checksums=checksums, stream=stream, workers=workers)

    return Way("forgetful", copy_fewer)


def test_a_copy_that_leaves_something_out_is_found_by_the_checks() -> None:
    way = forgetful(kernels("cpu").copy)
    assert correctness.check_copy(Site("cpu"), way, (48, 16), 0, 1) == "bytes and checksums"


def test_a_copy_that_leaves_something_out_has_no_figure() -> None:
    site = Site("cpu")
    memory = gather.Memory(site, 1 << 16, 1 << 15)
    case = gather.Case(Shape("small", 64, 2), "random", forgetful(kernels("cpu").copy), 1, True)
    sample = gather.measure(site, memory, case)
    assert sample["wrong"] == "the buffer holds other bytes"
    assert "gb_s" not in sample


def test_a_copy_that_fails_is_noted_and_the_sweep_goes_on() -> None:
    def broken(*_: object, **__: object) -> PendingWork:
        raise KvmigError("out of luck")

    site = Site("cpu")
    memory = gather.Memory(site, 1 << 16, 1 << 15)
    case = gather.Case(Shape("small", 64, 2), "random", Way("broken", broken), 1, True)
    assert gather.measure(site, memory, case)["wrong"] == "KvmigError: out of luck"


def test_the_sweep_asks_for_no_more_ctas_than_the_device_has() -> None:
    def copy(*_: object, **__: object) -> PendingWork:
        return FinishedWork([])

    ways = [Way("a", copy), Way("b", copy, capped=False, summing=False)]
    found = list(gather.cases(ways, most=8))
    assert {case.workers for case in found if case.way.name == "a"} == {0, 1, 2, 4, 8}
    assert {(case.workers, case.checksums) for case in found if case.way.name == "b"} == {
        (0, False)
    }
    assert {case.workers for case in found if case.order == "contiguous"} == {0}
    assert len(found) == len(SHAPES) * ((5 * 2 + 1) + (2 + 1))
    assert max(case.workers for case in gather.cases([Way(TMA, copy)], most=8)) == 16


def test_a_variant_is_measured_with_few_ctas_and_with_one_and_two_on_each_sm() -> None:
    ways = [Way("rolling", lambda *_, **__: FinishedWork([]))]
    found = list(gather.variant_cases(ways, most=8))
    assert {case.workers for case in found} == {4, 8, 16}
    assert {case.order for case in found} == {"random"}
    assert len(found) == len(SHAPES) * 3 * 2
    assert {case.workers for case in gather.variant_cases(ways, most=132)} == {4, 16, 132, 264}


def test_a_variant_is_compared_with_the_kernel_that_it_would_take_the_place_of() -> None:
    result = begin("gpu gather", {})
    found = (
        ("cuda", 4, 50.0), ("cuda", 132, 900.0), ("cuda-tma", 4, 80.0), ("cuda-tma", 132, 1000.0),
        ("rolling", 4, 75.0), ("rolling", 264, 990.0), ("tma-32k", 4, 160.0), ("tma-32k", 16, 9.0),
    )  # fmt: skip
    for way, workers, gb_s in found:
        result.samples.append(
            {"run": 65536, "ids": "random", "way": way, "workers": workers, "checksums": True,
             "gb_s": gb_s}
        )  # fmt: skip
    assert gather.variant_ratios(result) == {
        "rolling_64kb_at_4": 1.5, "rolling_64kb_best": 1.1, "tma-32k_64kb_at_4": 2.0,
        "tma-32k_64kb_best": 0.16,
    }  # fmt: skip
    gather.summarise(result, ceiling=1000.0, product=("cuda-tma", 4), most=132)
    assert result.summary["gather_64kb_checked_share"] == 1.0, "of what kvmig has"
    assert result.summary["rolling_64kb_at_4"] == 1.5


def test_there_are_no_variants_where_they_can_not_run_and_the_reason_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Site("cpu").variants() == []
    site = Site("cuda", stream=object())

    def load(name: str, device: str) -> object:
        raise KvmigError("out of luck")

    monkeypatch.setattr(select, "load", load)
    assert site.variants() == []
    assert site.reasons == {"variants": "out of luck"}


def test_the_gather_sweep_runs_and_names_its_targets(tmp_path: Path) -> None:
    loaded = result_of(gather, tmp_path)
    assert {"gather_64kb_checked_share", "gather_18kb_plain_share"} <= {*loaded["targets"]}
    assert loaded["summary"]["wrong"] == 0
    assert {sample["way"] for sample in loaded["samples"]} == {"index_select", "cpu"}


def test_a_part_whose_time_is_over_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correctness, "MOST_S", 0.0)
    loaded = result_of(correctness, tmp_path)
    assert loaded["samples"] == [{"stopped": "after 0 s"}]


def test_a_sweep_without_figures_misses_its_targets() -> None:
    result = begin("gpu gather", {})
    gather.summarise(result, ceiling=1000.0, product=("cuda", 32), most=132)
    assert result.summary["gather_64kb_checked_share"] == 0


def test_the_product_takes_the_tma_where_it_is() -> None:
    ways = [Way(name, lambda *_, **__: FinishedWork([])) for name in ("cuda", "engine", TMA)]
    assert gather.taken(ways, 132) == (TMA, CTAS_OF_TMA)
    assert gather.taken(ways[:2], 132) == ("cuda", CTAS_WITHOUT_TMA)
    assert gather.taken(ways[:1], 2) == ("cuda", 2)


def test_pauses_are_measured_with_the_copy_that_the_product_makes(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, ids = FakeGpu(), np.arange(1)
    address, workers = gpu.allocate(128), list[int]()
    here, there = ([BlockRegion(address + at, 64, 64)] for at in (0, 64))
    for compiled_for in ("90", "80"):
        monkeypatch.setenv("KVMIG_FAKE_PTX", compiled_for)
        kernels = FakeKernels(gpu)
        between_gpus(kernels)(BlockCopy(here, there, ids, ids), checksums=True).wait()
        workers += kernels.launches.workers
        kernels.close()
    assert workers == [CTAS_OF_TMA, CTAS_WITHOUT_TMA]
    gpu.free(address)


def test_the_products_figure_is_of_its_settings_and_the_share_of_the_best() -> None:
    result = begin("gpu gather", {})
    found = ("cuda", 8, 500.0), ("cuda", 16, 250.0), ("cuda", 132, 900.0), ("cuda-tma", 32, 950.0)
    for way, workers, gb_s in found:
        result.samples.append(
            {"run": 65536, "ids": "random", "way": way, "workers": workers, "checksums": True,
             "gb_s": gb_s}
        )  # fmt: skip
    gather.summarise(result, ceiling=1000.0, product=("cuda", 8), most=132)

    assert result.summary["gather_64kb_checked_gb_s"] == 500
    assert result.summary["gather_64kb_checked_idle_gb_s"] == 250
    assert result.summary["gather_64kb_checked_share"] == 0.95


def test_the_links_are_measured(tmp_path: Path) -> None:
    summary = result_of(links, tmp_path)["summary"]
    assert min(summary.values()) > 0


@pytest.mark.long
def test_the_transports_are_measured_between_two_processes(tmp_path: Path) -> None:
    loaded = result_of(transports, tmp_path)
    assert [sample["transport"] for sample in loaded["samples"]] == ["shm", "tcp"]
    assert loaded["summary"]["wrong"] == 0
    assert min(loaded["summary"]["shm_gb_s"], loaded["summary"]["tcp_gb_s"]) > 0


def test_a_transport_that_is_not_there_is_said(tmp_path: Path) -> None:
    sample = transports.sample_of("cuda-ipc", "cpu", Shape("small", 64, 2), [[0]], 1)
    assert "needs a KV cache in an NVIDIA GPU's memory" in sample["missing"]


def test_the_pause_is_measured_between_two_processes(tmp_path: Path) -> None:
    loaded = result_of(downtime, tmp_path)
    assert [sample["tokens"] for sample in loaded["samples"]] == [256, 1024]
    assert loaded["summary"]["live_ms_median"] > 0


def move_from_a_source_that_dies() -> None:
    with downtime.pair(Site("cpu"), Shape("small", 64, 2), 8, 4096) as destination:
        destination._link.send("nothing that it understands")
        destination.move(ids("random", 8, 8), np.arange(8))


def test_a_source_that_dies_ends_the_measurement(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((TransportError, EOFError, OSError)):
        move_from_a_source_that_dies()
    assert "ValueError" in capfd.readouterr().err


def test_steps_are_measured_beside_copies(tmp_path: Path) -> None:
    loaded = result_of(interference, tmp_path)
    assert [sample["workers"] for sample in loaded["samples"]] == [2, 1]
    assert loaded["summary"]["slowdown"] > 0
    assert [*loaded["targets"]] == ["slowdown"]


def test_a_step_in_an_idle_engines_copy_has_its_own_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Site, "multiprocessors", 64)
    loaded = result_of(interference, tmp_path)
    assert loaded["summary"]["slowdown_in_idle_copy"] > 0
    assert CTAS_WHILE_IDLE in {sample["workers"] for sample in loaded["samples"]}


def test_a_background_that_fails_says_so() -> None:
    def broken() -> None:
        raise KvmigError("out of luck")

    background = interference.Background(broken, 1)
    with pytest.raises(KvmigError, match="out of luck"), background:
        background._thread.join(10)


# -- requests that move


@pytest.mark.long
@pytest.mark.engine
def test_requests_that_move_between_two_processes_get_the_tokens_of_those_that_stay(
    tmp_path: Path,
) -> None:
    loaded = result_of(migration_part, tmp_path)
    assert [sample["tokens"] for sample in loaded["samples"] if "step_ms" in sample] == [64, 256]
    assert loaded["summary"]["wrong"] == loaded["summary"]["controls_differ"] == 0
    assert not [sample for sample in loaded["samples"] if "failed" in sample]
    assert {"live_ms", "blocking_ms", "recompute_ms"} <= {*loaded["samples"][0]}
    assert [sample for sample in loaded["samples"] if sample.get("at") == "source"]


@pytest.mark.parametrize("installed", ["msgspec", "transformers"])
def test_without_a_package_the_part_is_skipped_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    if installed == "msgspec":
        monkeypatch.setattr(versions, "version", lambda name: "5.17.0")
        reason = "transformers 5.17.0 is not supported; kvmig needs transformers 5.19.x"
    else:
        monkeypatch.setattr(migration_part, "find_spec", lambda name: None)
        reason = "msgspec is not installed"
    file = tmp_path / "result.json"
    assert migration_part.main([*CPU, "--out", str(file)]) == SKIPPED
    assert document(file)["samples"] == [{"skipped": reason}]
    assert document(file)["summary"] == {}


@pytest.mark.parametrize("found", ["none", "another"])
def test_without_a_vllm_that_is_supported_no_server_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(vllm_kind, "installed_version", lambda: ("vllm", "0.9.0"))
    monkeypatch.delenv(ALLOW_UNTESTED, raising=False)
    reason = "vllm 0.9.0 is not supported; kvmig needs 0.32.x, 0.33.x"
    if found == "none":
        monkeypatch.setattr(serving, "find_spec", lambda name: None)
        reason = "vLLM is not installed"
    file = tmp_path / "result.json"
    for part in (serving, kill, sharing, costs):
        assert part.main([*CPU, "--out", str(file)]) == SKIPPED
        (sample,) = document(file)["samples"]
        assert sample["skipped"].startswith(reason)


def test_without_mps_a_unit_is_not_measured_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sharing.MPS, "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "result.json"
    assert sharing.main([*CPU, "--out", str(file)]) == SKIPPED
    (sample,) = document(file)["samples"]
    assert sample == {"skipped": "nvidia-cuda-mps-control is not installed"}


def test_a_daemon_of_mps_is_ended_with_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, log = tmp_path / sharing.MPS_CONTROL, tmp_path / "log"
    daemon.write_text(f'#!/bin/sh\necho "$1 $CUDA_MPS_PIPE_DIRECTORY" >> {log}\n')
    daemon.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with sharing.mps(True) as own:
        pipes = own["CUDA_MPS_PIPE_DIRECTORY"]
        assert log.read_text() == f"-d {pipes}\n"
    assert log.read_text() == f"-d {pipes}\n {pipes}\n"
    with sharing.mps(False) as own:
        assert own == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert migration_part.main(["--device", "cuda", "--out", str(file)]) == 1
    assert document(file)["samples"] == [{"wrong": "torch sees no GPU"}]
    assert document(file)["summary"] == {}


def test_a_story_is_told_in_the_order_of_time_with_its_switches() -> None:
    a = Came([1, 2, 5], [-0.1, -0.2, -0.5], [0.0, 0.010, 0.060])
    b = Came([3, 4], [-0.3, -0.4], [0.030, 0.040])
    story = told({"a": a, "b": b})
    assert story.tokens == [1, 2, 3, 4, 5]
    assert story.logprobs == [-0.1, -0.2, -0.3, -0.4, -0.5]
    assert story.usual_ms == pytest.approx(10)
    assert story.switches_ms == pytest.approx([20, 20])
    assert story.common(told({"a": a})) == 2
    assert story.common(told({"a": Came([1, 2, 3], [-0.1, -0.2, -0.4], [0.0, 0.1, 0.2])})) == 2


def story(*tokens: int) -> Story:
    return Story([*tokens], [-0.1] * len(tokens), 1.0, [])


def test_a_moved_stream_is_wrong_only_where_those_that_stay_are_the_same() -> None:
    stays, same, drifts = story(1, 2, 3, 4), story(1, 2, 3, 4), story(1, 2, 7, 4)
    early, late, short = story(1, 9, 3, 4), story(1, 2, 3, 9), story(1, 2)
    assert judged([early, late, short, same], stays, [same, same]) == {
        "wrong": 2, "differ": 2, "controls_differ": 0, "certain": 4,
    }  # fmt: skip
    assert judged([early, late, short, same], stays, [same, drifts]) == {
        "wrong": 1, "differ": 2, "controls_differ": 1, "certain": 2,
    }  # fmt: skip


def test_gaps_in_a_window_are_compared_with_those_just_before() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 5.0, 6.0]
    assert list(slowed(times, 3.0, 5.0)) == [2.0]
    assert list(slowed(times, 3.0, 5.6)) == [2.0, 1.0]
    assert list(slowed(times, 0.0, 3.0)) == []


def test_an_engine_that_is_gone_or_silent_is_an_error() -> None:
    here, there = multiprocessing.Pipe()
    remote = Remote("a", multiprocessing.Process(), here)
    with pytest.raises(TransportError, match="engine a is silent for 0 s"):
        remote.call("wait", timeout_s=0)
    there.close()
    with pytest.raises(TransportError, match="engine a has ended"):
        remote.answer(1)
    here.close()


# -- the sanitizer


@pytest.mark.parametrize(
    ("printed", "count"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 3 errors\n", 3),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n", 2),
        ("Device not supported\n", None),
    ],
)
def test_the_sanitizers_summary_is_understood(printed: str, count: int | None) -> None:
    assert sanitizer.errors(printed) == count


RACES = """========= Error: Race reported between Read access at kvmig_copy_tma_kernel+0x4d0
=========     and Write access at kvmig_copy_tma_kernel+0x6720 [72 hazards]
=========
========= Error: Race reported between Write access at {other}+0x10
=========     and Write access at kvmig_copy_tma_kernel+0x6720 [1 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


@pytest.mark.parametrize(
    ("run", "left", "apart"), [(1, 1, 1), (2, 2, 0)], ids=["as it is", "as racecheck sees it"]
)
def test_only_what_racecheck_does_not_see_is_suppressed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: int, left: int, apart: int
) -> None:
    printed = RACES.format(other="kvmig_copy_sum_kernel")
    monkeypatch.setattr(build, "cached_library", lambda recipe: tmp_path)
    command = [sys.executable, "-c", f"print({printed!r})"]
    sample = sanitizer.sample_of(sanitizer.RUNS[run], command)
    assert (sample["errors"], sample["suppressed"]) == (left, apart)
    assert "kvmig_copy_sum_kernel+0x10" in sample["tail"]


def test_a_sanitizer_that_hangs_is_given_up() -> None:
    count, tail = sanitizer.check([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert count is None
    assert "timed out" in tail


def test_without_the_sanitizer_the_part_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitizer, "found", lambda: None)
    (sample,) = result_of(sanitizer, tmp_path)["samples"]
    assert sample == {"reason": "compute-sanitizer is not installed"}


# -- the run


def test_the_script_is_correct_bash() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "bench" / "gpu.sh")], check=True, timeout=10)
    assert os.access(ROOT / "bench" / "gpu.sh", os.X_OK)


def test_the_script_uses_the_packages_of_a_kit(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH"\n')
    python.chmod(0o755)
    kit = {**os.environ, "PYTHON": str(python), "PYTHONPATH": "/kit/site:/kit/kvmig"}
    script = str(ROOT / "bench" / "gpu.sh")
    done = subprocess.run([script], env=kit, capture_output=True, text=True, timeout=10, check=True)
    assert done.stdout == ".:/kit/site:/kit/kvmig\n"


def test_all_parts_that_want_no_vllm_take_less_than_eleven_minutes_together() -> None:
    servers = {"serving", "kill", "sharing", "plain", "fleet", "pause", "costs"}
    wanting = [one for one in run_all.PARTS if servers & {one.module, one.name}]
    assert run_all.PARTS[-len(wanting) :] == tuple(wanting)
    assert sum(one.seconds for one in run_all.PARTS if one not in wanting) < 660


@pytest.mark.parametrize("name", run_all.SETS)
def test_a_set_of_parts_takes_nine_minutes_at_most(name: str) -> None:
    parts = {one.name: one for one in run_all.PARTS}
    assert sum(parts[one].seconds for one in run_all.SETS[name]) <= run_all.SET_S


def test_each_part_is_in_one_set() -> None:
    every = [one for names in run_all.SETS.values() for one in names]
    assert sorted(every) == sorted(one.name for one in run_all.PARTS)


def test_every_part_is_a_program() -> None:
    for part in run_all.PARTS:
        assert (ROOT / "bench" / "gpu" / f"{part.module or part.name}.py").exists()


PROGRAMS = {
    "good": "print('fine')",
    "bad": "import sys; print('out of luck'); sys.exit(2)",
    "poor": "import sys; print('nothing is installed'); sys.exit(3)",
    "endless": "import subprocess, sys; print('x', flush=True);"
    "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])",
}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> tuple[run_all.Part, ...]:
    def command(part: run_all.Part, out: Path, arguments: list[str]) -> list[str]:
        return [sys.executable, "-c", PROGRAMS[part.name]]

    monkeypatch.setattr(run_all, "command", command)
    return run_all.Part("bad", 60), run_all.Part("endless", 1), run_all.Part("good", 60)


def test_a_part_that_fails_or_hangs_is_noted_and_the_next_goes_on(
    tmp_path: Path, programs: tuple[run_all.Part, ...]
) -> None:
    assert run_all.main(["--out", str(tmp_path), "--device", "cpu"], programs) == 1
    loaded = document(tmp_path / run_all.FILE)
    assert [sample["status"] for sample in loaded["samples"]] == [
        "failed (2)",
        "killed after 1 s",
        "passed",
    ]
    assert loaded["samples"][0]["tail"] == "out of luck"
    assert loaded["summary"]["parts_passed"] == 1


def test_a_part_that_is_skipped_has_not_failed(
    tmp_path: Path, programs: tuple[run_all.Part, ...]
) -> None:
    poor = (run_all.Part("poor", 60),)
    assert run_all.main(["--out", str(tmp_path), "--device", "cpu"], poor) == 0
    loaded = document(tmp_path / run_all.FILE)
    (sample,) = loaded["samples"]
    assert (sample["status"], sample["tail"]) == ("skipped", "nothing is installed")
    assert loaded["summary"]["parts_passed"] == 0


def test_one_part_alone_can_be_run(tmp_path: Path, programs: tuple[run_all.Part, ...]) -> None:
    assert run_all.main(["--out", str(tmp_path), "--only", "good"], programs) == 0
    (sample,) = document(tmp_path / run_all.FILE)["samples"]
    assert (sample["part"], sample["status"]) == ("good", "passed")


@pytest.mark.long
def test_the_script_runs_a_part_from_anywhere(tmp_path: Path) -> None:
    if not shutil.which("bash"):
        pytest.skip("bash is not installed")
    script = str(ROOT / "bench" / "gpu.sh")
    env = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        [script, *CPU, "--only", "ceilings"], cwd=tmp_path, env=env, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert document(tmp_path / "out" / "gpu_ceilings.json")["name"] == "gpu ceilings"
