"""A picture of a copy stage, from the times of its chunks."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.kvtransfer.report import ChunkTimes, StageReport
from kvmig_tools.stage_picture import ON_DEVICE, bars, device_bars, picture_of

CHUNK = ChunkTimes(1000, 0.0, 1.0, 3.0, 3.5, answered=8.0, scatter=2.0)


def test_each_part_of_a_chunks_way_begins_where_the_one_before_ends() -> None:
    assert bars(CHUNK) == [
        ("waits at the source", 0.0, 1.0),
        ("gather", 1.0, 3.0),
        ("push", 3.0, 3.5),
        ("waits at the destination", 3.5, 6.0),
        ("scatter", 6.0, 8.0),
    ]


def test_a_chunk_whose_answer_has_not_come_ends_with_its_push() -> None:
    sent = ChunkTimes(1000, 0.0, 1.0, 3.0, 3.5)
    assert [name for name, _, _ in bars(sent)] == ["waits at the source", "gather", "push"]


@given(st.lists(st.floats(0, 1e4), min_size=5, max_size=5), st.floats(0, 1e5))
def test_no_part_ends_before_it_begins(times: list[float], scatter: float) -> None:
    turn, gather, push, sent, answered = sorted(times)
    chunk = ChunkTimes(1, turn, gather, push, sent, answered, scatter, scatter, scatter)
    assert all(begin <= end for _, begin, end in bars(chunk))
    assert all(begin <= end for begin, end in device_bars(chunk))


ON_GPUS = ChunkTimes(
    1000, 0.0, 1.0, 3.0, 3.5, answered=8.0, scatter=2.0, gather_device=0.5, scatter_device=1.5
)


def test_a_gpus_part_of_a_copy_is_at_its_end() -> None:
    assert device_bars(ON_GPUS) == [(2.5, 3.0), (6.5, 8.0)]


def test_where_no_gpu_copied_none_is_shown() -> None:
    assert device_bars(CHUNK) == []
    assert ON_DEVICE not in picture_of(StageReport(3, 3000, 8.0, chunks=[CHUNK]), "on CPUs")
    assert ON_DEVICE in picture_of(StageReport(3, 3000, 8.0, chunks=[ON_GPUS]), "on GPUs")


def test_the_picture_has_a_row_for_each_chunk_and_names_the_stage() -> None:
    stage = StageReport(3, 3000, 8.0, chunks=[CHUNK, CHUNK])
    svg = picture_of(stage, "one <stage>")
    texts = [one.text for one in ElementTree.fromstring(svg).iter() if one.text]
    assert "one <stage>" in texts
    assert {"1", "2"} <= set(texts)
    assert any("its first 2 chunks" in text for text in texts)


def test_a_stage_of_an_older_instance_has_no_picture() -> None:
    with pytest.raises(ValueError, match="no chunk of the stage is known"):
        picture_of(StageReport(3, 3000, 8.0), "a stage")
