"""Models that judge texts in place of writing them, made on the spot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from kvmig.models import BUNDLED
from tests.support.zoo import make

LAST = 263
"""The last token of the bundled model."""


def classifier(folder: Path) -> Path:
    """The bundled model with a random head that gives one score; in a folder of its own there."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "classifier"
    shutil.copytree(BUNDLED, path)
    config = json.loads((BUNDLED / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "counts"}}
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(BUNDLED / "model.safetensors")
    chance = torch.Generator().manual_seed(1)
    head = torch.randn(1, config["hidden_size"], generator=chance)
    weights["score.weight"] = head.to(torch.bfloat16)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def decider(folder: Path) -> Path:
    """A small Qwen3, of which vLLM asks structured decisions: "yes" and "no" are a token each."""
    path = make("qwen3", folder)
    words = json.loads((path / "tokenizer.json").read_text())
    known = {number: word for word, number in words["model"]["vocab"].items()}
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    for number, word in zip(
        sorted(one for one in known if one > 263)[:2], ("yes", "no"), strict=True
    ):
        del words["model"]["vocab"][known[number]]
        words["model"]["vocab"][word] = number
        added = {"id": number, "content": word, "normalized": False, "special": False}
        words["added_tokens"].append({**added, **plain})
    (path / "tokenizer.json").write_text(json.dumps(words))
    return path
