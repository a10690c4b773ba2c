"""The parts of the benchmarks that decide: times between tokens, figures, the verdict."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from bench import downtime, overhead, report
from bench.arrivals import (
    Arrival,
    intervals_ms,
    longest_before,
    longest_ms,
    step_ms,
    tokens_by,
    tokens_from,
    wait_for_ms,
)
from bench.client import Stream, StreamFailed, prompt_of, session
from bench.models import make_checkpoint, model_folder
from bench.plots import draw_downtime
from kvmig.models import BUNDLED
from scripts import figures

STREAM = [Arrival(1.00, 0, 1), Arrival(1.01, 1, 1), Arrival(1.05, 2, 2), Arrival(1.06, 4, 1)]


# -- arrivals


def test_tokens_that_come_together_share_the_time() -> None:
    assert intervals_ms(STREAM) == pytest.approx([10, 20, 10])
    assert intervals_ms(STREAM[:1]) == []


@pytest.mark.parametrize(("token", "waited"), [(1, 10), (2, 40), (3, 40), (4, 10)])
def test_the_wait_for_a_token_is_since_the_read_before_its_own(token: int, waited: float) -> None:
    assert wait_for_ms(STREAM, token) == pytest.approx(waited)


@pytest.mark.parametrize("token", [0, 5])
def test_a_token_without_one_before_it_has_no_wait(token: int) -> None:
    with pytest.raises(ValueError, match=f"token {token} never came"):
        wait_for_ms(STREAM, token)


def test_the_longest_time_is_of_those_that_touch_the_window() -> None:
    assert longest_ms(STREAM, 1.0, 1.008) == pytest.approx(10)
    assert longest_ms(STREAM, 1.02, 1.03) == pytest.approx(40)
    assert longest_ms(STREAM, 2.0, 3.0) == 0.0


@pytest.mark.parametrize(("token", "from_it"), [(1, 1), (2, 0), (3, 0), (4, -2)])
def test_the_longest_time_is_told_by_the_token_that_ended_it(token: int, from_it: int) -> None:
    longest = longest_before(STREAM, 1.0, 2.0)
    assert longest == STREAM[2]
    assert tokens_from(longest, token) == from_it
    assert longest_before(STREAM, 2.0, 3.0) is None


def test_tokens_on_their_way_count_by_the_time_gone() -> None:
    assert tokens_by(STREAM, 0.5) == 0
    assert tokens_by(STREAM, 1.03) == pytest.approx(3)
    assert tokens_by(STREAM, 9.0) == 5
    assert tokens_by([], 1.0) == 0


def test_the_step_time_of_steady_streams_is_their_interval() -> None:
    steady = [Arrival(n * 0.02, n, 1) for n in range(100)]
    assert step_ms([steady, steady], 0.507, 0.963) == pytest.approx(20)
    assert step_ms([steady], 5.0, 6.0) == float("inf")


@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=20), st.floats(0, 20), st.floats(0, 20))
def test_tokens_only_grow(intervals: list[float], a: float, b: float) -> None:
    at = 0.0
    stream = [Arrival(at := at + interval, n, 1) for n, interval in enumerate(intervals)]
    assert tokens_by(stream, min(a, b)) <= tokens_by(stream, max(a, b)) <= len(stream)


# -- the client


async def _serve(chunks: list[bytes]) -> tuple[web.AppRunner, str]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"x-request-id": "call-1"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0.01)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"


def _event(*tokens: int) -> bytes:
    choice = {"index": 0, "text": "", "token_ids": list(tokens)}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def _read(chunks: list[bytes], tokens: int) -> Stream:
    runner, url = await _serve(chunks)
    try:
        async with session() as http, Stream(http, url, "m", [1], 9) as stream:
            await stream.reach(tokens)
        return stream
    finally:
        await runner.cleanup()


async def test_a_stream_is_read_by_token_however_it_is_cut() -> None:
    whole = _event(1) + _event(2, 3) + _event(4)
    stream = await _read([whole[:70], whole[70:], b"data: [DONE]\n\n"], 4)
    assert (stream.request_id, stream.tokens) == ("call-1", [1, 2, 3, 4])
    assert sum(one.tokens for one in stream.arrivals) == 4


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ([_event(1)], "1 tokens came, 2 were expected"),
        ([_event(1), b'data: {"error": {"message": "no more"}}\n\n'], "no more"),
    ],
)
async def test_a_stream_that_ends_early_says_so(chunks: list[bytes], why: str) -> None:
    with pytest.raises(StreamFailed, match=why):
        await _read(chunks, 2)


async def test_a_refused_call_says_why() -> None:
    runner, url = await _serve([])
    async with session() as http:
        with pytest.raises(StreamFailed, match="404"):
            await Stream(http, f"{url}/elsewhere", "m", [1], 9).__aenter__()
    await runner.cleanup()


def test_prompts_differ_by_name_and_repeat() -> None:
    assert prompt_of(50, "a", 1) == prompt_of(50, "a", 1) != prompt_of(50, "a", 2)
    assert len(prompt_of(50, "a")) == 50


# -- figures


def sample(mode: str, prompt: int, background: int, gap: float) -> downtime.Sample:
    migration = None
    if mode != "recompute":
        pause = {"drain": 5.0, "tail_copy": 1.0, "commit": 2.0, "first_token": None}
        migration = {"downtime_ms": pause, "tail_blocks": 1, "stages": [], "total_ms": 50.0}
    return downtime.Sample(mode, prompt, background, 0, 10.0, gap, gap + 1, gap, [10.0], migration)


SAMPLES = [
    sample(mode, prompt, background, gap + more)
    for background in (0, 4)
    for more in (-1.0, 0.0, 1.0)
    for mode, prompt, gap in (
        ("live", 128, 12.0), ("live", 3500, 13.0), ("unspread", 128, 14.0),
        ("unspread", 3500, 15.0), ("blocking", 128, 17.0),
        ("blocking", 3500, 60.0), ("recompute", 128, 200.0), ("recompute", 3500, 2600.0),
    )
]  # fmt: skip


def test_the_figures_of_downtime_are_ratios_of_medians() -> None:
    summary, targets = downtime.summarise(SAMPLES)
    assert summary["live_over_inter_token_background_4"] == pytest.approx(1.25)
    assert summary["live_3500_over_128_background_0"] == pytest.approx(13 / 12)
    assert summary["live_worst_gap_over_quiet_background_4"] == pytest.approx(
        (13 / 12 + 14 / 13) / 2
    )
    assert summary["recompute_over_live_3500_background_0"] == pytest.approx(200)
    assert report.missed(summary, targets) == []
    assert len(downtime.tables(SAMPLES)) == 2


def test_the_figures_of_overhead_are_medians_of_ratios() -> None:
    windows = [overhead.Window("others", 100, moving, 10.0, {}) for moving in (10.0, 10.2, 30.0)]
    ttft = {"kvmig": 50.0, "plain": 49.0, "plain_uni": 51.0}
    rounds = [
        overhead.Round("alone", {"kvmig": ours, "plain": 100.0, "plain_uni": 99.0}, ttft)
        for ours in (90.0, 99.0, 101.0)
    ]
    summary, targets = overhead.summarise(windows, rounds)
    assert summary["step_time_during_migration_ratio"] == pytest.approx(1.02)
    assert summary["throughput_over_plain"] == pytest.approx(0.99)
    assert summary["throughput_over_plain_uni"] == pytest.approx(1.0)
    assert summary["ttft_of_plain_over_kvmig"] == pytest.approx(0.98)
    assert report.missed(summary, targets) == []
    assert len(overhead.tables(windows, rounds)) == 1


def test_a_missed_target_is_a_line_with_both_numbers() -> None:
    targets = {"a": {"max": 2.0}, "b": {"min": 20.0}, "c": {"max": 1.0}, "gone": {"min": 0.0}}
    lines = report.missed({"a": 2.5, "b": 19.0, "c": 1.0}, targets)
    assert lines == [
        "a is 2.5, should be at most 2",
        "b is 19, should be at least 20",
        "gone is nan, should be at least 0",
    ]


# -- the report


def _finish(value: float, *flags: str) -> int:
    result = report.begin("made-up", {})
    result.summary, result.targets = {"ratio": value}, {"ratio": {"max": 2.0}}
    result.samples = [{"gap_ms": 1.5}, {"gap_ms": 2.5}]
    return report.finish(result, report.parser(None).parse_args(flags))


def test_check_fails_with_a_line_for_each_target_missed(capsys: pytest.CaptureFixture[str]) -> None:
    assert _finish(2.5, "--check") == 1
    assert capsys.readouterr().err == "missed: ratio is 2.5, should be at most 2\n"
    assert _finish(1.5, "--check") == 0


def _finish_with_long_run(*flags: str) -> int:
    result = report.begin("made-up", {})
    result.summary = {"p99_ratio": 2.5, "wrong": 0.0}
    result.targets = {"p99_ratio": {"max": 2.0}, "wrong": {"max": 0}}
    return report.finish(result, report.parser(None, ("p99_*",)).parse_args(flags))


def test_a_quick_check_leaves_out_by_name_the_targets_that_need_the_whole_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "made-up.json"
    assert _finish_with_long_run("--quick", "--check", f"--out={file}") == 0
    said = capsys.readouterr()
    assert said.err == "left out: p99_ratio, whose target needs the whole run\n"
    assert "left out" in said.out
    assert json.loads(file.read_text())["targets"] == {"wrong": {"max": 0}}


def test_a_whole_check_leaves_out_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert _finish_with_long_run("--check") == 1
    assert capsys.readouterr().err == "missed: p99_ratio is 2.5, should be at most 2\n"


def test_the_help_of_quick_names_what_it_leaves_out() -> None:
    assert "leaves out p99_*" in " ".join(report.parser(None, ("p99_*",)).format_help().split())


def test_without_check_a_missed_target_is_only_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert _finish(2.5) == 0
    assert "missed" in capsys.readouterr().out


def test_the_file_is_what_the_readmes_table_is_made_from(tmp_path: Path) -> None:
    out = tmp_path / "new" / "made-up.json"
    _finish(1.5, "--out", str(out))
    document = json.loads(out.read_text())
    assert document["samples"] == [{"gap_ms": 1.5}, {"gap_ms": 2.5}]
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["memory_gib"] > 0
    assert {"kvmig", "torch", "python"} <= document["versions"].keys()
    assert "| ratio | 1.5 | at most 2 |" in figures.table({"made-up": document})


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    result = replace(report.begin("downtime", {}), samples=[vars(one) for one in SAMPLES])
    draw_downtime(result, tmp_path / "downtime.png")
    assert (tmp_path / "downtime.png").read_bytes().startswith(b"\x89PNG")


# -- models


def test_a_checkpoint_is_made_once_and_the_same_each_time(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96}
    for name in ("a", "b"):
        make_checkpoint(tmp_path / name, shape)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert a.keys() == b.keys()
    assert all(bool((a[key] == b[key]).all()) for key in a)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["hidden_size"], config["vocab_size"]) == (64, 264)


def test_a_model_is_a_name_or_a_folder(tmp_path: Path) -> None:
    assert model_folder("count") == BUNDLED
    assert model_folder(str(tmp_path)) == tmp_path


async def test_a_session_takes_any_number_of_streams() -> None:
    async with session() as http:
        assert isinstance(http.connector, aiohttp.TCPConnector)
        assert http.connector.limit == 0
