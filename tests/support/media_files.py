"""Images of the kinds that clients send, small files that become large."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

from PIL import Image


def _noise(mode: str, size: tuple[int, int]) -> Image.Image:
    """Not of one colour, so that no decoder has it easy; it repeats, so that files are small."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    tile = Image.frombytes(
        mode, (64, 64), bytes((one * 7 + one // 64) % 256 for one in range(4096 * bands))
    )
    image = Image.new(mode, size)
    for left in range(0, size[0], 64):
        for top in range(0, size[1], 64):
            image.paste(tile, (left, top))
    return image


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _turned(size: tuple[int, int]) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return _saved(_noise("RGB", size), "JPEG", exif=exif)


def _frames(kind: str, mode: str, size: tuple[int, int], **options: Any) -> bytes:
    more = [_noise(mode, size).transpose(Image.Transpose.ROTATE_180)]
    return _saved(_noise(mode, size), kind, save_all=True, append_images=more, **options)


IMAGES: dict[str, Callable[[tuple[int, int]], bytes]] = {
    "JPEG": lambda size: _saved(_noise("RGB", size), "JPEG"),
    "grey JPEG": lambda size: _saved(_noise("L", size), "JPEG"),
    "turned JPEG": _turned,
    "progressive JPEG": lambda size: _saved(
        _noise("RGB", size), "JPEG", progressive=True, subsampling=0
    ),
    "JPEG of four colours": lambda size: _saved(_noise("CMYK", size), "JPEG", progressive=True),
    "PNG": lambda size: _saved(_noise("RGB", size), "PNG"),
    "PNG with alpha": lambda size: _saved(_noise("RGBA", size), "PNG"),
    "grey PNG with alpha": lambda size: _saved(_noise("LA", size), "PNG"),
    "PNG of 16 bits": lambda size: _saved(Image.new("I;16", size, 999), "PNG"),
    "PNG with a palette": lambda size: _saved(
        _noise("RGB", size).quantize(16), "PNG", transparency=3
    ),
    "animated PNG": lambda size: _frames("PNG", "RGBA", size),
    "WebP": lambda size: _saved(_noise("RGB", size), "WEBP", method=0),
    "WebP with alpha": lambda size: _saved(_noise("RGBA", size), "WEBP", method=0),
    "lossless WebP": lambda size: _saved(_noise("RGBA", size), "WEBP", lossless=True, method=0),
    "animated WebP": lambda size: _frames("WEBP", "RGBA", size, method=0),
    "GIF": lambda size: _saved(_noise("RGB", size).quantize(16), "GIF"),
    "GIF with a background": lambda size: _saved(
        _noise("RGB", size).quantize(16), "GIF", transparency=3
    ),
    "animated GIF": lambda size: _frames("GIF", "L", size),
}
"""By what they are: a file with an image of that size."""

OTHERS: dict[str, bytes] = {
    "BMP": _saved(_noise("RGB", (64, 64)), "BMP"),
    "TIFF": _saved(_noise("RGB", (64, 64)), "TIFF"),
    "ICO": _saved(_noise("RGB", (64, 64)), "ICO"),
    "ICNS": _saved(_noise("RGB", (64, 64)), "ICNS"),
    "PPM": _saved(_noise("RGB", (64, 64)), "PPM"),
    "TGA": _saved(_noise("RGB", (64, 64)), "TGA"),
    "PCX": _saved(_noise("RGB", (64, 64)), "PCX"),
    "EPS": _saved(_noise("RGB", (64, 64)), "EPS"),
    "JPEG2000": b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(64),
    "PSD": b"8BPS\x00\x01"
    + bytes(6)
    + b"\x00\x03\x00\x00\x00\x40\x00\x00\x00\x40\x00\x08\x00\x03"
    + bytes(64),
}
"""Images of formats that are not for clients."""
