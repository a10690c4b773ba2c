"""Recordings by vLLM's real decoders, with the packages of its extra `audio` only."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
import pytest
import vllm.multimodal.media.audio as vllm_audio

from kvmig.core.heap import give_back
from kvmig.frontend.openai.vllm.decoding import bound_decoding
from kvmig.frontend.openai.vllm.resampling import resample_at_once, resample_in_pieces
from kvmig.frontend.recording_rules import ResamplingTooLarge

pytest.importorskip("av", reason="needs vllm[audio]")
soundfile: Any = pytest.importorskip("soundfile", reason="needs vllm[audio]")

pytestmark = pytest.mark.engine
LIMITS = {"max_duration_s": 600, "max_decode_bytes": 32 << 20}
STATUS = Path("/proc/self/status")


def wav(rate: int, seconds: int) -> bytes:
    """Silence."""
    size = 2 * rate * seconds
    head = pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
    data = b"data" + pack("<I", size) + bytes(size)
    return b"RIFF" + pack("<I", 28 + len(data)) + b"WAVEfmt " + head + data


def flac(rate: int, seconds: int) -> bytes:
    file = BytesIO()
    with soundfile.SoundFile(file, "w", rate, 1, format="FLAC") as written:
        for _ in range(seconds):
            written.write(np.zeros(rate, np.int16))
    return file.getvalue()


def value(name: str) -> int:
    line = next(one for one in STATUS.read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024


def taken(data: bytes, rate: int) -> int:
    """Bytes that this process grows by while a form's recording is decoded for a model."""
    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = value("VmRSS")
    vllm_audio.load_audio(BytesIO(data), sr=rate, backend="soundfile", **LIMITS)
    return value("VmHWM") - before


@pytest.mark.parametrize("made", [wav(1, 600), wav(100, 590), flac(8_000, 590), flac(655_350, 12)])
def test_a_small_file_that_becomes_long_takes_less_than_100_mb(made: bytes) -> None:
    bound_decoding()
    taken(wav(16_000, 1), 8_000)  # what is loaded once
    assert taken(made, 16_000) < 100_000_000


def test_a_recording_that_would_be_too_large_for_the_model_is_refused() -> None:
    bound_decoding()
    with pytest.raises(ResamplingTooLarge):
        taken(wav(1, 600), 48_000)


@pytest.mark.parametrize(("rate", "wanted"), [(8_000, 16_000), (44_100, 16_000), (16_000, 24_000)])
def test_what_is_resampled_in_pieces_is_what_vllm_makes_at_once(rate: int, wanted: int) -> None:
    time = np.arange(5 * rate) / rate
    audio = (np.sin(440 * time) + 0.3 * np.sin(9_000 * time)).astype(np.float32)
    whole = resample_at_once(audio, orig_sr=rate, target_sr=wanted)
    pieces = resample_in_pieces(audio, orig_sr=rate, target_sr=wanted)
    assert pieces.shape == whole.shape
    assert np.abs(pieces - whole).max() < 1e-6
