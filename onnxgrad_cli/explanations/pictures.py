"""Attributions as a picture: beside each sample, the sample in grey under the colours of what speaks for the score."""

from __future__ import annotations

from io import BytesIO
from math import ceil, sqrt
from typing import Any

import numpy as np

from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.errors import UsageError

TILE, MOST, GAP = 128, 64, 4
"""The least size of a sample in pixels, the most samples of a picture, and pixels between them."""

RED, BLUE = np.array([214.0, 39, 40]), np.array([31.0, 119, 180])
"""What speaks for a score, and against it."""


def draw(pictures: np.ndarray, heat: np.ndarray, smooth: bool, said: str) -> bytes:
    """Samples and their attributions, as a png.

    Args:
        pictures: the samples, (n, height, width) or (n, height, width, 3), of any range, which is stretched.
        heat: attributions, (n, h, w): those of each sample are drawn up to its largest magnitude.
        smooth: whether pixels of attributions run into each other where they are fewer.
        said: stands in the file as its description.

    Raises:
        UsageError: pillow is missing, or there are too many samples.
    """
    load_package("PIL.Image", "a .png file", "write .npz")
    from PIL import Image, PngImagePlugin

    if len(pictures) > MOST:
        raise UsageError(
            f"a picture holds {MOST} samples, not {len(pictures)}", "choose some with `sample`, or write .npz"
        )
    tiles = [_tile(Image, *each, smooth) for each in zip(pictures, heat, strict=True)]
    height, width = tiles[0].shape[:2]
    columns = max(ceil(sqrt(len(tiles) / 2)), 1)
    rows = ceil(len(tiles) / columns)
    sheet = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), 255, np.uint8)
    for number, tile in enumerate(tiles):
        top, left = number // columns * (height + GAP), number % columns * (width + GAP)
        sheet[top : top + height, left : left + width] = tile
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Software", "onnxgrad")
    notes.add_itxt("Description", said)
    stream = BytesIO()
    Image.fromarray(sheet).save(stream, "PNG", pnginfo=notes, optimize=True)
    return stream.getvalue()


def _tile(image: Any, picture: np.ndarray, heat: np.ndarray, smooth: bool) -> np.ndarray:
    """One sample, and to its right its attributions over it."""
    times = max(ceil(TILE / max(picture.shape[:2])), 1)
    size = picture.shape[1] * times, picture.shape[0] * times
    low, high = float(picture.min()), float(picture.max())
    bytes_ = np.uint8(255 * (picture - low) / (high - low)) if high > low else np.zeros(picture.shape, np.uint8)
    shown = image.fromarray(bytes_).resize(size, image.Resampling.NEAREST)
    grey = np.asarray(shown.convert("L"), np.float64)[..., None]
    largest = float(np.abs(heat).max())
    scaled = (heat / (largest or 1.0)).astype(np.float32)
    method = image.Resampling.BILINEAR if smooth else image.Resampling.NEAREST
    share = np.asarray(image.fromarray(scaled).resize(size, method), np.float64)[..., None]
    color = np.where(share > 0, RED, BLUE)
    over = (1 - np.abs(share)) * (55 + grey * 200 / 255) + np.abs(share) * color
    beside = np.full((size[1], GAP, 3), 255, np.uint8)
    return np.concatenate([np.asarray(shown.convert("RGB")), beside, np.uint8(over.round())], 1)
