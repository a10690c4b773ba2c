"""The size of a model's weights, by its files, wherever on this host they are."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from huggingface_hub import constants

from kvmig.engines.weight_bytes import INDEX, local_folder, weight_bytes
from kvmig.serve import counted_weights

SIZE = 1000
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write(folder: Path, name: str = "model.safetensors", dtype: str = "BF16") -> None:
    header = json.dumps({"w": {"dtype": dtype, "shape": [1], "data_offsets": [0, SIZE]}})
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(SIZE)
    (folder / name).write_bytes(data)


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the model org/name in the hub's cache of this host; its configuration alone."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--org--name"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    made = model / "snapshots" / COMMIT
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    return made


def args(model: str, revision: str | None = None) -> Namespace:
    return Namespace(model=model, dtype="auto", revision=revision)


def test_a_models_name_on_the_hub_is_its_folder_in_the_cache(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(snapshot)
    assert local_folder("org/name") == local_folder("org/name", COMMIT) == snapshot
    assert counted_weights(args("org/name")) == SIZE
    assert capsys.readouterr().err == ""


def test_wide_numbers_count_as_the_engine_holds_them(snapshot: Path) -> None:
    write(snapshot, dtype="F32")
    assert weight_bytes("org/name") == SIZE // 2
    assert weight_bytes("org/name", "float32") == SIZE


def test_files_that_are_not_there_yet_count_by_the_index(snapshot: Path) -> None:
    write(snapshot, "model-00001-of-00002.safetensors")
    files = [f"model-0000{one}-of-00002.safetensors" for one in (1, 2)]
    index = {
        "metadata": {"total_size": 7 * SIZE},
        "weight_map": dict(zip("ab", files, strict=True)),
    }
    (snapshot / INDEX).write_text(json.dumps(index))
    assert weight_bytes("org/name") == 7 * SIZE
    write(snapshot, files[1])
    assert weight_bytes("org/name") == 2 * SIZE
    (snapshot / INDEX).write_text("{")
    assert weight_bytes("org/name") == 2 * SIZE


@pytest.mark.parametrize(
    ("model", "revision"), [("org/other", None), ("org/name", "other"), ("toy", None)]
)
def test_a_size_that_nothing_here_says_is_said_to_be_unknown_by_the_models_name(
    snapshot: Path, model: str, revision: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    write(snapshot)
    assert counted_weights(args(model, revision)) == 0
    said = capsys.readouterr().err
    assert f"the weights of {model} take is not known: this host's Hugging Face cache" in said


def test_a_configuration_without_weights_or_an_index_says_no_size(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert local_folder("org/name") == snapshot
    assert counted_weights(args("org/name")) == 0
    assert "is not known" in capsys.readouterr().err
