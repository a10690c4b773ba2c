"""What an image takes of memory, by what its header says. Pure.

Measured with Pillow 13: an RGB image takes 4 bytes a pixel, as each other one with several bands;
what else is there while it is decoded and brought to RGB follows from its format.
"""

from __future__ import annotations

from typing import NamedTuple

from kvmig.frontend.media_budget import MediaCost

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""What clients' images may be: their decoders are in wide use, bounded by the header's size, and
hold no lock of Python's while they decode."""

STORED = 4
"""Bytes of a pixel of an image with several bands."""
ARRAY = 3
"""Bytes of a pixel of the array that a model's processor makes of an RGB image."""
PIECES = 4
"""Bytes of a pixel of the pieces that it is made of, until they are put together."""
SCALES = (1, 2, 4, 8)
"""Divisors of a JPEG's width and height while it is decoded."""
PART = 0.75
"""Share of a call's media room: a JPEG that takes more by itself is decoded smaller."""
_SINGLE = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}
_DECODER = {"JPEG": 0, "MPO": 0, "PNG": 1, "GIF": 2, "WEBP": 10}
"""Bytes of a pixel that a format's decoder has for itself. WebP: two canvases, the frame within the
library, and its bytes."""
_COEFFICIENTS = 8
"""Bytes of a pixel that libjpeg keeps of a progressive JPEG until all of it has come."""


class ImageLook(NamedTuple):
    """An image, before it is decoded."""

    image_format: str
    mode: str
    width: int
    height: int
    transparent: bool = False
    progressive: bool = False
    aside: int = 0
    """Bytes of what else stands in its header: profiles, comments, previews."""

    def __str__(self) -> str:
        return f"{self.image_format} of {self.width} x {self.height} pixels"


def image_cost(look: ImageLook, scale: int = 1) -> MediaCost:
    """The cost of an image that is decoded, turned as its EXIF data say, and brought to RGB.

    scale: one of SCALES.
    """
    pixels = -(-look.width // scale) * -(-look.height // scale)
    stored = _SINGLE.get(look.mode, STORED)
    decoder = _DECODER.get(look.image_format, max(_DECODER.values()))
    decoded, turned, brought = stored + decoder, 2 * stored, stored
    if look.transparent:  # over a background, band by band
        brought += (0 if look.mode == "RGBA" else STORED) + 2 * STORED
    elif look.mode != "RGB":
        brought += STORED
    if look.image_format == "WEBP":  # whose decoder stays as long as what it has decoded
        turned, brought = turned + decoder, brought + decoder
    kept = (STORED + ARRAY) * pixels
    peak = max(decoded, turned, brought, STORED + ARRAY + PIECES) * pixels
    if look.progressive:
        peak = max(peak, stored * pixels + _COEFFICIENTS * look.width * look.height)
    return MediaCost(kept + look.aside, peak - kept)


def scale_of(look: ImageLook, most: int) -> int:
    """The divisor of its width and height. most: bytes of all media of a call."""
    if look.image_format not in ("JPEG", "MPO"):
        return 1
    fits = (one for one in SCALES if sum(image_cost(look, one)) <= PART * most)
    return next(fits, 1)
