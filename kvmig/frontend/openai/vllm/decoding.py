"""vLLM's decoders of images, audio and video, each within what its call may still take.

What an image or a video takes is counted by its header, before it is decoded. Of a recording as
much is decoded as there is room for.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from threading import local
from typing import Any

import vllm.multimodal.image as vllm_images
import vllm.multimodal.media.audio as vllm_audio
import vllm.multimodal.media.image as vllm_image_io
import vllm.multimodal.video as vllm_video
import vllm.multimodal.video_decoders.base as vllm_frames
from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError
from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.multimodal.media.base import MediaIO
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from kvmig.frontend.image_costs import IMAGE_FORMATS, ImageLook, image_cost, scale_of
from kvmig.frontend.media_budget import MAX_MEDIA, MediaBudget, MediaCost
from kvmig.frontend.openai.vllm.resampling import bound_resampling

TEXT_BYTES = 1 << 20
"""Most bytes of a PNG's texts and comments together: 64 times that with Pillow's own bound."""
FRAME_BYTES = 36
"""Bytes per pixel of a frame, for its decoder: reference frames, one per thread, the last one."""
FRAMES_PIXELS = 1 << 33
"""Most pixels of all frames of a video: its decoder reads all up to the last wanted one."""
LEAST_FRAME = 1 << 16
"""Pixels that a frame counts at least: each takes its time."""
COPIES = 3
"""Copies of a recording while it is decoded: its pieces, all of it, and that in its final type."""
FIELDS: tuple[tuple[type[MediaIO[Any]], str], ...] = (
    (ImageMediaIO, "image_url"), (AudioMediaIO, "audio_url"), (VideoMediaIO, "video_url"),
)  # fmt: skip

logger = logging.getLogger(__name__)

_image_as_vllm = ImageMediaIO.load_bytes
_video_as_vllm = VideoMediaIO.load_bytes
_recording_as_vllm = AudioMediaIO.load_bytes
audio_as_vllm = vllm_audio.load_audio
_open_as_vllm = vllm_image_io.open_image
_turn_as_vllm = vllm_image_io.normalize_image
_decode_video_as_vllm = vllm_video.decode_video
_check_frame_as_vllm = vllm_frames.check_frame_pixel_limit
torchcodec_as_vllm = vllm_audio.load_audio_torchcodec


class _Now(local):
    """What this thread decodes."""

    budget: MediaBudget | None = None
    inline: bool = False
    frame: int = 0
    scale: int = 1


_now = _Now()


def decode_within(budget: MediaBudget, decode: Callable[[], Any], *, inline: bool = False) -> Any:
    """Decode on this thread, and count that. inline: it stands in the call's body.

    Raises MediaTooLarge.
    """
    _now.budget, _now.inline, _now.frame, _now.scale = budget, inline, 0, 1
    try:
        return decode()
    finally:
        _now.budget = None


def field_of(media_io: MediaIO[Any]) -> str | None:
    """The field of a call that has what is loaded so."""
    return next((name for kind, name in FIELDS if isinstance(media_io, kind)), None)


def bound_decoding() -> None:
    """Let vLLM's decoders take no more than what `decode_within` allows."""
    PngImagePlugin.MAX_TEXT_MEMORY = TEXT_BYTES
    vllm_images.ALLOWED_IMAGE_FORMATS = IMAGE_FORMATS
    vllm_image_io.open_image = _open
    vllm_image_io.normalize_image = _turn
    ImageMediaIO.load_bytes = _load_image
    VideoMediaIO.load_bytes = _load_video
    AudioMediaIO.load_bytes = _load_recording
    vllm_audio.load_audio = _load_audio
    vllm_video.decode_video = _decode_video
    for name, module in list(sys.modules.items()):  # a decoder is imported with its first video
        if name.startswith("vllm.multimodal.video_decoders"):
            module.check_frame_pixel_limit = _check_frame  # type: ignore[attr-defined]
    vllm_audio.load_audio_torchcodec = _load_torchcodec
    vllm_audio._AUDIO_LOADERS["torchcodec"] = _load_torchcodec
    bound_resampling()


def _take_file(budget: MediaBudget, what: str, size: int) -> None:
    """What is fetched has been counted while it came."""
    if _now.inline:
        budget.count_media(what, MediaCost(size, size * 4 // 3))


# -- images


def _load_image(self: ImageMediaIO, data: bytes) -> Any:
    if (budget := _now.budget) is not None:
        _take_file(budget, "an image", len(data))
        look, most = look_at(data), envs.VLLM_MAX_IMAGE_PIXELS
        _now.scale = 1
        if most <= 0 or look.width * look.height <= most:  # else vLLM says so
            _now.scale = scale_of(look, budget.most)
            budget.count_media(str(look), image_cost(look, _now.scale))
    return _image_as_vllm(self, data)


def look_at(data: bytes) -> ImageLook:
    """What an image's header says. Raises VLLMValidationError where it is none of ours."""
    try:
        with Image.open(BytesIO(data), formats=IMAGE_FORMATS) as image:
            more = [*getattr(image, "applist", ()), *getattr(image, "private_chunks", ())]
            aside = [*image.info.values(), *(part for one in more for part in one)]
            return ImageLook(
                str(image.format),
                image.mode,
                *image.size,
                transparent=image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info,
                progressive="progressive" in image.info,
                aside=sum(len(one) for one in aside if isinstance(one, bytes | str)),
            )
    except UnidentifiedImageError:
        allowed = f"{', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]}"
        sentence = f"cannot identify image: it must be {allowed}"
        raise VLLMValidationError(sentence, parameter="image_url") from None


def _open(file: Any) -> Image.Image:
    image: Image.Image = _open_as_vllm(file)
    if _now.scale > 1:
        image.draft(None, (image.width // _now.scale, image.height // _now.scale))
    return image


def _turn(image: Image.Image) -> Image.Image:
    """Turn an image as its EXIF data say; vLLM's makes a copy of each image, turned or not."""
    if image.format not in ("JPEG", "MPO"):  # others keep their decoder's memory with them
        copied: Image.Image = _turn_as_vllm(image)
        return copied
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - as vLLM has it: data without sense turn nothing
        logger.info("an image stays as it is: its EXIF data can't be read: %r", error)
    return image


# -- video


def _load_video(self: VideoMediaIO, data: bytes) -> Any:
    if (budget := _now.budget) is not None:
        _take_file(budget, "a video", len(data))
    return _video_as_vllm(self, data)


def _check_frame(width: int, height: int) -> None:
    _check_frame_as_vllm(width, height)
    _now.frame = pixels = width * height
    if (budget := _now.budget) is not None:
        what = f"a video of {width} x {height} pixels"
        budget.check(what, MediaCost(0, FRAME_BYTES * pixels))


def _decode_video(backend: str, loader: Any, *args: Any, **options: Any) -> Any:
    budget = _now.budget

    class BoundedLoader(loader):
        @classmethod
        def compute_frames_index_to_sample(cls, source: Any, target: Any, **more: Any) -> list[int]:
            if source.total_frames_num * max(_now.frame, LEAST_FRAME) > FRAMES_PIXELS:
                sentence = (
                    f"a video of {source.total_frames_num} frames of {_now.frame} pixels is too"
                    f" long: allowed are {FRAMES_PIXELS // max(_now.frame, LEAST_FRAME)} frames"
                )
                raise VLLMValidationError(sentence, parameter="video_url")
            wanted: list[int] = super().compute_frames_index_to_sample(source, target, **more)
            if budget is not None:
                # The frames, and what the model's processor makes of them.
                cost = MediaCost(6 * len(wanted) * _now.frame, FRAME_BYTES * _now.frame)
                budget.count_media(f"{len(wanted)} frames of {_now.frame} pixels of a video", cost)
            return wanted

    return _decode_video_as_vllm(backend, BoundedLoader, *args, **options)


# -- audio


def _load_recording(self: AudioMediaIO, data: bytes) -> Any:
    if (budget := _now.budget) is not None:
        _take_file(budget, "a recording", len(data))
    return _recording_as_vllm(self, data)


def _load_audio(path: Any, *, max_decode_bytes: int | None = None, **options: Any) -> Any:
    if (budget := _now.budget) is None:
        return audio_as_vllm(path, max_decode_bytes=max_decode_bytes, **options)
    room = budget.left // COPIES
    most = room if max_decode_bytes is None else min(room, max_decode_bytes)
    try:
        audio, rate = audio_as_vllm(path, max_decode_bytes=most, **options)
    except ValueError as error:
        why = f" ({MAX_MEDIA} leaves it {room} bytes)" if most == room else ""
        sentence = f"the recording can't be used: {error}{why}"
        raise VLLMValidationError(sentence, parameter="audio_url") from error
    budget.count_media("a recording", MediaCost(audio.nbytes))
    return audio, rate


def _load_torchcodec(
    path: Any,
    *,
    max_duration_s: float | None = None,
    max_decode_bytes: int | None = None,
    **options: Any,
) -> Any:
    """Decode a recording. vLLM's function looks at its size only at the end, if the header doesn't
    give the length."""
    known = max_duration_s is not None and max_decode_bytes is not None
    if vllm_audio.AudioDecoder is not None and known:
        with suppress(RuntimeError):  # vLLM's own attempt says what is wrong
            said = vllm_audio.AudioDecoder(path, sample_rate=options.get("sr")).metadata
            rate = options.get("sr") or said.sample_rate or 48_000
            second = int(rate) * (said.num_channels or 8) * 4
            max_duration_s = min(max_duration_s or 0, (max_decode_bytes or 0) / second)
        if isinstance(path, BytesIO):
            path.seek(0)
    return torchcodec_as_vllm(
        path, max_duration_s=max_duration_s, max_decode_bytes=max_decode_bytes, **options
    )
