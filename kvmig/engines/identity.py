"""The two things that engines must agree on: weights, by identity, and numerics, by class.

Weights are equal where a request may go on, in any folder. Their identity is made of
the checkpoint's files, not of what an engine has loaded: so it can be known before an instance is
started, and is the same however many workers share the tensors. Of each tensor its name, dtype,
shape and some bytes count; a few MB are read of any model.

Engines of one numerics class round alike. A request that moves within one class gets the tokens
that it would have got unmoved, batches being equal. Between two classes its logits differ in their
last bits, and now and then a token does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from kvmig.core.errors import StartupError
from kvmig.core.read_progress import note_path

MOST_BYTES = 4 << 20
"""Bytes that are read of all tensors together, beyond LEAST_BYTES of each."""
LEAST_BYTES = 64
PIECES = 4
"""Pieces that are read of a tensor: its first bytes, its last ones, and some between."""
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf")
"""Formats of weights without a header that we read: each file counts as one tensor."""
SETTINGS = ("config.json", "hf_quant_config.json", "adapter_config.json")
"""Files that describe how the model computes with its tensors."""


class TensorOnDisk:
    """One tensor (or file) as it lies on disk: `size` bytes from `offset` on."""

    def __init__(self, name: str, path: Path, offset: int, size: int) -> None:
        """name: with its dtype and shape."""
        self.name, self.path, self.offset, self.size = name, path, offset, size

    def pieces(self, most: int) -> Iterator[tuple[int, int]]:
        """(first byte, bytes) of what counts: all of it if that is at most `most` bytes."""
        if self.size <= most:
            yield self.offset, self.size
            return
        length = max(1, most // PIECES)
        for piece in range(PIECES):
            yield self.offset + (self.size - length) * piece // (PIECES - 1), length


def identity_of(model: str, words: Sequence[object] = ()) -> str:
    """The identity of the weights in a folder (or file) at this moment; elsewhere, of the name.

    words: all else that makes other weights of the same files, such as quantisation.
    """
    digest = blake2b(repr([str(word) for word in words]).encode(), digest_size=8)
    path = Path(model)
    note_path(path)
    if not path.exists():
        digest.update(model.encode())
        return digest.hexdigest()
    for name in SETTINGS:
        note_path(path / name)
        if (path / name).is_file():
            digest.update(b"\0" + name.encode() + b"\0" + (path / name).read_bytes())
    tensors = sorted(tensors_of(path), key=lambda one: one.name)
    most = max(LEAST_BYTES, MOST_BYTES // max(1, len(tensors)))
    files: dict[Path, BinaryIO] = {}
    try:
        for tensor in tensors:
            note_path(tensor.path)
            file = files.get(tensor.path) or files.setdefault(tensor.path, tensor.path.open("rb"))
            digest.update(f"\0{tensor.name} {tensor.size}\0".encode())
            for first, length in tensor.pieces(most):
                file.seek(first)
                digest.update(file.read(length))
    finally:
        for file in files.values():
            file.close()
    return digest.hexdigest()


def updated(identity: str, *words: object) -> str:
    """The identity after an update that `words` describe: equal after equal ones, in their order.

    An update's tensors come from a trainer, to all instances alike; nothing here can read them.
    """
    return blake2b(repr([identity, *map(str, words)]).encode(), digest_size=8).hexdigest()


def check_unchanged(model: str, before: str, after: str) -> None:
    """Raise StartupError if what was on disk before the weights were loaded isn't there after."""
    if before != after:
        raise StartupError(
            f"the weights in {model} were replaced while they were loaded"
            f" (identity {before} before, {after} after): start it again"
        )


def tensors_of(path: Path) -> list[TensorOnDisk]:
    """The tensors of a checkpoint's folder, or of one file."""
    if path.is_file():
        return _tensors_of_file(path)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        files = sorted(file for kind in OTHER_FORMATS for file in path.glob(kind))
    return [tensor for file in files for tensor in _tensors_of_file(file)]


def _tensors_of_file(path: Path) -> list[TensorOnDisk]:
    note_path(path)
    size = path.stat().st_size
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if 8 + length <= size else b""
        try:
            return [
                TensorOnDisk(
                    f"{name} {one['dtype']} {one['shape']}",
                    path,
                    8 + length + one["data_offsets"][0],
                    one["data_offsets"][1] - one["data_offsets"][0],
                )
                for name, one in json.loads(header).items()
                if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            pass  # broken, which whoever loads it will say: it counts as it is
    return [TensorOnDisk(path.name, path, 0, size)]


def numerics_class(**words: object) -> str:
    """The settings that engines must share to round alike; readable, in the order of the names.

    Example: `numerics_class(workers=2, dtype="bfloat16")` is "dtype=bfloat16 workers=2".
    """
    return " ".join(f"{name}={'-'.join(str(word).split())}" for name, word in sorted(words.items()))


def difference(here: str, there: str) -> str:
    """The words in which two classes differ, for people."""
    ours, theirs = here.split(), there.split()
    only_here = [word for word in ours if word not in theirs]
    only_there = [word for word in theirs if word not in ours]
    return f"{' '.join(only_there) or 'nothing'} there, {' '.join(only_here) or 'nothing'} here"
