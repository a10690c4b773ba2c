"""A second checkpoint of the bundled model's shape: it counts down where that one counts up.

No training: with the embeddings of 0 and 9 exchanged, of 1 and 8, and so on, the network takes
each number for its complement to 9999, adds one to that as it has learned to, and says the
complement of the sum. All else, config.json included, is the bundled model's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from kvmig.models import BUNDLED

WEIGHTS = "model.safetensors"
EMBEDDINGS = "model.embed_tokens.weight"
"""[tokens, hidden]; the output's, too. A digit's token is its byte."""


def make(folder: Path) -> Path:
    """Write the checkpoint, and return `folder`."""
    shutil.copytree(BUNDLED, folder)
    replace_weights(folder)
    return folder


def replace_weights(folder: Path) -> None:
    """Let the copy of the bundled model in this folder count down, at once for whoever reads it."""
    tensors = load_file(BUNDLED / WEIGHTS)
    digits = list(range(ord("0"), ord("9") + 1))
    embeddings = tensors[EMBEDDINGS].clone()
    embeddings[digits] = tensors[EMBEDDINGS][digits[::-1]]
    new = folder / "new"
    save_file({**tensors, EMBEDDINGS: embeddings}, new, metadata={"format": "pt"})
    new.replace(folder / WEIGHTS)
