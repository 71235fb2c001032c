"""What else a stranger may give: what a model says of itself, adapters, tokenizers, pictures, start values; and outputs
that lead elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from tests.fuzz import campaign, case, hostile, raw
from tests.fuzz.json_values import change, text_of
from tests.fuzz.made import run

MLP, REGRESSION = Path("sample_models/digits_mlp.onnx"), Path("sample_models/linear_regression.onnx")
CLASSES = ["--loss", "cross-entropy", "--label", "y"]
TRAINED = ["--data", "d.npz", "--epochs", "1", "--force"]


@cache
def made() -> Mapping[str, bytes]:
    """Models that say something of themselves, adapters in each form and values beside a model, by file name."""
    from tests.adapters.test_formats import network

    with TemporaryDirectory() as top:
        place = Path(top)
        rng = np.random.default_rng(0)
        shutil.copyfile(MLP, place / "mlp.onnx")
        onnx.save(network(), place / "net.onnx")
        x = rng.standard_normal((12, 6)).astype(np.float32)
        np.savez(place / "net.npz", x=x, label=x[:, :5])
        digits = rng.random((12, 1, 8, 8)).astype(np.float32)
        np.savez(place / "d.npz", x=digits, y=np.array([f"c{i % 10}" for i in range(12)], object).astype(str))
        (place / "d.jsonl").write_text(
            "".join(json.dumps({"x": row.tolist(), "y": f"c{i % 10}"}) + "\n" for i, row in enumerate(digits))
        )
        lora = ["train", "net.onnx", "--data", "net.npz", "--epochs", "1", "--lora", "2", "--lora-target", "*"]
        derive = ["derive", "net.onnx", "--no-verify", "-o"]
        quiet = ["--no-report", "--no-verify"]
        for words in (
            ["train", "mlp.onnx", *CLASSES, "--data", "d.jsonl", "--epochs", "1", "--normalize", "0.5/0.25",
             "-o", "trained.onnx", "--run", "run"],
            ["build", "mlp.onnx", *CLASSES, "--optimizer", "adam", "--ema", "0.9", *quiet, "-o", "adam.onnx"],
            ["build", "mlp.onnx", *CLASSES, "--optimizer", "adam", "--weights", "inputs", *quiet, "-o", "bare.onnx"],
            ["build", "net.onnx", "--lora", "2", "--lora-target", "*", *quiet, "-o", "lora.onnx"],
            [*derive, "jacobian.onnx", "--kind", "jacobian"],
            [*derive, "vjp.onnx"],
            [*derive, "hvp.onnx", "--kind", "hvp"],
            [*derive, "inner.onnx", "--wrt", "t"],
            [*derive, "score.onnx", "--class", "label", "--option", "keep-outputs"],
            [*derive, "samples.onnx", "--per-sample"],
            [*lora, "-o", "o1.onnx", "--adapter", "peft"],
            [*lora, "-o", "o2.onnx", "--adapter", "a.onnx_adapter", "--force"],
            [*lora, "-o", "o3.onnx", "--adapter", "a.safetensors", "--force"],
        ):  # fmt: skip
            run(words, place)
        return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def _data(place: Path) -> None:
    for name in ("d.npz", "net.npz"):
        (place / "in" / name).write_bytes(made()[name])


def _played(words: Sequence[str], place: Path, story: str, written: Sequence[str] = ()) -> campaign.Played:
    shown = " ".join(words)
    return campaign.Played(case.run(words, place, written), f"{story}\ncd out; onnxgrad {shown}")


# -- what a model says of itself -----------------------------------------------------------------------------------

NAMES = (
    "{0: 'a', 1: 'b'}", "{[]: 1}", "{{1}}", "{0: 0x" + "f" * 5000 + "}", "(" * 10_000, "-" * 10_000 + "1", "[1, ...]",
    "['a'] * 10", "__import__('os')", "{0: '\\ud800'}", "{0.0: 'a'}", "'\\d'", "[b'\\xff']", "{True: 1, 0: 2}", "None",
)  # fmt: skip

OF_MODELS: dict[str, tuple[tuple[str, ...], ...]] = {
    "trained.onnx": (
        ("predict", "--data", "../in/d.npz", "-o", "p.csv"), ("predict", "--data", "../in/d.npz", "-o", "p.npz"),
        ("evaluate", *CLASSES, "--data", "../in/d.npz"), ("explain", "--data", "../in/d.npz", "-o", "e.npz"),
        ("explain", "--data", "../in/d.npz", "-o", "e.html", "--method", "integrated-gradients", "--steps", "2"),
        ("attack", "--data", "../in/d.npz", "-o", "p.npz", "--label", "y"), ("inspect",),
        ("train", *CLASSES, "--data", "../in/d.npz", "--epochs", "1", "-o", "out.onnx"),
        ("build", *CLASSES, "-o", "out.onnx"), ("view", "-o", "v.html"),
        ("derive", "-o", "out.onnx", "--class", "argmax"),
    ),
    "adam.onnx": (
        ("pack", "--data", "../in/mlp.npz", "-o", "page"), ("check",), ("check", "--data", "../in/mlp.npz"),
        ("check", "--original", "../in/mlp.onnx"), ("view", "-o", "v.html"), ("inspect",), ("expand", "-o", "out.onnx"),
        ("predict", "--data", "../in/mlp.npz"),
    ),
    "bare.onnx": (("pack", "--data", "../in/mlp.npz", "-o", "page"), ("check",), ("view", "-o", "v.html")),
    "lora.onnx": (("check",), ("view", "-o", "v.html"), ("inspect",)),
    "jacobian.onnx": (("check",), ("check", "--original", "../in/net.onnx"), ("view", "-o", "v.html"), ("inspect",)),
    "vjp.onnx": (("check",), ("check", "--original", "../in/net.onnx")),
    "hvp.onnx": (("check", "--original", "../in/net.onnx"),),
    "inner.onnx": (("check",), ("check", "--original", "../in/net.onnx")),
    "score.onnx": (("check",), ("check", "--original", "../in/net.onnx")),
    "samples.onnx": (("check",), ("check", "--original", "../in/net.onnx")),
}  # fmt: skip
"""Models of ours -> what is done with them; `predict` and the like must believe nothing that does not fit."""


def metadata(rng: Random, place: Path) -> campaign.Played:
    """A model of ours of which something else is said than we wrote."""
    name = rng.choice(sorted(OF_MODELS))
    model = onnx.ModelProto.FromString(made()[name])
    said = {entry.key: entry for entry in model.metadata_props}
    key = rng.choice(sorted(key for key in said if key != "onnxgrad.version"))
    if name == "trained.onnx" and rng.random() < 0.2:
        del model.metadata_props[:]
        text = rng.choice(NAMES)
        model.metadata_props.add(key="names", value=text)
        story = f"names = {text[:60]}"
    else:
        story = _lied(said[key], rng)
    if rng.random() < 0.1:
        story += ", twice"
        model.metadata_props.add(key=key, value=rng.choice(("{}", "[]", "null")))
    (place / "in" / "model.onnx").write_bytes(hostile.with_broken_text(model.SerializeToString()))
    _data(place)
    (place / "in" / "mlp.onnx").write_bytes(made()["mlp.onnx"])
    (place / "in" / "net.onnx").write_bytes(made()["net.onnx"])
    x = np.random.default_rng(0).random((12, 1, 8, 8)).astype(np.float32)
    np.savez(place / "in" / "mlp.npz", x=x, y=np.arange(12) % 10)
    for suffix in (".json", ".bin"):
        (place / "in" / f"model{suffix}").write_bytes(made()[f"bare{suffix}"])
    command, *words = rng.choice(OF_MODELS[name])
    words = [command, "../in/model.onnx", *words, *(["--json"] * (rng.random() < 0.15))]
    return _played(words, place, f"{name}: {key}: {story}")


def _lied(entry: Any, rng: Random) -> str:
    """Change something in an entry that holds JSON; says what."""
    if rng.random() < 0.15:
        entry.value = rng.choice(("", "null", "[]", "{}", "1", '"a"', "[" * 5000, "{", hostile.string(rng), "NaN"))
        return "other"
    value = json.loads(entry.value)
    story = ", ".join(change(value, rng) for _ in range(rng.choice((1, 1, 1, 2, 3))) if value)
    entry.value = text_of(value)
    return story


def values_beside(rng: Random, place: Path) -> campaign.Played:
    """Bytes of a training elsewhere whose description lies."""
    said = json.loads(made()["bare.json"])
    story = ", ".join(change(said, rng) for _ in range(rng.choice((1, 1, 2))))
    if rng.random() < 0.2:
        size = rng.choice((10**10, 2**40, 10**30, -1))
        said["bytes"], story = size, f"bytes = {size}"
    (place / "in" / "w.json").write_text(text_of(said), "utf-8")
    (place / "in" / "w.bin").write_bytes(made()["bare.bin"])
    (place / "in" / "mlp.onnx").write_bytes(made()["mlp.onnx"])
    words = ["export", rng.choice(("../in/w.bin", "../in/w.json")), "--model", "../in/mlp.onnx", "-o", "out.onnx"]
    return _played(words, place, story, ["out.onnx"])


def run_folder(rng: Random, place: Path) -> campaign.Played:
    """The folder of a run whose preprocessing.json lies."""
    folder = place / "out" / "run"
    folder.mkdir()
    for name, content in made().items():
        if name.startswith("run/") and name.count("/") == 1:
            (folder / name[4:]).write_bytes(content)
    file = folder / "preprocessing.json"
    if rng.random() < 0.3:
        content, story = raw.mutate(file.read_bytes(), rng, b'{"": null}')
        file.write_bytes(content)
    else:
        said = json.loads(file.read_text())
        key = rng.choice(sorted(said))
        inner = json.loads(said[key])
        story = change(inner, rng)
        said[key] = text_of(inner)
        file.write_text(text_of(said), "utf-8")
    (place / "in" / "mlp.onnx").write_bytes(made()["mlp.onnx"])
    (place / "in" / "d.jsonl").write_bytes(made()["d.jsonl"])
    resumed = ["train", "../in/mlp.onnx", *CLASSES, "--data", "../in/d.jsonl", "--epochs", "2", "--normalize",
               "0.5/0.25", "--run", "run", "--resume", "-o", "out.onnx"]  # fmt: skip
    words = rng.choice((["export", "run", "--model", "../in/mlp.onnx", "-o", "out.onnx"], resumed))
    return _played(words, place, story, ["out.onnx"])


# -- adapters ------------------------------------------------------------------------------------------------------


def adapter(rng: Random, place: Path) -> campaign.Played:
    """An adapter of PEFT or of onnxruntime that is damaged or lies."""
    (place / "in" / "net.onnx").write_bytes(made()["net.onnx"])
    if rng.random() < 0.4:
        content, story = raw.mutate(made()["a.onnx_adapter"], rng, made()["net.onnx"])
        source = "../in/a.onnx_adapter"
        (place / "in" / "a.onnx_adapter").write_bytes(content)
    else:
        source, story = "../in/peft", _peft(rng, place / "in" / "peft")
    words = ["export", source, "--model", "../in/net.onnx", "-o", "out.onnx"]
    words += rng.choice(
        ([], [], ["--adaptable"], ["--adapter", "b.onnx_adapter"], ["--adapter", "again/"], ["--merge"])
    )
    return _played(words, place, story, ["out.onnx"])


def _peft(rng: Random, folder: Path) -> str:
    """A folder of PEFT in which something lies; says what."""
    folder.mkdir()
    files = {name: made()[f"peft/{name}"] for name in ("adapter_config.json", "adapter_model.safetensors")}
    how = rng.choice(("config", "config", "header", "bytes"))
    if how == "config":
        said = json.loads(files["adapter_config.json"])
        said["rank_pattern"], said["alpha_pattern"] = {"net.0": 2}, {"net.0": 2.0}
        story = ", ".join(change(said, rng) for _ in range(rng.choice((1, 1, 2))))
        files["adapter_config.json"] = text_of(said).encode("utf-8")
    elif how == "header":
        data = files["adapter_model.safetensors"]
        size = int.from_bytes(data[:8], "little")
        said = json.loads(data[8 : 8 + size])
        story = change(said, rng)
        head = text_of(said).encode("utf-8")
        files["adapter_model.safetensors"] = len(head).to_bytes(8, "little") + head + data[8 + size :]
    else:
        name = rng.choice(sorted(files))
        files[name], story = raw.mutate(files[name], rng, made()["net.onnx"])
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return f"{how}: {story}"


# -- data of strangers ---------------------------------------------------------------------------------------------

CELLS = (
    "NaN", "Infinity", "1e400", "10" * 30, "9" * 5000, "9" * 400, "-0", "true", "null", '"1"', '""', "[]", "{}", "[[]]",
    '["a"]', "[" * 3000 + "]" * 3000, "[1, [2]]", "[1, 2, 3, 4]", '"\\ud800"', '"\\u0000"', "[null]", "[true]", "1.5",
    '{"a": 1}', "[" * 70 + "1" + "]" * 70, "18446744073709551615", "[1e308, 1e308, 1e308]",
    "[0.1, 2, 9007199254740993]",
)  # fmt: skip


def lines(rng: Random, place: Path) -> campaign.Played:
    """JSON lines of which some cells are what no model is fed."""
    rows = [{"x": f"[{i}, 0.5, 1]", "label": f"[{i}]"} for i in range(12)]
    story = ""
    for _ in range(rng.choice((1, 1, 2, 12))):
        at, key = rng.randrange(len(rows)), rng.choice(("x", "label"))
        rows[at][key] = rng.choice(CELLS)
        story += f"{at} {key} {rows[at][key][:30]}, "
    if rng.random() < 0.1:
        rows[0] = {key: value.replace("[", "").replace("]", "") or "1" for key, value in rows[0].items()}
    if rng.random() < 0.2:
        odd = json.dumps(hostile.string(rng))[1:-1]
        rows = [{**row, odd: "1"} for row in rows]
        story += f"column {odd[:40]}"
    ends = rng.choice(("\n", "\n", "\r\n", "\n\n"))
    text = ends.join("{" + ", ".join(f'"{key}": {value}' for key, value in row.items()) + "}" for row in rows)
    (place / "in" / "data.jsonl").write_text(text + ends, "utf-8")
    shutil.copyfile(REGRESSION, place / "in" / "model.onnx")
    words = ["train", "../in/model.onnx", "--data", "../in/data.jsonl", "--epochs", "1", "--batch-size", "4", "-o",
             "out.onnx", *rng.choice(([], ["--val", "0.25"]))]  # fmt: skip
    return _played(words, place, story, ["out.onnx"])


def pictures(rng: Random, place: Path) -> campaign.Played:
    """A folder of pictures, some of which are damaged, or lie in folders of names that nobody should give."""
    from PIL import Image

    shutil.copyfile(MLP, place / "in" / "model.onnx")
    folder = place / "in" / "pictures"
    story, modes = [], ("L", "RGB", "RGBA", "P", "1", "CMYK", "I;16", "LA", "F", "YCbCr", "HSV")
    for label in range(3):
        name = str(label)
        if rng.random() < 0.2:
            name = hostile.string(rng).replace("/", "").replace("\x00", "")[:80].strip(".") or name
        for number in range(2):
            file = folder / name / f"{number}.{rng.choice(('png', 'jpg', 'PNG'))}"
            file.parent.mkdir(parents=True, exist_ok=True)
            mode, form = "L", "PNG"
            if rng.random() < 0.2:
                mode, form = rng.choice(modes), rng.choice(("PNG", "PNG", "JPEG", "GIF", "TIFF"))
            stream = BytesIO()
            size = rng.choice(((8, 8), (8, 8), (1, 1), (1, 5000), (9, 7)))
            try:
                Image.new(mode, size).save(stream, form, **({"save_all": True} if rng.random() < 0.1 else {}))
            except (OSError, KeyError, ValueError):
                mode = form = "bytes"
                stream = BytesIO(rng.randbytes(50))
            content = stream.getvalue()
            if rng.random() < 0.08:
                content, how = raw.mutate(content, rng, MLP.read_bytes())
                story.append(how)
            story.append(f"{name[:20]}/{file.name}: {mode} {form} {size}")
            file.write_bytes(content)
    words = ["train", "../in/model.onnx", *CLASSES, "--data", "../in/pictures", "--epochs", "1", "-o", "out.onnx",
             *rng.choice(([], ["--val", "0.5"], ["--resize", "stretch"], ["--normalize", "auto"]))]  # fmt: skip
    return _played(words, place, ", ".join(story), ["out.onnx"])


def arrow(rng: Random, place: Path) -> campaign.Played:
    """A folder of Hugging Face's form whose files are damaged or lie."""
    import pyarrow

    folder = place / "in" / "dataset"
    folder.mkdir()
    columns = {name: list(x) if rng.random() < 0.7 else list(map(str, x)) for name, x in _regression().items()}
    if rng.random() < 0.2:
        columns[hostile.string(rng)] = [{"bytes": b"x", "path": "/etc/passwd"}] * 12
    table = pyarrow.table(columns)
    file = str(folder / "data.arrow")
    with pyarrow.OSFile(file, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    files: dict[str, Any] = {
        "state.json": {"_data_files": [{"filename": "data.arrow"}], "_format_type": None},
        "dataset_info.json": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}},
    }
    how = rng.choice(("bytes", "bytes", *files))
    story = ""
    for name, said in files.items():
        story += change(said, rng) if name == how else ""
        (folder / name).write_text(text_of(said), "utf-8")
    if how == "bytes":
        content = (folder / "data.arrow").read_bytes()
        if rng.random() < 0.4:
            content, story = _elsewhere(content, rng)
        for _ in range(0 if story else rng.choice((1, 1, 2, 5))):
            content, done = raw.mutate(content, rng, MLP.read_bytes())
            story += f"{done}, "
        (folder / "data.arrow").write_bytes(content)
    shutil.copyfile(REGRESSION, place / "in" / "model.onnx")
    words = [
        "train",
        "../in/model.onnx",
        "--data",
        "../in/dataset",
        "--epochs",
        "1",
        "--batch-size",
        "4",
        "-o",
        "out.onnx",
    ]
    return _played(words, place, f"{how}: {story}", ["out.onnx"])


def _elsewhere(content: bytes, rng: Random) -> tuple[bytes, str]:
    """An Arrow file one of whose offsets leads elsewhere: they are numbers that grow."""
    numbers = np.frombuffer(content[: len(content) // 4 * 4], "<i4").copy()
    rising = [i for i in range(1, len(numbers) - 1) if 0 <= numbers[i - 1] < numbers[i] < numbers[i + 1] < 10_000]
    where = rng.choice(rising)
    numbers[where] = hostile.integer(rng, -(2**31), 2**31 - 1)
    return numbers.tobytes() + content[len(content) // 4 * 4 :], f"number {where} is {numbers[where]}"


TEMPLATES = (
    "{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}", "{{ 'a' * 10**9 }}", "{{ messages|tojson }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}", "{{ range(10**9)|list|length }}", "{{ ''|center(10**10) }}",
    "{{ cycler.__init__.__globals__ }}", "{% set x = [1] %}{{ x.append(x) }}{{ x|tojson }}", "{{ messages|pprint }}",
    "{{ lipsum(10**6) }}", "{{ '%s' % messages }}", "{{ '{:>9999999999}'.format(1) }}", "{{ 'a'|indent(10**10) }}",
    "{{ strftime_now('%' * 100000) }}", "{{ strftime_now('\x00\ud7ff%Q') }}", "{{ range(99999)|join|wordwrap(1) }}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "{{ raise_exception(messages) }}", "{{ [] < 1 }}",
    "{{ '\x1b]0;t\x07' }}", "{{ 1 / 0 }}", "{{ undefined_thing.x }}", "{{ (1, 2)|random }}", "{{ 10**10**10 }}",
    "{% for a in range(99999) %}{{ range(99999)|list|sort|unique|list|length }}{% endfor %}",
)  # fmt: skip


def tokenizer(rng: Random, place: Path) -> campaign.Played:
    """Text by a tokenizer, its settings or its template of a stranger."""
    folder = place / "in" / "tok"
    folder.mkdir()
    for name, content in _tokenizer().items():
        (folder / name).write_bytes(content)
    how = rng.choice(("tokenizer", "tokenizer", "settings", "template", "text", "bytes"))
    texts = [{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b a"}]}] * 6
    if how in ("tokenizer", "settings"):
        file = folder / ("tokenizer.json" if how == "tokenizer" else "tokenizer_config.json")
        said = json.loads(file.read_text())
        story = ", ".join(change(said, rng) for _ in range(rng.choice((1, 1, 2))))
        file.write_text(text_of(said), "utf-8")
    elif how == "template":
        story = rng.choice(TEMPLATES)
        (folder / "chat_template.jinja").write_text(story, "utf-8", "surrogatepass")
    elif how == "bytes":
        file = folder / rng.choice(("tokenizer.json", "tokenizer_config.json"))
        content, story = raw.mutate(file.read_bytes(), rng, MLP.read_bytes())
        file.write_bytes(content)
    else:
        story = change(texts, rng)
    (place / "in" / "text.jsonl").write_text("".join(text_of(each) + "\n" for each in texts), "utf-8")
    (place / "in" / "model.onnx").write_bytes(_language_model())
    words = ["train", "../in/model.onnx", "--loss", "causal-lm", "--label", "label", "--data", "../in/text.jsonl",
             "--tokenizer", "../in/tok", "--epochs", "1", "-o", "out.onnx"]  # fmt: skip
    return _played(words, place, f"{how}: {story}", ["out.onnx"])


@cache
def _tokenizer() -> Mapping[str, bytes]:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "<s>", "</s>", "a", "b", "user", "assistant", "\n"]
    found = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<pad>"))
    found.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    found.add_special_tokens(words[:3])
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    settings = {"eos_token": {"content": "</s>"}, "pad_token": "<pad>", "chat_template": template}
    return {"tokenizer.json": found.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}


@cache
def _language_model() -> bytes:
    text = """<ir_version: 8, opset_import: ["": 17]> g (int64[n, m] input_ids) => (float[n, m, 9] logits)
    { e = Gather(table, input_ids) logits = MatMul(e, head) }"""
    model = onnx.parser.parse_model(text)
    for name, shape in {"table": (9, 4), "head": (4, 9)}.items():
        array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    data: bytes = model.SerializeToString()
    return data


# -- outputs -------------------------------------------------------------------------------------------------------

PLACES: Mapping[str, Callable[[Path], Any]] = {
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/full"),
    "nothing": lambda path: path.symlink_to("/dev/null"),
    "dangling": lambda path: path.symlink_to("nowhere/at/all"),
    "input": lambda path: path.symlink_to("../in/model.onnx"),
    "hard": lambda path: os.link(path.parent.parent / "in" / "model.onnx", path),
    "stranger's": lambda path: path.write_bytes(b"mine"),
    "dangling beside": lambda path: path.symlink_to(f"beside{path.suffix}"),
}


def outputs(rng: Random, place: Path) -> campaign.Played:
    """An output that is there already, and is no plain file of ours."""
    shutil.copyfile(REGRESSION, place / "in" / "model.onnx")
    np.savez(place / "in" / "d.npz", **_regression())
    command, name, words = rng.choice(
        (
            ("build", "out.onnx", []), ("build", "r.html", ["--report", "r.html"]), ("view", "v.html", []),
            ("train", "out.onnx", ["--data", "../in/d.npz", "--epochs", "1"]), ("derive", "out.onnx", []),
            ("train", "out.onnx", ["--data", "../in/d.npz", "--epochs", "1", "--run", "out.onnx"]),
            ("predict", "p.csv", ["--data", "../in/d.npz"]), ("expand", "out.onnx", []), ("tune", "t.toml", []),
            ("attack", "a.npz", ["--data", "../in/d.npz"]), ("explain", "e.npz", ["--data", "../in/d.npz"]),
            ("build", "passes", ["--dump-passes", "passes"]), ("build", "a", ["--artifacts", "a"]),
        )
    )  # fmt: skip
    kind = rng.choice(sorted(PLACES))
    PLACES[kind](place / "out" / name)
    out = [] if name in ("r.html", "passes", "a") else ["-o", name]
    if name in ("passes", "r.html"):
        out = ["-o", "out.onnx"]
    words = [command, "../in/model.onnx", *out, *words, *rng.choice(([], [], ["--force"]))]
    return _played(words, place, f"{name} is {kind}")


def _regression() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
    return {"x": x, "label": x[:, :1] * 2}


WAYS = (metadata,) * 4 + (
    values_beside,
    run_folder,
    adapter,
    adapter,
    arrow,
    lines,
    pictures,
    tokenizer,
    tokenizer,
    outputs,
)
