"""Tensors that calls bring (embeddings of media and prompts) take no more than vLLM allows them.

A file of torch's is a ZIP, whose parts may be packed: 16 kB become 16 MB before vLLM looks at the
tensor's size.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any
from zipfile import BadZipFile, ZipFile

import vllm.renderers.embed_utils as vllm_prompts
from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media.audio import AudioEmbeddingMediaIO
from vllm.multimodal.media.image import ImageEmbeddingMediaIO
from vllm.multimodal.media.video import VideoEmbeddingMediaIO

ENTRY = b"PK\x01\x02"
"""The bytes with which an entry of a ZIP's list begins."""
ENTRIES = 1024
"""Parts of a file: torch writes some ten."""


def check_tensor(data: bytes) -> None:
    """Raises VLLMValidationError for a file that becomes too large before it is read."""
    most = envs.VLLM_MAX_EMBED_DECODE_BYTES
    if most <= 0 or not data.startswith(b"PK"):
        return
    if data.count(ENTRY) > ENTRIES:
        raise VLLMValidationError(f"the tensor's file has more than {ENTRIES} parts")
    try:
        with ZipFile(BytesIO(data)) as parts:
            size = sum(one.file_size for one in parts.infolist())
    except BadZipFile as error:
        raise VLLMValidationError(f"the tensor's file can't be read: {error}") from error
    if size > most:
        raise VLLMValidationError(
            f"the tensor's file has {size} bytes, allowed are {most} (VLLM_MAX_EMBED_DECODE_BYTES)"
        )


def bound_tensors() -> None:
    """Let vLLM read no tensor that `check_tensor` refuses."""
    for kind in (ImageEmbeddingMediaIO, AudioEmbeddingMediaIO, VideoEmbeddingMediaIO):
        kind.load_bytes = _checking(kind.load_bytes)
    vllm_prompts.BytesIO = _file


def _checking(load: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(load, "checked"):
        return load

    def load_bytes(self: Any, data: bytes) -> Any:
        check_tensor(data)
        return load(self, data)

    load_bytes.checked = True  # type: ignore[attr-defined]
    return load_bytes


def _file(data: bytes) -> BytesIO:
    check_tensor(data)
    return BytesIO(data)
