"""The size of a model's weights where they are loaded, by the headers of its files.

A model is a folder, or a name on the Hugging Face Hub whose files may be in this host's cache.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvmig.core.read_progress import note_path
from kvmig.engines.identity import tensors_of

WIDE = {"F64": 8, "F32": 4}
"""Types that engines use only where a flag asks for them, and their sizes."""
KEPT = ("float32", "float")
"""Values of --dtype under which they do."""
USUAL = 2
"""Bytes of a number in the types that they become."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
INDEX = "model.safetensors.index.json"
"""Names the files of a checkpoint that has several."""


def weight_bytes(model: str, dtype: str = "auto", revision: str | None = None) -> int:
    """Bytes of all weights as an engine holds them; 0: it is unknown on this host.

    dtype, revision: the engine's flags. What other flags change, such as weights that are quantised
    while they are loaded, isn't counted: then it is more than it takes.
    """
    folder = local_folder(model, revision)
    if folder is None:
        return 0
    if missing := _bytes_of_index(folder):
        return missing
    total = 0
    for tensor in tensors_of(folder):
        words = tensor.name.split()
        size = WIDE.get(words[1]) if len(words) > 1 else None
        wide = size is not None and dtype not in KEPT
        total += tensor.size * USUAL // size if wide and size else tensor.size
    return total


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """Find a model's files on this host; None: there are none. Nothing is downloaded."""
    folder = Path(model)
    note_path(folder)
    if folder.is_dir():
        return folder
    if not HUB_NAME.fullmatch(model):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # of an engine that knows no such names
        return None
    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _bytes_of_index(folder: Path) -> int:
    """What the index says of a checkpoint whose files aren't all there; 0: they are."""
    note_path(folder / INDEX)
    try:
        index = json.loads((folder / INDEX).read_bytes())
        files = set(index["weight_map"].values())
        size = int(index["metadata"]["total_size"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0  # it can't be read so; the engine that loads it says what is wrong
    return 0 if all((folder / name).is_file() for name in files) else size
