"""The gather benchmark: its figures, and a tiny run of all that it compares."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import gather, report
from bench.gather import Sample
from bench.gather_runs import IN_PLACE, INDEX_SELECT, SHAPES, Cache, Ceiling, Shape, gathers
from kvmig.kernels.api import Device

SAMPLE = Sample("MLA", 18432, "random", False, 1, "cpu", 0, 9.0, 12.0)


def made_up(device: Device) -> list[Sample]:
    """Two shapes, of which the second is slower; index_select at a third of ours, or as fast."""
    name = "cpu" if device == "cpu" else "cuda"
    return [
        replace(SAMPLE, shape=shape, run_bytes=run, ids=ids, checksums=on, name=one, gb_per_s=its)
        for shape, run, rate in (("MLA", 18432, 10.5), ("Llama-3-8B", 65536, 11.4))
        for ids in ("random", "contiguous")
        for on in (False, True)
        for one, its in ((name, rate - on), (INDEX_SELECT, rate / 3), (IN_PLACE, rate))
        if not (on and one != name)
    ]


def test_the_figures_on_a_cpu_are_the_least_of_all_shapes() -> None:
    samples = made_up("cpu")
    summary, targets = gather.summarise("cpu", samples)
    assert summary == {
        "cpu_over_memcpy_1_thread": pytest.approx(10.5 / 12),
        "cpu_checksum_over_memcpy_1_thread": pytest.approx(9.5 / 12),
        "cpu_over_index_select_1_thread": pytest.approx(3),
        "cpu_over_index_select_in_place_1_thread": pytest.approx(1),
        "plain_copy_gb_per_s": 12.0,
    }
    assert report.missed(summary, targets) == []
    slow = [
        replace(one, gb_per_s=one.gb_per_s / 2) if one.name == "cpu" else one for one in samples
    ]
    assert len(report.missed(*gather.summarise("cpu", slow))) == 3


def test_the_figures_on_a_gpu_are_by_length_of_run() -> None:
    summary, targets = gather.summarise("cuda", made_up("cuda"))
    assert summary["cuda_over_copy_65536"] == pytest.approx(11.4 / 12)
    assert summary["cuda_over_copy_18432"] == pytest.approx(10.5 / 12)
    assert targets == {
        "cuda_over_copy_65536": {"min": 0.9},
        "cuda_over_copy_18432": {"min": 0.85},
    }


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    result = replace(report.begin("gather", {}), samples=[asdict(one) for one in made_up("cpu")])
    gather.draw(result, tmp_path / "gather.png")
    assert (tmp_path / "gather.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("checksums", [False, True])
def test_all_ways_gather_the_same_blocks(checksums: bool) -> None:
    cache = Cache("cpu", Shape("small", 3, 4096), 8 * 3 * 4096)
    cache.layers[:] = (cache.layers.new_tensor(range(48)) % 251).view(3, 16, 1)
    ids = cache.ids("random")
    wanted = cache.layers[:, ids].numpy()
    for name, start in gathers(cache, ids, checksums, 1, 0).items():
        cache.buffer.zero_()
        start()
        found = cache.buffer.numpy().reshape(8, 3, 4096)
        assert np.array_equal(found.swapaxes(0, 1), wanted), name


@pytest.mark.parametrize("workers", [1, 3])
def test_the_plain_copy_copies_as_many_bytes(workers: int) -> None:
    cache = Cache("cpu", Shape("small", 1, 1000), 7000)
    ceiling = Ceiling(cache, workers)
    ceiling()
    ceiling.close()
    assert cache.buffer.tolist() == [1] * 7000


def test_a_run_has_a_sample_of_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "SHAPES", (replace(SHAPES[1], layers=2),))
    samples = gather.measure("cpu", [1], 1 << 20, 2)
    assert {(s.ids, s.checksums) for s in samples if s.name == "cpu"} == {
        (ids, on) for ids in ("random", "contiguous") for on in (False, True)
    }
    assert {sample.round for sample in samples} == {0, 1}
    assert len(gather.tables(samples)) == 1


def test_a_gpu_that_is_not_there_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gather.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == "error: --device cuda: torch sees no GPU\n"
