"""A way to read weights that isn't there is refused by name before anything starts."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from kvmig.core.errors import ConfigError
from kvmig.engines.vllm.flags import check_words
from kvmig.engines.vllm.loaders import PACKAGES, check_device, check_loader, weights_word
from kvmig.models import BUNDLED

MISSING = [one for one, package in PACKAGES.items() if find_spec(package.replace("-", "_")) is None]


@pytest.mark.parametrize("load_format", MISSING)
def test_a_package_that_is_not_installed_is_named(load_format: str) -> None:
    package = PACKAGES[load_format]
    said = f"--load-format is {load_format}, must be auto .* while the package {package} is not"
    with pytest.raises(ConfigError, match=said):
        check_loader(load_format)
    for words in (
        [f"--load-format={load_format}"],
        ["--load_format", load_format],
        ["--load-format", load_format.upper()],
    ):
        with pytest.raises(ConfigError, match=said):
            check_words([str(BUNDLED), *words])


@pytest.mark.parametrize("words", [[], ["--load-format=auto"], ["--load-format", "safetensors"]])
def test_what_vllm_brings_along_is_taken(words: list[str]) -> None:
    check_words([str(BUNDLED), *words])


def test_a_package_that_is_installed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "fastsafetensors", "safetensors")
    check_loader("fastsafetensors")


def test_a_loader_that_copies_to_a_gpu_is_refused_on_a_cpu() -> None:
    check_device("fastsafetensors", "cuda")
    check_device("runai_streamer", "cpu")
    with pytest.raises(ConfigError, match=r"is fastsafetensors, must be auto .* on a CPU"):
        check_device("fastsafetensors", "cpu")


def test_weights_are_the_same_however_the_same_files_were_read() -> None:
    assert {weights_word(one) for one in ("auto", "safetensors", "runai_streamer")} == {"auto"}
    assert weights_word("dummy") == "dummy"
