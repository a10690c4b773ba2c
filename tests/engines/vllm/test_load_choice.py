"""The --load-format that is measured to be the fastest: what is measured, kept, and said."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from kvmig.core.errors import ConfigError
from kvmig.engines.registry import kind_of
from kvmig.engines.vllm import load_choice, load_formats
from kvmig.engines.vllm.load_choice import chosen_format, records_folder
from kvmig.engines.vllm.load_formats import LoadRecord, fastest, to_measure, weight_files
from kvmig.engines.vllm.load_measure import LoadTime
from kvmig.launcher.flags import parse
from kvmig.models import BUNDLED


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"auto": 2.0, "runai_streamer": 1.0}, "runai_streamer"),
        ({"auto": 1.0, "runai_streamer": 0.97}, "auto"),
        ({"auto": 1.0, "runai_streamer": 3.0}, "auto"),
        ({"fastsafetensors": 1.0}, "fastsafetensors"),
        ({}, "auto"),
    ],
)
def test_a_format_is_chosen_that_is_faster_by_more_than_chance(
    seconds: dict[str, float], chosen: str
) -> None:
    assert fastest(seconds) == chosen


def test_what_can_not_be_measured_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        load_formats, "find_spec", lambda name: None if name == "runai_model_streamer" else name
    )
    assert to_measure("cpu") == (
        ["auto"],
        {
            "modelexpress": "it takes weights from ModelExpress's servers, not from files;"
            " --load-format modelexpress chooses it",
            "runai_streamer": "the package runai-model-streamer is not installed",
            "fastsafetensors": "it needs a GPU",
        },
    )
    assert to_measure("H100")[0] == ["auto", "fastsafetensors"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with weights; all loaders are installed, and records are the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(load_formats, "find_spec", lambda _: object())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, LoadTime]:
    """What each format takes; those that were measured are removed."""
    found = {"auto": LoadTime(2.0), "runai_streamer": LoadTime(1.0)}
    monkeypatch.setattr(load_choice, "measure_format", lambda folder, name, gpu: found.pop(name))
    return found


def test_it_is_measured_once_until_a_file_or_the_engine_changes(
    model: Path, times: dict[str, LoadTime]
) -> None:
    first = chosen_format(model, "vllm 1", "", "cpu")
    assert (first.chosen, first.seconds) == ("runai_streamer", {"auto": 2.0, "runai_streamer": 1.0})
    assert chosen_format(model, "vllm 1", "", "cpu") == first
    for engine in ("vllm 2", "vllm 1"):
        times.update({"auto": LoadTime(1.0), "runai_streamer": LoadTime(2.0)})
        if engine == "vllm 1":
            os.utime(model / "model.safetensors", (1, 1))
        again = chosen_format(model, engine, "", "cpu")
        assert again.chosen == "auto"
        assert not times


def test_a_format_that_fails_is_named_and_another_is_used(
    model: Path, times: dict[str, LoadTime]
) -> None:
    times["runai_streamer"] = LoadTime(why="no such library (OSError)")
    record = chosen_format(model, "vllm 1", "", "cpu")
    assert record.lines == [
        "--load-format auto: 2.00 s for 0.00 GB",
        "--load-format modelexpress: not measured: it takes weights from ModelExpress's servers,"
        " not from files; --load-format modelexpress chooses it",
        "--load-format fastsafetensors: not measured: it needs a GPU",
        "--load-format runai_streamer: not measured: no such library (OSError)",
        "--load-format auto is used",
    ]


def test_where_nothing_can_be_measured_nothing_is_kept(
    model: Path, times: dict[str, LoadTime]
) -> None:
    times.update({name: LoadTime(why="gone") for name in times})
    record = chosen_format(model, "vllm 1", "", "cpu")
    assert record.chosen == "auto"
    assert not list(records_folder(os.environ).glob("*.json"))


def test_a_record_that_cannot_be_read_is_measured_again(
    model: Path, times: dict[str, LoadTime]
) -> None:
    chosen_format(model, "vllm 1", "", "cpu")
    (file,) = records_folder(os.environ).glob("*.json")
    assert msgspec.json.decode(file.read_bytes(), type=LoadRecord).model == str(model)
    file.write_text("{")
    times.update({"auto": LoadTime(1.0), "runai_streamer": LoadTime(2.0)})
    record = chosen_format(model, "vllm 1", "", "cpu")
    assert record.chosen == "auto"


def test_a_start_that_ends_while_it_measures_is_gone_on_with_by_the_next(
    model: Path, times: dict[str, LoadTime], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = load_choice.measure_format

    def end_at_streamer(folder: Path, name: str, gpu: str) -> LoadTime:
        if name == "runai_streamer":
            raise KeyboardInterrupt
        return measure(folder, name, gpu)

    with monkeypatch.context() as ended:
        ended.setattr(load_choice, "measure_format", end_at_streamer)
        with pytest.raises(KeyboardInterrupt):
            chosen_format(model, "vllm 1", "", "cpu")
    assert list(times) == ["runai_streamer"]
    record = chosen_format(model, "vllm 1", "", "cpu")
    assert record.seconds == {"auto": 2.0, "runai_streamer": 1.0}
    assert not list(records_folder(os.environ).glob("*.begun"))


def test_models_without_safetensors_have_nothing_to_choose(
    model: Path, times: dict[str, LoadTime]
) -> None:
    (model / "model.safetensors").rename(model / "model.bin")
    for folder in (model, model.parent / "none"):
        record = chosen_format(folder, "vllm 1", "", "cpu")
        assert record.chosen == "auto"
        assert record.failures["runai_streamer"] == f"{folder} has no safetensors"


def test_nothing_is_measured_where_there_is_one_format(
    model: Path, times: dict[str, LoadTime], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_formats, "find_spec", lambda _: None)
    record = chosen_format(model, "vllm 1", "", "cpu")
    assert (record.chosen, len(times)) == ("auto", 2)
    assert (
        "--load-format runai_streamer: not measured: the package runai-model-streamer is not"
        in (record.lines[0])
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--load=fast"], "--load is fast, must be"),
        (["--load=auto", "--engine=toy"], "--load is auto, must be left out with --engine toy"),
        (["--load=auto", "--ray=h:1"], "--load is auto, must be left out with --ray"),
    ],
)
def test_load_is_refused_where_nothing_is_chosen(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse([str(BUNDLED), *words])


def test_load_and_a_load_format_are_refused_together() -> None:
    config, _, _ = parse([str(BUNDLED), "--load=auto"])
    with pytest.raises(ConfigError, match="--load is auto, must be left out with --load-format"):
        kind_of("vllm").flags_for([str(BUNDLED), "--load_format", "dummy"], config)


@pytest.mark.engine
@pytest.mark.long
def test_weights_are_read_in_a_process_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    assert weight_files(folder)
    found = load_choice.measure_format(folder, "auto", "")
    assert found.seconds > 0, found.why
    failed = load_choice.measure_format(tmp_path, "auto", "")
    assert failed.why
    if find_spec("runai_model_streamer") is not None:
        assert load_choice.measure_format(folder, "runai_streamer", "").seconds > 0


def test_the_kind_adds_the_flag_of_what_is_chosen(model: Path, times: dict[str, LoadTime]) -> None:
    choice = kind_of("vllm").choose_load(Namespace(model=str(model)), None)
    assert choice.words == ("--load-format=runai_streamer",)
    assert "--load-format runai_streamer: 1.00 s for 0.00 GB" in choice.lines
