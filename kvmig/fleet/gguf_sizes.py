"""The size of a model in a GGUF file, by the file's header."""

from __future__ import annotations

from pathlib import Path

from kvmig.core.model_sizes import ModelSizes
from kvmig.core.read_progress import note_path
from kvmig.sources.gguf_header import NoHeader, read_header, sizes_of


def gguf_sizes(folder: str) -> ModelSizes | None:
    """Sizes of a folder with one GGUF file and no other weights; None: it is another one, or can't
    be read, which its start says."""
    note_path(folder)
    try:
        found = list(Path(folder).glob("*.gguf"))
        if len(found) != 1 or any(Path(folder).glob("*.safetensors")):
            return None
        note_path(found[0])
        with found[0].open("rb") as file:

            def read(begin: int, count: int) -> bytes:
                file.seek(begin)
                return file.read(count)

            header, _ = read_header(read, found[0].stat().st_size)
    except (OSError, NoHeader):
        return None
    return sizes_of(header)
