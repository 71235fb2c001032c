"""Folders of pictures: cut as torchvision cuts them, in the model's layout, and never a stranger's trap."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, TypeProto

from onnxgrad_cli.data import Data, SampleOptions, open_data
from onnxgrad_cli.data.preprocessing import Preprocessing
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.metadata import Term
from tests.facts import raises, raises_as

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
FLOAT, UINT8, INT64 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT64
random = np.random.default_rng(0)


def term(output: str = "logits") -> Term:
    return Term("cross-entropy", output, "y", 1.0, 10, -100, 1)


def ports(*dims: int | str, kind: int = FLOAT) -> dict[str, TypeProto]:
    return {"x": tensor_type(kind, ["n", *dims]), "y": tensor_type(INT64, ["n"])}


def picture(height: int = 12, width: int = 20, mode: str = "RGB") -> Any:
    depth = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    return Image.fromarray(random.integers(0, 256, (height, width, *depth), np.uint8), mode)


def save(folder: Path, *names: str, made: Callable[[], Any] = picture) -> dict[str, Any]:
    found = {}
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        found[name] = made()
        found[name].save(folder / name)
    return found


def opened(folder: Path, inputs: dict[str, TypeProto], **options: Any) -> Data:
    return open_data(folder, inputs, terms=[term()], samples=SampleOptions(**options))


@pytest.mark.parametrize(
    ("dims", "mode", "order"),
    [
        ((3, 8, 8), "RGB", (2, 0, 1)),
        ((8, 8, 3), "RGB", (0, 1, 2)),
        ((1, 8, 8), "L", None),
        ((8, 8, 1), "L", None),
        ((8, 8), "L", None),
        ((4, 8, 8), "RGBA", (2, 0, 1)),
    ],
)
def test_the_layout_is_found_from_the_shape(tmp_path: Path, dims: Any, mode: str, order: Any) -> None:
    made = save(tmp_path, "a/1.png", "b/1.png", made=lambda: picture(8, 8, mode))
    batch = opened(tmp_path, ports(*dims)).batch(np.arange(2))
    wanted = np.stack([np.asarray(each) for each in made.values()]).astype(np.float32) / 255
    wanted = wanted.reshape(2, *dims) if order is None else wanted.transpose(0, *(axis + 1 for axis in order))
    np.testing.assert_array_equal(batch["x"], wanted)
    assert batch["y"].tolist() == [0, 1]


def test_the_shorter_side_fits_and_the_middle_is_taken_unless_it_is_stretched(tmp_path: Path) -> None:
    """Against torchvision's Resize(6) and CenterCrop(6), which are these two of pillow."""
    made = save(tmp_path, "a/1.png")["a/1.png"]
    middle = made.resize((10, 6), Image.Resampling.BILINEAR).crop((2, 0, 8, 6))
    whole = made.resize((6, 6), Image.Resampling.BILINEAR)
    for options, wanted in (({}, middle), ({"resize": "stretch"}, whole)):
        found = opened(tmp_path, ports(6, 6, 3, kind=UINT8), **options).batch(np.arange(1))["x"][0]
        np.testing.assert_array_equal(found, np.asarray(wanted))


def test_a_camera_that_was_turned_and_a_palette(tmp_path: Path) -> None:
    plain, exif = picture(10, 6), Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    (tmp_path / "a").mkdir()
    plain.save(tmp_path / "a" / "1.png", exif=exif)
    plain.convert("P").save(tmp_path / "a" / "2.png")
    found = opened(tmp_path, ports(6, 10, 3, kind=UINT8)).batch(np.arange(1))["x"][0]
    np.testing.assert_array_equal(found, np.rot90(np.asarray(plain), -1))


def test_the_digest_follows_the_files_and_how_they_are_cut(tmp_path: Path) -> None:
    save(tmp_path, "a/1.png", "b/1.png")
    first = opened(tmp_path, ports(3, 8, 8)).digest()
    assert first == opened(tmp_path, ports(3, 8, 8)).digest()
    assert first != opened(tmp_path, ports(3, 8, 8), resize="stretch").digest()
    save(tmp_path, "b/1.png")
    assert first != opened(tmp_path, ports(3, 8, 8)).digest()


def bomb(width: int, height: int) -> bytes:
    """A small png that declares many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        framed = kind + content
        return len(content).to_bytes(4, "big") + framed + zlib.crc32(framed).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    data = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


def encoded(made: Any, form: str = "PNG") -> bytes:
    stream = BytesIO()
    made.save(stream, form)
    return stream.getvalue()


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "a bomb": (lambda: bomb(12_000, 12_000), "limit"),
    "a larger one": (lambda: bomb(60_000, 60_000), "limit|decompression bomb"),
    "no picture": (lambda: b"not a picture", "cannot identify"),
    "nothing": (lambda: b"", "cannot identify"),
    "cut off": (lambda: encoded(picture())[:300], "truncated|broken|cannot|Truncated"),
    "a gif that is called png": (lambda: encoded(picture().convert("P"), "GIF"), "cannot identify"),
    "16 bits": (lambda: encoded(Image.fromarray(np.zeros((8, 8), np.uint16))), "more than 8 bits per channel"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_strangers_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    save(tmp_path, "a/1.png")
    content, said = HOSTILE[case]
    (tmp_path / "a" / "2.png").write_bytes(content())
    with pytest.raises(OnnxgradError, match=rf"2\.png' can't be read as a picture: .*({said})"):
        opened(tmp_path, ports(3, 8, 8))


def test_links_lead_nowhere_else(tmp_path: Path) -> None:
    save(tmp_path / "secret", "1.png")
    save(tmp_path / "data", "a/1.png")
    link = tmp_path / "data" / "a" / "2.png"
    link.symlink_to(tmp_path / "data" / "a" / "1.png")
    assert len(opened(tmp_path / "data", ports(3, 8, 8))) == 2
    link.unlink()
    link.symlink_to(tmp_path / "secret" / "1.png")
    with raises(UsageError, "wrong_value", "2.png", "data"):
        opened(tmp_path / "data", ports(3, 8, 8))
    link.unlink()
    (tmp_path / "data" / "b").symlink_to(tmp_path / "secret", target_is_directory=True)
    with raises(UsageError, "wrong_type", "b"):
        opened(tmp_path / "data", ports(3, 8, 8))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    save(tmp_path, "a/1.png")
    os.mkfifo(tmp_path / "a" / "2.png")
    with pytest.raises(OnnxgradError, match=r"2\.png'.* a device"):
        opened(tmp_path, ports(3, 8, 8))


@pytest.mark.parametrize(
    ("files", "inputs", "said"),
    [
        (["1.png"], ports(3, 8, 8), "is not in a class folder"),
        (["train/a/1.png", "val/a/1.png"], ports(3, 8, 8), "are not classes but splits: train, val"),
        (["0/1.png", "00/1.png", "1/1.png"], ports(3, 8, 8), "0' and '.*00' are the same class, 0"),
        (["a/1.png"], ports(3, "h", "w"), "does not fix the size of pictures"),
        (["a/1.png"], ports(3, 8, 3), ("ambiguous", "3", "8", "3")),
        (["a/1.png"], ports(7), "can't take pictures"),
        (["a/1.png"], ports(2, 8, 8), "can't take pictures"),
        (["a/1.png"], {**ports(3, 8, 8), "z": ports(7)["x"]}, "the model takes x, z"),
        (["a/1.png"], {**ports(3, 8, 8), "y": ports(7)["x"]}, "the label 'y' is float"),
    ],
)
def test_what_does_not_fit_is_told(
    tmp_path: Path, files: list[str], inputs: dict[str, TypeProto], said: str | tuple[str, ...]
) -> None:
    save(tmp_path, *files)
    with raises_as(UsageError, said):
        opened(tmp_path, inputs)


def test_what_a_model_says_of_pictures_holds(tmp_path: Path) -> None:
    save(tmp_path, "a/1.png")
    known = Preprocessing(resize="stretch")
    data = open_data(tmp_path, ports(6, 6, 3, kind=UINT8), terms=[term()], known=known)
    whole = Image.open(tmp_path / "a" / "1.png").resize((6, 6), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(data.batch(np.arange(1))["x"][0], np.asarray(whole))
