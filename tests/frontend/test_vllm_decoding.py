"""vLLM's decoders of media take no more than their call may."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest
import vllm.multimodal.media.audio as vllm_audio
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from kvmig.frontend.media_budget import MediaBudget, MediaTooLarge
from kvmig.frontend.openai.vllm import decoding
from kvmig.frontend.openai.vllm.decoding import bound_decoding, decode_within
from tests.support.media_files import IMAGES

pytestmark = pytest.mark.engine

SLACK = 4_000_000
"""Bytes that allocators and threads take beside images."""


def test_a_large_jpeg_is_decoded_at_half_its_size_and_turned() -> None:
    bound_decoding()
    data = IMAGES["turned JPEG"]((4032, 3024))
    made = decode_within(MediaBudget(100_000_000), lambda: ImageMediaIO().load_bytes(data))
    assert made.media.size == (1512, 2016)
    made = decode_within(MediaBudget(1_000_000_000), lambda: ImageMediaIO().load_bytes(data))
    assert made.media.size == (3024, 4032)


@pytest.mark.long
def test_no_image_takes_more_than_what_its_header_says() -> None:
    run = [sys.executable, "-m", "tests.support.media_measure"]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    beyond = {kind: (took, said) for kind, (took, said) in found.items() if took > said + SLACK}
    assert not beyond, found


def video(frames: int, size: tuple[int, int]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/video.mp4"
        writer = cv2.VideoWriter(path, cv2.VideoWriter.fourcc(*"mp4v"), 30, size)
        for number in range(frames):
            writer.write(np.full((size[1], size[0], 3), number % 255, np.uint8))
        writer.release()
        return Path(path).read_bytes()


def test_frames_of_a_video_that_take_too_much_are_refused_before_they_are_decoded() -> None:
    bound_decoding()
    data, budget = video(40, (640, 480)), MediaBudget(100_000_000)
    load = VideoMediaIO(ImageMediaIO(), num_frames=32).load_bytes
    frames, _ = decode_within(budget, lambda: load(data))
    assert frames.shape == (32, 480, 640, 3)
    assert budget.kept >= 2 * frames.nbytes
    with pytest.raises(MediaTooLarge, match="32 frames of 307200 pixels of a video"):
        decode_within(budget, lambda: load(data))


def test_a_video_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bound_decoding()
    monkeypatch.setattr(decoding, "FRAMES_PIXELS", 1 << 20)
    load = VideoMediaIO(ImageMediaIO(), num_frames=2).load_bytes
    data = video(40, (64, 64))
    with pytest.raises(VLLMValidationError, match="allowed are 16 frames"):
        decode_within(MediaBudget(10**9), lambda: load(data))


def test_no_more_of_a_recording_is_decoded_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound_decoding()
    asked: list[int] = []

    def load_audio(_: Any, *, max_decode_bytes: int, **__: Any) -> tuple[Any, int]:
        asked.append(max_decode_bytes)
        return np.zeros(5_000_000, np.float32), 16_000

    monkeypatch.setattr(decoding, "audio_as_vllm", load_audio)
    budget = MediaBudget(60_000_000)
    load = AudioMediaIO().load_bytes
    for _ in range(3):
        decode_within(budget, lambda: load(b"recording"))
    with pytest.raises(MediaTooLarge):
        decode_within(budget, lambda: load(b"recording"))
    assert asked == [20_000_000, 40_000_000 // 3, 20_000_000 // 3, 0]


class Header(NamedTuple):
    """Of a recording, as torchcodec has it."""

    sample_rate: int | None
    num_channels: int | None


@pytest.mark.parametrize(
    ("header", "seconds"), [((655_350, 8), 0.477), ((16_000, 1), 156.25), ((None, None), 6.51)]
)
def test_a_recording_whose_header_does_not_say_how_long_it_is_is_cut_by_its_size(
    monkeypatch: pytest.MonkeyPatch, header: tuple[int | None, int | None], seconds: float
) -> None:
    asked: list[float] = []

    def decoder(path: Any, sample_rate: Any = None) -> Any:
        return SimpleNamespace(metadata=Header(*header))

    def load(path: Any, *, max_duration_s: float, **_: Any) -> None:
        asked.append(max_duration_s)

    bound_decoding()
    monkeypatch.setattr(vllm_audio, "AudioDecoder", decoder)
    monkeypatch.setattr(decoding, "torchcodec_as_vllm", load)
    vllm_audio.load_audio_torchcodec(
        BytesIO(b""), sr=None, max_duration_s=600.0, max_decode_bytes=10_000_000
    )
    assert asked == [pytest.approx(seconds, rel=0.01)]
