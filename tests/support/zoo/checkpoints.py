"""Writes a family's checkpoint: random weights, the same at each call.

vLLM's own `--load-format dummy` won't do: it makes all weights so small, norms too, that what the
KV cache holds doesn't change a token, and a wrong copy of it would go unseen.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from kvmig.models import BUNDLED
from tests.support.zoo.families import FAMILIES

if TYPE_CHECKING:
    import torch

GAIN = 1.5
"""Of a matrix, against one that keeps its input's variance: a prompt's tokens still tell after
hundreds of others."""
SURENESS = 2.5
"""Standard deviation of the logits: not one token over and over, nor all as likely."""
KEENNESS = 2.0
"""Of attention with normed queries, so that it doesn't see the mean of all tokens."""
LAST_NORM = 8.0
"""So much of it comes from the last norm. Where the embeddings are the output's matrix, too, they
stay small by that, and the last token isn't its own likeliest successor."""


def make(family: str, folder: Path) -> Path:
    """Write the checkpoint into `folder/family` unless it is there; return where it is."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    out = folder / family
    if (out / "tokenizer.json").exists():
        return out
    words = dict(FAMILIES[family])
    config = AutoConfig.for_model(**words)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        sees = "vision_config" in words
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.bfloat16)
        for name, weight in model.named_parameters():
            spread(name, weight.data)
    model.save_pretrained(out)
    tokenizer(out, config.get_text_config().vocab_size)
    return out


def eagle(target: Path) -> Path:
    """Write an untrained EAGLE head for a Llama beside it, unless it is there; return where."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    out = target.with_name(f"{target.name}-eagle")
    if out.exists():
        return out
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers = 1
    width = config.hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).model
        layers = {f"layers.{name}": weight for name, weight in model.layers.state_dict().items()}
        weights = {**layers, "fc.weight": torch.empty(width, 2 * width, dtype=torch.bfloat16)}
        del weights["layers.0.input_layernorm.weight"]  # such heads have none
        for name, weight in weights.items():
            spread(name, weight)
    config.save_pretrained(out)
    save_file(weights, out / "model.safetensors")
    return out


def spread(name: str, weight: torch.Tensor) -> None:
    """Draw a matrix, or a stack of them; biases, norms, convolutions and decays stay."""
    if "norm" in name and "layers" not in name:
        weight.fill_(LAST_NORM)
    elif "q_norm" in name:
        weight += KEENNESS
    elif "embed" in name or "lm_head" in name:
        weight.normal_(std=SURENESS / LAST_NORM / math.sqrt(weight.shape[-1]))
    elif weight.dim() > 1 and "conv" not in name:
        weight.normal_(std=GAIN * math.sqrt(2 / (weight.shape[-1] + weight.shape[-2])))


def tokenizer(out: Path, vocab: int) -> None:
    """The bundled model's, a token a byte, with a word for each further token."""
    for name in ("generation_config.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, out)
    words = json.loads((BUNDLED / "tokenizer.json").read_text())
    known = len(words["model"]["vocab"]) + len(words["added_tokens"])
    words["model"]["vocab"] |= {f"w{number}": number for number in range(known, vocab)}
    (out / "tokenizer.json").write_text(json.dumps(words))
