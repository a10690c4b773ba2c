"""vLLM's resampling of recordings, in pieces and within a bound.

vLLM gives a whole recording to its resampler at once, which then takes twelve times the memory of
what it makes: a file of 1.2 kB, ten minutes with a sample a second, took 460 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import vllm.multimodal.audio as vllm_resampling
import vllm.multimodal.media.audio as vllm_audio
from vllm.multimodal.audio import AudioResampler

from kvmig.frontend.recording_rules import check_resampling

PIECE = 65_536
"""Samples at a time, before and after."""
LEAST = 1_024
"""Samples that the resampler needs before it makes any; silence follows a shorter recording."""

resample_at_once = vllm_resampling.resample_audio_pyav
"""vLLM's."""
_resample_as_vllm = AudioResampler.resample


def bound_resampling() -> None:
    """Resample no recording that takes too much, and give none to the resampler at once."""
    vllm_resampling.resample_audio_pyav = vllm_audio.resample_audio_pyav = resample_in_pieces
    AudioResampler.resample = _resample


def resample_in_pieces(audio: Any, *, orig_sr: float, target_sr: float) -> Any:
    """vLLM's `resample_audio_pyav`. Raises ResamplingTooLarge."""
    rate, wanted = round(orig_sr), round(target_sr)
    if rate == wanted:
        return audio
    check_resampling(audio.size, rate, wanted, phases=False)
    if audio.ndim == 2:
        each = [resample_in_pieces(one, orig_sr=rate, target_sr=wanted) for one in audio]
        return np.stack(each, axis=0)
    made = np.empty(check_resampling(audio.size, rate, wanted, phases=False), np.float32)
    resampler = vllm_resampling.av.AudioResampler(format="fltp", layout="mono", rate=wanted)
    filled = 0
    for frame in chain(_frames(audio, rate, max(1, min(PIECE, PIECE * rate // wanted))), [None]):
        for one in resampler.resample(frame):
            part = one.to_ndarray()[0][: len(made) - filled]
            made[filled : filled + len(part)] = part
            filled += len(part)
        if filled == len(made):
            break
    return made[:filled]


def _frames(audio: Any, rate: int, size: int) -> Iterator[Any]:
    """The recording as frames of that number of samples."""
    for at in range(0, max(len(audio), LEAST), size):
        piece = np.zeros((1, min(size, max(len(audio), LEAST) - at)), np.float32)
        known = audio[at : at + size]
        piece[0, : len(known)] = known
        frame = vllm_resampling.av.AudioFrame.from_ndarray(piece, format="fltp", layout="mono")
        frame.sample_rate = rate
        yield frame


def _resample(self: AudioResampler, audio: Any, *, orig_sr: float) -> Any:
    if self.target_sr is not None:
        phases = self.method != "pyav"
        check_resampling(audio.size, round(orig_sr), round(self.target_sr), phases=phases)
    return _resample_as_vllm(self, audio, orig_sr=orig_sr)
