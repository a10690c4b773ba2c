"""The identity of weights: what it is made of, and what it isn't."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvmig.core.errors import StartupError
from kvmig.engines import identity
from kvmig.engines.identity import check_unchanged, identity_of, tensors_of, updated
from kvmig.models import BUNDLED
from tests.support import count_down

FILE = "model.safetensors"


def checkpoint(folder: Path, **tensors: torch.Tensor) -> str:
    """A folder with these tensors and an empty config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / FILE)
    return str(folder)


def test_a_copy_has_the_same_identity_whatever_its_folder_and_times(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(BUNDLED, copy)
    os.utime(copy / FILE, (1, 1))

    assert identity_of(str(copy)) == identity_of(str(BUNDLED))


def test_another_checkpoint_of_the_same_configuration_has_another_identity(tmp_path: Path) -> None:
    other = count_down.make(tmp_path / "other")

    assert (other / "config.json").read_bytes() == (BUNDLED / "config.json").read_bytes()
    assert identity_of(str(other)) != identity_of(str(BUNDLED))


def test_it_does_not_matter_how_tensors_are_shared_among_files(tmp_path: Path) -> None:
    tensors = load_file(BUNDLED / FILE)
    whole = checkpoint(tmp_path / "whole", **tensors)
    parts = Path(checkpoint(tmp_path / "parts", **dict(list(tensors.items())[:10])))
    save_file(dict(list(tensors.items())[10:]), parts / "model-2.safetensors")

    assert identity_of(str(parts)) == identity_of(whole)


@pytest.mark.parametrize("at", [0, 500_000, -1])
def test_a_tensor_that_differs_makes_another_identity(tmp_path: Path, at: int) -> None:
    tensor = torch.zeros(1_000_000)
    changed = tensor.clone()
    changed[at] = 1

    one = identity_of(checkpoint(tmp_path / "one", a=tensor))
    assert identity_of(checkpoint(tmp_path / "other", a=changed)) != one


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.zeros(4, 6)},
        {"a": torch.zeros(6, 4)},
        {"a": torch.zeros(4, 6, dtype=torch.int32)},
    ],
)
def test_names_shapes_and_dtypes_count(tmp_path: Path, other: dict[str, torch.Tensor]) -> None:
    one = identity_of(checkpoint(tmp_path / "one", a=torch.zeros(4, 6)))

    assert identity_of(checkpoint(tmp_path / "other", **other)) != one


def test_how_the_tensors_are_computed_with_counts(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "one", a=torch.zeros(4))
    identities = [identity_of(folder), identity_of(folder, ("fp8",))]
    (Path(folder) / "config.json").write_text(json.dumps({"rope_theta": 1}))
    identities.append(identity_of(folder))

    assert len(set(identities)) == 3


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "model.safetensors"])
def test_files_without_a_header_that_can_be_read_count_as_they_are(
    tmp_path: Path, name: str
) -> None:
    identities = []
    for content in (b"1" * 100, b"2" * 100, b"", b"\xff" * 9):
        (tmp_path / name).write_bytes(content)
        identities.append(identity_of(str(tmp_path)))

    assert len(set(identities)) == 4


def test_a_model_that_is_not_on_disk_has_its_names_identity() -> None:
    assert identity_of("some/model") == identity_of("some/model")
    assert identity_of("some/model") != identity_of("some/other")
    assert identity_of("some/model", ("main",)) != identity_of("some/model", ("v2",))


def test_of_a_large_model_only_some_bytes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "MOST_BYTES", 4000)
    folder = Path(checkpoint(tmp_path, **{f"t{n}": torch.zeros(10_000) for n in range(10)}))

    read = [sum(length for _, length in one.pieces(400)) for one in tensors_of(folder)]
    places = [first for first, _ in tensors_of(folder)[0].pieces(400)]

    assert read == [400] * 10
    assert places[-1] - places[0] == 40_000 - 100


def test_equal_updates_in_their_order_make_equal_identities() -> None:
    once = updated("a", "update_weights", {"names": ["x"]})

    assert once == updated("a", "update_weights", {"names": ["x"]})
    assert len({"a", once, updated("a", "other"), updated("b", "update_weights", {})}) == 4
    assert updated(once, "sleep") != updated(updated("a", "sleep"), "update_weights")


def test_weights_that_were_replaced_while_they_were_loaded_are_refused() -> None:
    check_unchanged("M", "a", "a")
    with pytest.raises(StartupError, match="the weights in M were replaced while they were loaded"):
        check_unchanged("M", "a", "b")
