"""Draw attributions as a picture: each sample, and next to it the sample in grey with its attributions in color."""

from __future__ import annotations

from io import BytesIO
from math import ceil, sqrt
from typing import Any

import numpy as np

from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.errors import wrong_value

TILE, MAX_SAMPLES, GAP = 128, 64, 4
"""Smallest size of a sample in pixels; largest number of samples in a picture; pixels between samples."""

RED, BLUE = np.array([214.0, 39, 40]), np.array([31.0, 119, 180])
"""Colors of positive and negative attributions."""


def draw(pictures: np.ndarray, heat: np.ndarray, smooth: bool, said: str) -> bytes:
    """Return a PNG of samples and their attributions.

    Args:
        pictures: the samples, (n, height, width) or (n, height, width, 3). The values of each sample are scaled to the
            full range of brightness.
        heat: the attributions, (n, h, w). In each sample, the largest magnitude gets the full color.
        smooth: True to interpolate attributions that have fewer pixels than the sample.
        said: a description that is stored in the file.

    Raises:
        UsageError: pillow is not installed, or there are more than `MAX_SAMPLES` samples.
    """
    load_package("PIL.Image", "a .png file", "write .npz")
    from PIL import Image, PngImagePlugin

    if len(pictures) > MAX_SAMPLES:
        message = f"a picture can show at most {MAX_SAMPLES} samples, not {len(pictures)}"
        raise wrong_value(message, "choose fewer samples with `sample`, or write .npz")
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
    """Return an image of a sample, with the sample in grey and its attributions in color to the right of it."""
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
