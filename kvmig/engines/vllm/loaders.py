"""Values of vLLM's --load-format that need a package of their own, or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from kvmig.core.errors import ConfigError

FLAG = "--load-format"
PACKAGES = {
    "fastsafetensors": "fastsafetensors",
    "instanttensor": "instanttensor",
    "modelexpress": "modelexpress",
    "runai_streamer": "runai-model-streamer",
    "runai_streamer_sharded": "runai-model-streamer",
    "tensorizer": "tensorizer",
}
"""Packages that vLLM doesn't bring along. Each one's module has its name."""
FOR_GPUS = frozenset(("fastsafetensors", "instanttensor"))
"""Values whose loaders copy to a GPU themselves."""
READ_AS_THEY_ARE = ("auto", "safetensors", "runai_streamer", "fastsafetensors")
"""Values under which an engine has what the files have."""


def check_loader(load_format: str) -> None:
    """Raise ConfigError where the package is missing that reads the weights."""
    package = PACKAGES.get(load_format)
    if package is not None and find_spec(package.replace("-", "_")) is None:
        raise ConfigError(
            f"{FLAG} is {load_format}, must be auto (or left out) while the package {package} is"
            " not installed"
        )


def check_loader_words(argv: Sequence[str]) -> None:
    """Check words that are not parsed yet in the same way. Raises ConfigError."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") == FLAG:
            check_loader((value if equals else following).lower())


def refuse_both(argv: Sequence[str]) -> None:
    """Raise ConfigError where a way to read weights is given that is to be chosen by measuring."""
    for word in argv:
        if word.partition("=")[0].replace("_", "-") == FLAG:
            raise ConfigError(f"--load is auto, must be left out with {FLAG}")


def check_device(load_format: str, device: str) -> None:
    """Raise ConfigError for a loader that needs a GPU where there is none."""
    if load_format in FOR_GPUS and device == "cpu":
        raise ConfigError(f"{FLAG} is {load_format}, must be auto (or left out) on a CPU")


def weights_word(load_format: str) -> str:
    """What the identity of weights says of how they were read: nothing of a loader that reads the
    same files to the same weights."""
    return "auto" if load_format in READ_AS_THEY_ARE else load_format
