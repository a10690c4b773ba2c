"""The header of a GGUF file: what the model is like, and where its weights begin. Pure.

Values that are not needed here, such as the words of a tokenizer, are passed over.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvmig.core.errors import KvmigError
from kvmig.core.model_sizes import LayerSizes, ModelSizes

FIRST_BYTES = 1 << 20
MOST_BYTES = 64 << 20
"""Longest header that is read: one with 260,000 words of a tokenizer takes some 8 MB."""
MOST_ENTRIES = 1_000_000
MOST_DEPTH = 2
"""Most arrays in each other."""
MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
"""Formats of values by their types' numbers."""
TEXT, ARRAY = 8, 9
FEW = 4096
"""Arrays with more values are passed over."""
CACHE_BYTES = 2
"""Bytes of a number in the KV cache: llama.cpp's own choice is F16."""

Value = int | float | bool | str | list["Value"] | None


class HeaderCut(KvmigError):
    """More of the file is needed."""


class NoHeader(KvmigError):
    """The file is no GGUF file, or one that isn't understood."""


class GgufHeader(NamedTuple):
    """What the header says."""

    values: Mapping[str, Value]
    weights: int
    """Bytes of the weights, which are the rest of the file."""

    def number(self, name: str) -> int | None:
        """A value of this model's architecture; None: there is none."""
        found = self.values.get(f"{self.values.get('general.architecture')}.{name}")
        return found if isinstance(found, int) and not isinstance(found, bool) else None


class HeaderReader:
    """Reads values from the beginning of a file on. Raises HeaderCut, NoHeader."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def scalar(self, form: str) -> int | float | bool:
        """One value of this format."""
        size = struct.calcsize(form)
        found: int | float | bool = struct.unpack(form, self._take(size))[0]
        return found

    def count(self, form: str = "<Q") -> int:
        """A number of things, within bounds."""
        found = int(self.scalar(form))
        if found > MOST_ENTRIES:
            raise NoHeader(f"its header counts {found} things, at most {MOST_ENTRIES} are read")
        return found

    def text(self) -> str:
        """A text."""
        size = int(self.scalar("<Q"))
        if size > MOST_BYTES:
            raise NoHeader(f"its header has a text of {size} bytes")
        return self._take(size).decode(errors="replace")

    def value(self, kind: int, depth: int = 0) -> Value:
        """A value of this type; None for a long array."""
        if (form := SCALARS.get(kind)) is not None:
            return self.scalar(form)
        if kind == TEXT:
            return self.text()
        if kind != ARRAY or depth >= MOST_DEPTH:
            raise NoHeader(f"its header has a value of type {kind}")
        inner, count = int(self.scalar("<I")), self.count()
        if (form := SCALARS.get(inner)) is not None and count > FEW:
            self._take(struct.calcsize(form) * count)
            return None
        found = [self.value(inner, depth + 1) for _ in range(count)]
        return found if count <= FEW else None

    def _take(self, size: int) -> bytes:
        found = self._data[self.at : self.at + size]
        if len(found) < size:
            raise HeaderCut("the header goes on")
        self.at += size
        return found


def parse_header(data: bytes, size: int) -> GgufHeader:
    """data: the file's beginning. size: of the file. Raises HeaderCut, NoHeader."""
    if not MAGIC.startswith(data[: len(MAGIC)]):
        raise NoHeader("it is no GGUF file")
    reader = HeaderReader(data)
    reader.at = len(MAGIC)
    version = int(reader.scalar("<I"))
    if version not in VERSIONS:
        raise NoHeader(f"it is GGUF of version {version}, must be 2 or 3")
    tensors, entries = reader.count(), reader.count()
    values: dict[str, Value] = {}
    for _ in range(entries):
        name = reader.text()
        values[name] = reader.value(int(reader.scalar("<I")))
    for _ in range(tensors):
        reader.text()
        for _ in range(reader.count("<I")):
            reader.scalar("<Q")
        reader.scalar("<I")
        reader.scalar("<Q")
    step = values.get("general.alignment", 32)
    if not isinstance(step, int) or not 1 <= step <= 1 << 20:
        raise NoHeader(f"its alignment is {step!r:.50}")
    begin = -(-reader.at // step) * step
    if begin > size:
        raise NoHeader(f"its header of {begin} bytes is longer than the file")
    return GgufHeader(values, size - begin)


def read_header(read: Callable[[int, int], bytes], size: int) -> tuple[GgufHeader, bytes]:
    """Read as much of a file as its header takes; the header, and these bytes.

    read: the file's bytes from a position on, of a number. Raises NoHeader.
    """
    data, most = b"", min(size, MOST_BYTES)
    while True:
        wanted = min(max(FIRST_BYTES, 2 * len(data)), most)
        data += read(len(data), wanted - len(data))
        try:
            return parse_header(data, size), data
        except HeaderCut as error:
            if len(data) >= most or len(data) < wanted:
                raise NoHeader(f"its header takes more than {len(data)} bytes") from error


def sizes_of(header: GgufHeader) -> ModelSizes:
    """What llama.cpp takes for a model in one worker. Layers are left out where what they keep of
    a token does not follow from the header: of recurrent, compressed and windowed kinds."""
    tokens = header.number("context_length") or 0
    token = token_bytes(header)
    layers: tuple[LayerSizes, ...] = ()
    if token:
        kept = LayerSizes(
            kind="attention", layers=header.number("block_count") or 0, token=token,
            request=token * tokens,
        )  # fmt: skip
        layers = (kept,)
    return ModelSizes(weights=header.weights, files=header.weights, tokens=tokens, layers=layers)


def token_bytes(header: GgufHeader) -> int:
    """Bytes of a token in the KV cache of all layers; 0: it does not follow from the header."""
    for other in ("attention.sliding_window", "attention.kv_lora_rank", "ssm.state_size"):
        if header.number(other):
            return 0
    layers, width = header.number("block_count"), header.number("embedding_length")
    heads = header.number("attention.head_count")
    if not (layers and width and heads):
        return 0
    own = width // heads
    key = header.number("attention.key_length") or own
    value = header.number("attention.value_length") or own
    name = f"{header.values.get('general.architecture')}.attention.head_count_kv"
    groups = header.values.get(name, heads)
    if isinstance(groups, list):
        kept = sum(one for one in groups if isinstance(one, int))
        kept = kept if len(groups) == layers else 0
    else:
        kept = layers * groups if isinstance(groups, int) else 0
    return kept * (key + value) * CACHE_BYTES
