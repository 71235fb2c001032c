"""One adapter in PEFT, in the stock onnxruntime and in onnxruntime-genai: the same logits, over three exporters."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy
import torch
from onnx import numpy_helper
from torch import nn

from onnxgrad_cli.adapters.formats import AdapterTarget, read_adapters
from onnxgrad_cli.adapters.merge import adaptable, merge
from onnxgrad_cli.builder import build
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.jobs.export import run_export
from onnxgrad_cli.metadata import Adapter, describe
from onnxgrad_cli.options import LoraSpec, Options
from tests.exporters.genai import WORDS, write_checkpoint, write_model

RNG = np.random.default_rng(0)
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def quiet() -> None:
    ort.set_default_logger_severity(3)


def package(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


class Block(nn.Module):
    """What exporters name in their own ways: layers in a list, and in a sequence that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(torch.tanh(self.q_proj(x)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.mix = nn.Conv1d(16, 12, 1)
        self.head = nn.Linear(12, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.mix(x.transpose(1, 2)).transpose(1, 2))


def random_factors(model: onnx.ModelProto, options: Options) -> tuple[list[Adapter], Arrays]:
    """Adapters as a training of a model has them, of random values."""
    built = build(model, options)
    names = [name for each in built.training.adapters for name in (each.a, each.b)]
    shapes = {name: tuple(built.graph.initializers[name].dims) for name in names}
    return built.training.adapters, {n: (RNG.standard_normal(s) * 0.3).astype(np.float32) for n, s in shapes.items()}


def exported(path: Path, dynamo: bool) -> tuple[nn.Module, torch.Tensor]:
    """The network and its input, written by one of the two exporters."""
    if dynamo:
        package("onnxscript")
    torch.manual_seed(0)
    net, x = Network().eval(), torch.randn(2, 3, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (x,), path, dynamo=dynamo, input_names=["x"], verbose=False)
    return net, x


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("scaling", ["lora", "rslora"])
def test_peft_and_onnxruntime_compute_the_same(dynamo: bool, scaling: Any, tmp_path: Path) -> None:
    peft = package("peft")
    net, x = exported(tmp_path / "net.onnx", dynamo)
    model = onnx.load(tmp_path / "net.onnx")
    asked = Options(lora=LoraSpec(3, 6.0), lora_scaling=scaling, lora_target=("all-linear", "mix"))
    adapters, values = random_factors(onnx.load(tmp_path / "net.onnx"), asked)
    assert len(adapters) == 8

    AdapterTarget(f"peft:{tmp_path / 'theirs'}").save(model, adapters, values)
    AdapterTarget(tmp_path / "ours.onnx_adapter").save(model, adapters, values)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(net), tmp_path / "theirs").eval()
    with torch.no_grad():
        wanted, before = theirs(x).numpy(), net(x).numpy()
    assert np.abs(wanted - before).max() > 1
    feeds = {"x": x.numpy()}

    def run(proto: onnx.ModelProto, adapter: Path | None = None) -> np.ndarray:
        options = ort.RunOptions()
        if adapter is not None:
            loaded = ort.LoraAdapter()
            loaded.Load(str(adapter))
            options.add_active_adapter(loaded)
        return ort.InferenceSession(proto.SerializeToString()).run(None, feeds, options)[0]

    bound = 1e-5 * np.abs(wanted).max()
    base = adaptable(model, adapters, values)
    assert np.array_equal(run(base), run(model))
    for found in (run(merge(model, adapters, values)), run(base, tmp_path / "ours.onnx_adapter")):
        assert np.abs(found - wanted).max() <= bound
    for source in ("theirs", "ours.onnx_adapter"):
        again = merge(model, *read_adapters(tmp_path / source, model))
        assert np.abs(run(again) - wanted).max() <= bound


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [False, True])
def test_dora_has_the_results_and_gradients_of_peft(dynamo: bool, tmp_path: Path) -> None:
    """Of linear layers and a convolution with biases, by two exporters; magnitudes are no norms, and B is not zero."""
    peft = package("peft")
    net, x = exported(tmp_path / "net.onnx", dynamo)
    model = onnx.load(tmp_path / "net.onnx")
    asked = Options(lora=LoraSpec(3, 6.0), lora_dora=True, lora_target=("all-linear", "mix"), keep_outputs=True)
    built = build(onnx.load(tmp_path / "net.onnx"), asked)
    adapters = describe(built.model).adapters
    assert len(adapters) == 8
    stored = {t.name: numpy_helper.to_array(t) for t in built.model.graph.initializer}
    drawn = {name: RNG.standard_normal(stored[name].shape) for adapter in adapters for name in adapter.names}
    values = {name: (stored[name] + 0.1 * noise).astype(np.float32) for name, noise in drawn.items()}
    AdapterTarget(f"peft:{tmp_path / 'theirs'}").save(model, adapters, values)
    theirs = peft.PeftModel.from_pretrained(net, tmp_path / "theirs", is_trainable=True).eval()
    wanted = theirs.double()(x.double())
    label = torch.randn(wanted.shape)
    torch.nn.functional.mse_loss(wanted, label.double()).backward()

    bound = 1e-5 * float(wanted.detach().abs().max())
    merged = ort.InferenceSession(merge(model, adapters, values).SerializeToString()).run(None, {"x": x.numpy()})[0]
    assert np.abs(merged - wanted.detach().numpy()).max() <= bound
    again = merge(model, *read_adapters(tmp_path / "theirs", model))
    found = ort.InferenceSession(again.SerializeToString()).run(None, {"x": x.numpy()})[0]
    assert np.abs(found - merged).max() <= bound

    feeds = {"x": x.numpy(), built.training.labels[0]: label.numpy(), **values}
    outputs = Executor(built.model, fallback=False)(feeds)
    gradients = {name: outputs[f"{name}_grad"] for name in values}
    AdapterTarget(f"peft:{tmp_path / 'gradients'}").save(model, adapters, gradients)
    ours = safetensors.numpy.load_file(tmp_path / "gradients/adapter_model.safetensors")
    own = {name.replace(".default", ""): leaf.grad for name, leaf in theirs.named_parameters() if leaf.requires_grad}
    assert len(own) == len(ours) == 24
    for name, gradient in own.items():
        mine = ours.get(name, ours.get(name.removesuffix(".weight")))
        assert mine is not None and gradient is not None
        np.testing.assert_allclose(mine, gradient.numpy(), rtol=0, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.slow
def test_adapters_that_peft_has_written(tmp_path: Path) -> None:
    """Of several ranks and factors, by patterns, in bfloat16."""
    peft = package("peft")
    torch.manual_seed(0)
    net, x = Network().eval(), torch.randn(2, 3, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=False, input_names=["x"])
    config = peft.LoraConfig(
        r=4, lora_alpha=7, target_modules=["q_proj", "head", "mix"], use_rslora=True, init_lora_weights=False,
        rank_pattern={"head": 2}, alpha_pattern={"layers.1.q_proj": 3},
    )  # fmt: skip
    theirs = peft.get_peft_model(copy.deepcopy(net), config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        wanted = theirs(x).numpy()
    half = copy.deepcopy(theirs)
    for name, parameter in half.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16()
    half.save_pretrained(tmp_path / "theirs")
    model = onnx.load(tmp_path / "net.onnx")
    adapters, values = read_adapters(tmp_path / "theirs", model)
    found = Executor(merge(model, adapters, values), fallback=False)({"x": x.numpy()})
    np.testing.assert_allclose(next(iter(found.values())), wanted, rtol=1e-5, atol=1e-5)
    AdapterTarget(tmp_path / "again").save(model, adapters, values)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(net), tmp_path / "again").eval()
    with torch.no_grad():
        np.testing.assert_allclose(again(x).numpy(), wanted, rtol=1e-5, atol=1e-5)


# -- onnxruntime-genai ------------------------------------------------------------------------------------------------

GENAI = """
import sys
import numpy as np
import onnxruntime_genai as og
folder, adapter, ids, out = sys.argv[1:]
model = og.Model(folder)
if adapter != "-":
    adapters = og.Adapters(model)
    adapters.load(adapter, "taught")
found = []
for active in (False, True, False) if adapter != "-" else (False,):
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=16)
    generator = og.Generator(model, parameters)
    if active:
        generator.set_active_adapter(adapters, "taught")
    generator.append_tokens(np.load(ids))
    found.append(np.asarray(generator.get_logits()).reshape(-1))
np.save(out, found)
"""
"""In a process of its own: genai brings an onnxruntime that is not to meet ours."""


def by_genai(folder: Path, adapter: Path | str, ids: np.ndarray, scratch: Path) -> list[np.ndarray]:
    """The logits of the last token: without the adapter, with it, and without it again; "-" is none."""
    np.save(scratch / "ids.npy", ids.astype(np.int32))
    words = [sys.executable, "-c", GENAI, folder, adapter, scratch / "ids.npy", scratch / "logits.npy"]
    done = subprocess.run([str(word) for word in words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(np.load(scratch / "logits.npy"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "tolerance"), [("llama", "fp32", 1e-5), ("qwen3", "int4", None)])
def test_genai_switches_adapters(name: str, precision: str, tolerance: float | None, tmp_path: Path) -> None:
    """An adapter of PEFT, of queries and values and what follows, in the packed product that genai's builder writes."""
    peft, transformers = package("peft"), package("transformers")
    for other in ("onnxruntime_genai", "onnx_ir"):
        package(other)
    write_checkpoint(name, tmp_path / name)
    file = write_model(name, precision, tmp_path)
    net = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="eager").float()
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    theirs = peft.get_peft_model(copy.deepcopy(net), config).eval()
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "lora_" in key:
                parameter.mul_(2.0)
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ids = RNG.integers(3, WORDS, 7)
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(ids)[None]).logits[0, -1].numpy()
        before = net(input_ids=torch.tensor(ids)[None]).logits[0, -1].numpy()
    size = np.abs(wanted).max()
    assert np.abs(wanted - before).max() > 0.1 * size

    base = tmp_path / "adaptable"
    shutil.copytree(file.parent, base)
    (base / "model.onnx").unlink()
    adapter = tmp_path / "taught.onnx_adapter"
    run_export(tmp_path / "theirs", file, base / "model.onnx", adaptable=True, adapter=adapter, force=True)
    without, found, again = by_genai(base, adapter, ids, tmp_path)
    (plain,) = by_genai(file.parent, "-", ids, tmp_path)
    assert np.array_equal(without, again) and np.array_equal(plain, without)
    rounding = np.abs(without - before).max()  # what four bits take from the model alone
    bound = size * (rounding / np.abs(before).max() if tolerance is None else tolerance)
    assert np.abs(found - wanted).max() <= bound < 0.5 * np.abs(found - without).max()

    run_export(adapter, file, adapter=f"peft:{tmp_path / 'back'}")
    back = peft.PeftModel.from_pretrained(copy.deepcopy(net), tmp_path / "back").eval()
    with torch.no_grad():
        logits = back(input_ids=torch.tensor(ids)[None]).logits[0, -1].numpy()
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-5 * size)
