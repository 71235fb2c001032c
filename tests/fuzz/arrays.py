"""Data sets in each format that the command reads, whole or damaged in what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
from onnx import numpy_helper

from tests.fuzz import hostile

Arrays = dict[str, np.ndarray]


def good() -> Arrays:
    """Twelve samples that linear_regression.onnx can be trained on."""
    x = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
    return {"x": x, "label": x[:, :1] * 2}


def damage(arrays: Arrays, rng: Random) -> str:
    """Change what the arrays are; says how."""
    name, how = rng.choice(sorted(arrays)), rng.choice(sorted(_DAMAGES))
    try:
        with np.errstate(all="ignore"):
            changed = _DAMAGES[how](arrays[name], rng)
    except Exception as error:  # it was changed before to what can't be changed so
        return f"({how} {name}: {error})"
    del arrays[name]
    key = hostile.string(rng) if how == "rename" else name
    if changed is not None:
        arrays[key] = changed
    if how == "another":
        arrays[hostile.string(rng) or "other"] = np.ones(3)
    return f"{how} {name}"


def _with(x: np.ndarray, value: float) -> np.ndarray:
    x = np.array(x)
    x.flat[x.size // 2] = value
    return x


_DAMAGES: dict[str, Callable[[np.ndarray, Random], np.ndarray | None]] = {
    "lose": lambda x, rng: None,
    "rename": lambda x, rng: x,
    "another": lambda x, rng: x,
    "cast": lambda x,
    rng: x.astype(rng.choice(("f2", "f8", "i8", "u1", "?", "c8", "U8", "S4", "M8[s]", "O", ">f4", "i1", "u8"))),
    "not finite": lambda x, rng: _with(x, rng.choice((float("nan"), float("inf"), 3e38, -3e38))),
    "empty": lambda x, rng: x[:0],
    "short": lambda x, rng: x[: rng.randrange(1, 11)],
    "no axis": lambda x, rng: np.asarray(x.flat[0]),
    "wide": lambda x, rng: np.concatenate([x, x], 1),
    "narrow": lambda x, rng: x[:, :0],
    "flat": lambda x, rng: x.reshape(-1),
    "deep": lambda x, rng: x.reshape(x.shape + (1,) * rng.randrange(1, 20)),
    "fortran": lambda x, rng: np.asfortranarray(x),
    "record": lambda x, rng: np.zeros(12, [("a", "f4"), ("b", "i4", (2,))]),
    "lists": lambda x, rng: np.array([[1.0], [1.0, 2.0], None] * 4, dtype=object),
    "many": lambda x, rng: np.repeat(x, 50, 0),
}  # fmt: skip


# -- formats: each writes the arrays into a folder, and returns what --data is --------------------------------------


def npz(arrays: Arrays, folder: Path) -> str:
    (np.savez_compressed if len(arrays) % 2 else np.savez)(folder / "data.npz", **arrays)
    return "data.npz"


def csv(arrays: Arrays, folder: Path) -> str:
    columns = {}
    for name, x in arrays.items():
        flat = x.reshape(len(x), -1) if x.ndim else x.reshape(1, 1)
        columns.update({name if flat.shape[1] == 1 else f"{name}[{i}]": flat[:, i] for i in range(flat.shape[1])})
    longest = max((len(c) for c in columns.values()), default=0)
    rows = [",".join(str(c[i]) if i < len(c) else "" for c in columns.values()) for i in range(longest)]
    (folder / "data.csv").write_text("\n".join([",".join(columns), *rows]) + "\n", "utf-8", "surrogatepass")
    return "data.csv"


def parquet(arrays: Arrays, folder: Path) -> str:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({n: list(x.reshape(len(x), -1)) if x.ndim > 1 else x for n, x in arrays.items()})
    pyarrow.parquet.write_table(table, folder / "data.parquet")
    return "data.parquet"


def safetensors(arrays: Arrays, folder: Path) -> str:
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, folder / "data.safetensors")
    return "data.safetensors"


def npy_folder(arrays: Arrays, folder: Path) -> str:
    (folder / "data").mkdir()
    for name, x in arrays.items():
        np.save(folder / "data" / f"{name}.npy", x)
    return "data"


def onnx_test_set(arrays: Arrays, folder: Path) -> str:
    (folder / "test_data_set_0").mkdir()
    for i, (name, x) in enumerate(arrays.items()):
        proto = numpy_helper.from_array(x, name).SerializeToString()
        (folder / "test_data_set_0" / f"{'output' if name == 'label' else 'input'}_{i}.pb").write_bytes(proto)
    return "test_data_set_0"


FORMATS: tuple[Callable[[Arrays, Path], str], ...] = (npz, csv, parquet, safetensors, npy_folder, onnx_test_set)


def header_lie(data: bytes, rng: Random) -> bytes:
    """The bytes of a .npy or .npz file whose header says other sizes, or another type."""
    old, new = rng.choice(
        (
            (b"(12, 3)", b"(10**11,)"), (b"(12, 3)", b"(9**9, 9**9)"), (b"(12, 3)", b"(-1, 3)"),
            (b"(12, 3)", b"(1" + b"0" * 12 + b", 3)"),
            (b"'<f4'", b"'|O' "), (b"'<f4'", b"'<f9'"), (b"False", b"True "), (b"{'descr'", b"{'descR'"),
            (b"NUMPY\x01", b"NUMPY\x09"),
        )
    )  # fmt: skip
    return data.replace(old, new)
