"""Tensors that calls bring are bounded before they are unpacked."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from types import SimpleNamespace
from typing import Any, cast
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media.audio import AudioEmbeddingMediaIO
from vllm.multimodal.media.image import ImageEmbeddingMediaIO
from vllm.multimodal.media.video import VideoEmbeddingMediaIO
from vllm.renderers.embed_utils import safe_load_prompt_embeds

from kvmig.frontend.openai.vllm.tensors import bound_tensors

pytestmark = pytest.mark.engine

MOST = 1 << 20


def file_of(numbers: int, *, packed: bool = True) -> bytes:
    """A tensor of zeros, as torch writes it, and packed."""
    plain, file = BytesIO(), BytesIO()
    torch.save(torch.zeros(numbers // 128, 128), plain)
    with ZipFile(plain) as parts, ZipFile(file, "w", ZIP_DEFLATED if packed else ZIP_STORED) as out:
        for name in parts.namelist():
            out.writestr(name, parts.read(name))
    return file.getvalue()


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_EMBED_DECODE_BYTES", str(MOST))
    bound_tensors()


def load_prompt(data: bytes) -> Any:
    model = SimpleNamespace(
        enable_prompt_embeds=True,
        hf_text_config=SimpleNamespace(),
        get_hidden_size=lambda: 128,
        dtype=torch.float32,
    )
    return safe_load_prompt_embeds(cast("Any", model), b64encode(data))


@pytest.mark.parametrize(
    "load",
    [
        ImageEmbeddingMediaIO().load_bytes,
        AudioEmbeddingMediaIO().load_bytes,
        VideoEmbeddingMediaIO().load_bytes,
        load_prompt,
    ],
    ids=["image", "audio", "video", "prompt"],
)
def test_a_packed_tensor_is_refused_before_it_is_unpacked(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = getattr(load, "__self__", None)
    load = load if kind is None else kind.load_bytes
    assert load(file_of(1280)).shape == (10, 128)
    read: list[object] = []
    monkeypatch.setattr(torch, "load", lambda file, **_: read.append(file))
    with pytest.raises(VLLMValidationError, match=f"allowed are {MOST}"):
        load(file_of(10 * MOST))
    assert read == []


def test_a_file_of_many_parts_is_refused() -> None:
    file = BytesIO()
    with ZipFile(file, "w") as out:
        for number in range(1100):
            out.writestr(str(number), b"")
    with pytest.raises(VLLMValidationError, match="more than 1024 parts"):
        ImageEmbeddingMediaIO().load_bytes(file.getvalue())
