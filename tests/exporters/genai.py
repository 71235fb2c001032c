"""Language models of random weights as onnxruntime-genai writes them, and what `onnxgrad build` says.

    python -m tests.exporters.genai FOLDER [NAME-PRECISION ...]

It wants onnxruntime-genai, transformers and PyTorch, and nothing from the network: the models are tiny, and so is their
tokenizer, which is made in place. Prints a row for each model: its name, the verdict, by how much the training model's
outputs differ from the original's, and what the gradients were held against. Exits 1 when a model is not proved that
can be, or is proved that can't.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

SIZE, LAYERS, WORDS, WINDOW = 64, 2, 80, 4
HEAD = 16  # of no other size does onnxruntime rotate on the CPU
PRECISIONS = {"fp32": "cpu", "fp16": "cuda", "int8": "cpu", "int4": "cpu"}
"""What the builder writes, and for which kind of processor it does."""

FOR_CUDA = frozenset({"qwen3-fp16", "lfm2-fp16"})
"""Models that hold what onnxruntime has on no CPU: there is nothing to compare with but PyTorch."""

COMMON: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": SIZE, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
QWEN35_TEXT: dict[str, Any] = COMMON | {
    "head_dim": HEAD, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "initializer_range": 0.12,  # transformers adds 1e-6 to squared lengths of keys, and the builder's models don't
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
QWEN35_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": SIZE, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": HEAD}),
    "phi3": ("Phi3Config", {"original_max_position_embeddings": 64}),
    "mistral": ("MistralConfig", {"head_dim": HEAD, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {"head_dim": HEAD, "sliding_window": WINDOW, "query_pre_attn_scalar": HEAD}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": HEAD, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "qwen35": ("Qwen3_5Config", {"text_config": QWEN35_TEXT, "vision_config": QWEN35_VISION}),
}
"""The configuration of each model in transformers, and what it has of its own."""

MODELS = [f"{name}-{precision}" for name in CONFIGURATIONS for precision in PRECISIONS]


def write_checkpoint(name: str, folder: Path, **changed: Any) -> None:
    """A model of random weights and its tokenizer, as transformers stores them; its configuration may be changed."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    kind, own = CONFIGURATIONS[name]
    configuration = getattr(transformers, kind)(**({} if "text_config" in own else COMMON), **own, **changed)
    _model_class(name).from_config(configuration).save_pretrained(folder)
    if name == "gpt_oss":
        _add_packed_experts(folder / "model.safetensors", own["num_local_experts"])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *(chr(33 + i) for i in range(WORDS - len(special)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _model_class(name: str) -> Any:
    """Return the class of transformers that loads a model: the builder takes text models with a vision part as such."""
    import transformers

    with_vision = "vision_config" in CONFIGURATIONS[name][1]
    return transformers.AutoModelForImageTextToText if with_vision else transformers.AutoModelForCausalLM


def _add_packed_experts(file: Path, experts: int) -> None:
    """The experts as the published checkpoints hold them too, in four bits, which the builder quantizes anew."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    inner = COMMON["intermediate_size"]
    for layer in range(LAYERS):
        for part, rows, columns in (("gate_up_proj", 2 * inner, SIZE), ("down_proj", SIZE, inner)):
            place = f"model.layers.{layer}.mlp.experts.{part}"
            shape = (experts, rows, columns // 32)
            tensors[f"{place}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{place}_scales"] = torch.full(shape, 120, dtype=torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})


def write_model(name: str, precision: str, folder: Path) -> Path:
    """The model file that the builder writes.

    Raises:
        subprocess.CalledProcessError: the builder fails.
    """
    source, target = folder / name, folder / f"{name}-{precision}"
    if not (source / "config.json").exists():
        write_checkpoint(name, source)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", target, "-p", precision]
    command += ["-e", PRECISIONS[precision], "-c", folder / "cache"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True, env=offline)
    return target / "model.onnx"


def prompt(file: Path, batch: int = 2, tokens: int = 6) -> Path:
    """Data for a model, beside it: prompts, caches that hold nothing yet, and labels.

    The prompts are of unequal lengths, padded at the right, unless caches drop tokens, where padding is refused, or
    layers have states besides the keys and values: transformers clears the padding of such layers, and the builder's
    models don't.
    """
    model = onnx.load(file, load_external_data=False)
    sizes = {"batch_size": batch, "sequence_length": tokens, "total_sequence_length": tokens}
    sizes |= {"past_sequence_length": 0, "past_sliding_length": WINDOW, "kv_cache_dim": HEAD}
    types = [value.type.tensor_type for value in model.graph.input]
    drops = any(dim.dim_param == "past_sliding_length" for each in types for dim in each.shape.dim)
    drops |= any(value.name.endswith(".conv") for value in model.graph.input)
    rng = np.random.default_rng(0)
    lengths = np.full(batch, tokens) if drops else tokens - np.arange(batch)
    data = {
        "input_ids": rng.integers(3, WORDS, (batch, tokens)),
        "attention_mask": (np.arange(tokens) < lengths[:, None]).astype(np.int64),
        "position_ids": np.tile(np.arange(tokens), (batch, 1)),
    }
    for value, each in zip(model.graph.input, types, strict=True):
        if value.name == "position_ids" and len(each.shape.dim) == 3:  # text, height and width
            data["position_ids"] = np.tile(data["position_ids"], (3, 1, 1))
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in each.shape.dim]
        data.setdefault(value.name, np.zeros(shape, onnx.helper.tensor_dtype_to_np_dtype(each.elem_type)))
    (logits,) = (value for value in model.graph.output if value.name == "logits")
    dtype = onnx.helper.tensor_dtype_to_np_dtype(logits.type.tensor_type.elem_type)
    data["label"] = rng.standard_normal((batch, tokens, WORDS)).astype(dtype)
    names = {"label", *(value.name for value in model.graph.input)}
    np.savez(file.with_name("prompt.npz"), **{name: x for name, x in data.items() if name in names})
    return file.with_name("prompt.npz")


def judge(file: Path) -> dict[str, Any]:
    """What `onnxgrad build` says of a model, as it says it to programs."""
    command = [sys.executable, "-m", "onnxgrad_cli", "build", file, "--loss", "mse", "--label", "label"]
    command += ["--test-data", prompt(file), "-o", file.with_name("train.onnx"), "--force", "--json"]
    run = subprocess.run([str(word) for word in command], check=False, capture_output=True, text=True)
    verdict: dict[str, Any] = json.loads(run.stdout)["result"]
    return verdict


FIRST = {
    "lfm2": ("model.layers.0.operator_layernorm.weight", "model.layers.0.operator_norm.weight"),
    "qwen35": ("model.layers.0.input_layernorm.weight", "model.language_model.layers.0.input_layernorm.weight"),
}
"""The weight whose gradient has come through all layers, by its names in the builder's model and in transformers."""


def first_weight(name: str) -> tuple[str, str]:
    """Return an entry of FIRST, or the name that both use for most models."""
    return FIRST.get(name, ("model.layers.0.input_layernorm.weight",) * 2)


def reference(name: str, folder: Path, data: Mapping[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """The loss and the gradient of the first weight in transformers."""
    import torch

    model = _model_class(name).from_pretrained(folder / name, attn_implementation="eager").float()
    ids, mask, label = (torch.tensor(data[key]) for key in ("input_ids", "attention_mask", "label"))
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    loss = torch.mean((logits - label.float()) ** 2)
    loss.backward()
    return float(loss.detach()), dict(model.named_parameters())[first_weight(name)[1]].grad.numpy()


def is_as_expected(model: str, verdict: dict[str, Any]) -> bool:
    """Whether a model is proved, or not where it can't be."""
    return ((verdict.get("proof") or {}).get("verdict") == "proved") != (model in FOR_CUDA)


def row(name: str, verdict: dict[str, Any]) -> str:
    """A model's row of the table."""
    steps = {step["name"]: step["detail"] for step in (verdict.get("proof") or {}).get("steps", ())}
    names = ("computes what the original computes", "gradients against differences of the loss")
    told = [steps.get(step, "") for step in names]
    return " | ".join([name, verdict["verdict"] or verdict["error"].splitlines()[0], *told])


def main() -> int:
    """Write and judge the models that are asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="NAME-PRECISION", default=MODELS)
    asked = parser.parse_args()
    surprises = 0
    for model in asked.models:
        verdict = judge(write_model(*model.split("-"), asked.folder))
        surprises += not is_as_expected(model, verdict)
        print(row(model, verdict), flush=True)
    return int(surprises > 0)


if __name__ == "__main__":
    sys.exit(main())
