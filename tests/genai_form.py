"""Build a small language model with random 4-bit weights, in the form of onnxruntime-genai's model builder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

WIDE, HEADS, KEYS, SIZE, INNER, BLOCK = 64, 4, 2, 16, 96, 32
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


class _Writer:
    def __init__(self, seed: int) -> None:
        self.rng, self.nodes, self.stored = np.random.default_rng(seed), [], []  # type: ignore[var-annotated]

    def store(self, name: str, array: np.ndarray) -> str:
        self.stored.append(numpy_helper.from_array(array, name))
        return name

    def add(self, kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        name = outputs[0].rpartition("/")[0]
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=name, domain=domain, **attributes))
        return outputs[0]

    def product(self, x: str, module: str, rows: int, columns: int) -> str:
        packed = self.rng.integers(0, 256, (columns, rows // BLOCK, BLOCK // 2)).astype(np.uint8)
        scales = (self.rng.uniform(0.2, 0.5, (columns, rows // BLOCK)) / np.sqrt(rows)).astype(np.float32)
        stored = [
            self.store(f"{module}.MatMul.weight_Q4", packed),
            self.store(f"{module}.MatMul.weight_scales", scales),
        ]
        given = {"K": rows, "N": columns, "bits": 4, "block_size": BLOCK}
        path = "/" + module.replace(".", "/").replace("layers/", "layers.")
        return self.add("MatMulNBits", [x, *stored], [f"{path}/MatMul/output_0"], "com.microsoft", **given)


def decoder(words: int, layers: int = 2, seed: int = 0, longest: int = 64) -> ModelProto:
    """Return a Llama with `words` tokens: grouped-query attention, rotary positions, RMS norms, and gated MLPs."""
    w = _Writer(seed)
    mask = "/model/attn_mask_reformat/attn_mask_subgraph"
    one = w.store("/model/constants/INT64/[1]", np.array([1]))
    total = w.add("ReduceSum", ["attention_mask", one], [f"{mask}/ReduceSum/output_0"], keepdims=0)
    last = w.add("Sub", [total, one], [f"{mask}/Sub/output_0"])
    last = w.add("Cast", [last], [f"{mask}/Sub/Cast/output_0"], to=TensorProto.INT32)
    sizes = w.add("Shape", ["attention_mask"], [f"{mask}/Shape/output_0"])
    every = w.add(
        "Gather", [sizes, w.store("/model/constants/INT64/1", np.array(1))], [f"{mask}/Gather/output_0"], axis=0
    )
    every = w.add("Cast", [every], [f"{mask}/Gather/Cast/output_0"], to=TensorProto.INT32)
    angles = np.arange(longest)[:, None] / 1e4 ** (np.arange(SIZE // 2) / (SIZE // 2))
    tables = [w.store(f"{name}_cache", f(angles).astype(np.float32)) for name, f in (("cos", np.cos), ("sin", np.sin))]
    table = w.store("model.embed_tokens.weight", w.rng.standard_normal((words, WIDE)).astype(np.float32))
    before, added = w.add("Gather", [table, "input_ids"], ["/model/embed_tokens/Gather/output_0"]), ""
    for at in range(2 * layers + 1):
        layer, first = at // 2, at % 2 == 0
        norm = f"layers.{layer}.{'input' if first else 'post_attention'}_layernorm" if at < 2 * layers else "norm"
        scale = w.store(f"model.{norm}.weight", w.rng.uniform(0.8, 1.2, WIDE).astype(np.float32))
        path = "/model/" + norm.replace(f"{layer}.", f"{layer}/")
        if not added:
            normal = w.add("SimplifiedLayerNormalization", [before, scale], [f"{path}/output_0"], epsilon=1e-6, axis=-1)
        else:
            outputs = [f"{path}/output_0", "", "", f"{path}/output_3"]
            normal = w.add(
                "SkipSimplifiedLayerNormalization", [before, added, scale], outputs, "com.microsoft", epsilon=1e-6
            )
            before = outputs[3]
        if at == 2 * layers:
            break
        module = f"model.layers.{layer}.{'attn' if first else 'mlp'}"
        if first:
            qkv = w.product(normal, f"{module}.qkv_proj", WIDE, (HEADS + 2 * KEYS) * SIZE)
            pasts = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
            results = [f"/model/layers.{layer}/attn/GroupQueryAttention/output_0"]
            results += [f"present.{layer}.{kind}" for kind in ("key", "value")]
            inputs = [qkv, "", "", *pasts, last, every, *tables]
            given = {"num_heads": HEADS, "kv_num_heads": KEYS, "scale": SIZE**-0.5, "do_rotary": 1}
            attended = w.add("GroupQueryAttention", inputs, results, "com.microsoft", **given)
            added = w.product(attended, f"{module}.o_proj", HEADS * SIZE, WIDE)
        else:
            gate, up = (w.product(normal, f"{module}.{name}_proj", WIDE, INNER) for name in ("gate", "up"))
            opened = w.add("Sigmoid", [gate], [f"/model/layers.{layer}/mlp/act_fn/Sigmoid/output_0"])
            opened = w.add("Mul", [gate, opened], [f"/model/layers.{layer}/mlp/act_fn/Mul/output_0"])
            hidden = w.add("Mul", [opened, up], [f"/model/layers.{layer}/mlp/Mul/output_0"])
            added = w.product(hidden, f"{module}.down_proj", INNER, WIDE)
    w.product(normal, "lm_head", WIDE, words)
    w.nodes[-1].output[0] = "logits"
    return _model(w, layers, words)


def _model(w: _Writer, layers: int, words: int) -> ModelProto:
    def port(name: str, kind: int, *dims: int | str) -> Any:
        return helper.make_tensor_value_info(name, kind, dims)

    caches = [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    shape: Mapping[str, Any] = {
        each: ("batch_size", KEYS, f"{each}_sequence_length", "kv_cache_dim") for each in ("past", "total")
    }
    graph = helper.make_graph(
        w.nodes, "decoder",
        [
            port("input_ids", INT64, "batch_size", "sequence_length"),
            port("attention_mask", INT64, "batch_size", "total_sequence_length"),
            *(port(f"past_key_values.{each}", FLOAT, *shape["past"]) for each in caches),
        ],
        [
            port("logits", FLOAT, "batch_size", "sequence_length", words),
            *(port(f"present.{each}", FLOAT, *shape["total"]) for each in caches),
        ],
        w.stored,
    )  # fmt: skip
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)
