"""What PyTorch's newer exporter says of tensors is read, and what nobody says is not guessed."""

from __future__ import annotations

import onnx
from onnx import ModelProto

from onnxgrad_cli.ir.provenance import Provenance, provenance

SIGNATURE = """
# inputs
p_fc_weight: PARAMETER target='fc.weight'
b_mask: BUFFER target='mask' persistent=True
c_lifted: CONSTANT_TENSOR target='lifted_tensor_0'
x: USER_INPUT
"""


def exported(signature: str, **folded: str) -> ModelProto:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18], producer_name: "pytorch">
    g (float[2] x) => (float[2] y) { c = Constant<value_float = 1.0>() y = Add(x, c) }
    """)
    if signature:
        model.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=signature)
    for name, sources in folded.items():
        value = model.graph.value_info.add(name=name)
        value.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=sources)
    return model


def test_members_and_what_was_computed_of_them() -> None:
    model = exported(
        SIGNATURE, a="['fc.weight', 'val_1']", b="['mask', 'val_1']", c="not a list", d="3", mask="['fc.weight']"
    )
    assert provenance(model) == Provenance(
        frozenset({"fc.weight", "a"}), frozenset({"mask", "lifted_tensor_0", "b"}), frozenset({"c"}), True
    )


def test_without_a_signature_nothing_is_said() -> None:
    model = exported("", a="['fc.weight']")
    model.producer_name = "another"
    assert provenance(model) == Provenance(literals=frozenset({"c"}))
