"""The figures of vLLM on one H100, computed from the samples in `bench/results/h100/`.

The samples are those of a client of the machine's own, not of a program in bench/, so they have no
summary: `result` makes one. Moves alone: without further streams on the engines, model runner V2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

NAME = "gpu_vllm"
MOVES = ("llama8b-v2.json", "llama8b-v1.json", "llama8b-kill.json")
"""Streams that were moved back and forth, each compared with one that stayed."""
ALONE = "llama8b-v2.json"
KILLED = "llama8b-kill.json"
PLAIN = "plain-against-kvmig.json"
MACHINE = {"gpu": "NVIDIA H100 80GB HBM3", "cores": 16}
VERSIONS = {"kvmig": "0.1.0", "vllm": "0.32.0", "torch": "2.13.0"}
TARGETS = {
    "streams_that_a_move_changed": {"max": 0},
    "longest_gap_over_quiet": {"max": 1.1},
    "longest_gap_over_quiet_p90": {"max": 1.3},
    "throughput_over_plain": {"min": 0.97},
    "ttft_of_plain_over_kvmig": {"min": 0.97},
}


def result(folder: Path) -> dict[str, Any]:
    """The result in the form of those in bench/results. Raises OSError, ValueError, KeyError."""
    moved = {name: _read(folder, name)["rows"] for name in MOVES}
    streams = [row for rows in moved.values() for row in rows]
    alone = [row for row in moved[ALONE] if not row["load"]]
    busy = [row for row in moved[ALONE] if row["load"]]
    waits = [
        seconds
        for event in _read(folder, KILLED)["events"]
        for _, seconds in event.get("kill_wait_s", [])
    ]
    rounds = _read(folder, PLAIN)
    plain, kvmig = rounds["plain"], rounds["kvmig"]
    summary = {
        "moves": sum(len(row["states"]) for row in streams),
        "streams_that_a_move_changed": sum(map(_changed, streams)),
        "longest_gap_over_quiet": max(row["ratio_p50"] for row in alone),
        "longest_gap_over_quiet_p90": max(row["ratio_p90"] for row in alone),
        "longest_gap_over_quiet_with_8_more_streams": max(row["ratio_p50"] for row in busy),
        "killed_gap_s_most": max(waits),
        "throughput_over_plain": _over(kvmig, plain, "tok_s"),
        "ttft_of_plain_over_kvmig": _over(plain, kvmig, "ttft_p50_ms"),
        "kvmig_ttft_ms_of_a_lone_request": kvmig["solo_ttft_ms"],
        "plain_ttft_ms_of_a_lone_request": plain["solo_ttft_ms"],
    }
    return {"summary": summary, "targets": TARGETS, "machine": MACHINE, "versions": VERSIONS}


def _read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def _changed(row: dict[str, Any]) -> bool:
    """Whether a stream that moved differs from the one that stayed, in a token or a logprob."""
    seen = row["moved_vs_stay"]
    same = seen["first_token_diff"] is None and seen["first_logprob_diff"] is None
    return not same or seen["max_lp_diff"] != 0


def _over(one: dict[str, Any], other: dict[str, Any], figure: str) -> float:
    """How much more of a figure `one` has than `other`, in the mean of its rounds."""
    return mean(_of_rounds(one["rounds"], figure)) / mean(_of_rounds(other["rounds"], figure))


def _of_rounds(rounds: Iterable[dict[str, float]], figure: str) -> Sequence[float]:
    return [each[figure] for each in rounds]
