"""Definitions of the operators in com.microsoft that onnxruntime's optimizer and exporters write.

Most are standard operators into which a bias, a residual or an activation is fused. Their definitions write the parts
as separate nodes, which have gradient rules. When onnxruntime loads the training model, its optimizer fuses the parts
again. Operators without a CPU kernel in onnxruntime are refused, because their gradient could not be checked.
Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.autodiff.registry import definition, refuse
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.unpacking import unpacked
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.domains import MICROSOFT


def _formula(op_type: str, formula: Callable[..., Val], needs_opset: int = 13) -> None:
    """Register a definition that is a single formula."""
    formula.__qualname__ = op_type.lower()
    definition(op_type, domain=MICROSOFT, needs_opset=needs_opset)(formula)


# -- products --------------------------------------------------------------------------------------------------------


@definition("FusedMatMul TransposeMatMul", domain=MICROSOFT)
def fused_matmul(op, a, b, *, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):
    """alpha A B.

    transBatchA makes the first axis of A its second-to-last one, then transA swaps the last two axes. transBatchB and
    transB do the same with B. Vectors are not changed.
    """
    if transA and b.rank == 1:
        raise Unknown("it multiplies a transposed matrix by a vector, but onnxruntime does not transpose the matrix")
    y = _turned(op, a, transA, transBatchA) @ _turned(op, b, transB, transBatchB)
    return y if alpha == 1 else y * alpha


def _turned(op: Op, x: Val, swap: int, batch: int) -> Val:
    axes = list(range(x.rank))
    if batch:
        axes = [*axes[1:-1], 0, axes[-1]]
    if swap and x.rank > 1:
        axes = [*axes[:-2], axes[-1], axes[-2]]
    return op.transpose(x, axes)


@definition("FusedGemm", domain=MICROSOFT)
def fused_gemm(
    op, a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0,
    activation="", activation_alpha=None, activation_beta=None, activation_gamma=None,
):  # fmt: skip
    y = op.Gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    given = {"alpha": activation_alpha, "beta": activation_beta, "gamma": activation_gamma}
    return _activated(op, y, activation, given)


@definition("FusedConv", domain=MICROSOFT, needs_opset=14)
def fused_conv(
    op, x, weight, bias=None, z=None, *, activation="", activation_params=(),
    auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None, strides=None,
):  # fmt: skip
    """activation(Conv(x) + z)."""
    y = op.Conv(
        x, weight, bias, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads,
        strides=strides,
    )  # fmt: skip
    y = y if z is None else y + z
    if activation == "Clip":
        low, high = activation_params
        return op.Clip(y, op.const(low, y), op.const(high, y))
    return _activated(op, y, activation, dict(zip(ACTIVATIONS.get(activation, ()), activation_params, strict=False)))


ACTIVATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("", "HardSwish", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"), ()),
    **dict.fromkeys(("Elu", "LeakyRelu", "ThresholdedRelu"), ("alpha",)),
    "HardSigmoid": ("alpha", "beta"),
    "Selu": ("alpha", "gamma"),
}
"""Map from an activation that can be fused into a product to the names of its parameters, all of which are required."""


def _activated(op: Op, x: Val, activation: str, given: dict[str, float | None]) -> Val:
    require(activation in ACTIVATIONS, f"its activation '{activation}' is not supported")
    parameters = {name: given.get(name) for name in ACTIVATIONS[activation]}
    require(None not in parameters.values(), f"its activation {activation} lacks a parameter")
    return getattr(op, activation)(x, **parameters) if activation else x


@definition("MatMulNBits", domain=MICROSOFT, needs_opset=21)
def matmul_n_bits(
    op, a, b, scales, zero_points=None, g_idx=None, bias=None, *, K, N, bits=4, block_size=128, accuracy_level=0,
    weight_prepacked=0,
):  # fmt: skip
    """A Bᵀ + bias, where B is [N, K], stored as `bits`-bit integers with one scale per block of `block_size`.

    B is packed with the low bits first. B and the scales are constant. A is never quantized, even if `accuracy_level`
    allows that.
    """
    require(g_idx is None and not weight_prepacked, "its weight is reordered or prepacked")
    # onnxruntime has no kernel for mixed types, and the narrower type would lose digits of the matrix
    require(a.dtype in (scales.dtype, TensorProto.DOUBLE), "its scales and its values have different types")
    blocks = -(-K // block_size)
    if zero_points is not None and zero_points.dtype == TensorProto.UINT8:
        zero_points = unpacked(op, zero_points, bits, [N, -1], blocks)
    weight = dequantized(op, b, scales, zero_points, bits, [N], blocks, block_size)
    if K % block_size:
        weight = op.Slice(weight, op.ints([0]), op.ints([K]), op.ints([1]), shape=[N, K])
    weight = op.swap_last(op.cast(weight, a))
    op.stands_for(weight)
    y = a @ weight
    return y if bias is None else y + bias


@definition("GatherBlockQuantized", domain=MICROSOFT, needs_opset=21)
def gather_block_quantized(
    op, data, indices, scales, zero_points=None, *, bits=4, block_size=128, gather_axis=0, quantize_axis=1
):  # fmt: skip
    """Dequantized rows of a table of bytes. A byte holds 8 / bits values, and each block of a row has its own scale."""
    require(data.dtype == TensorProto.UINT8 and data.rank == 2, "its table is not a matrix of bytes")
    if gather_axis % 2 != 0 or quantize_axis % 2 != 1:
        raise Unknown("it gathers along an axis other than rows, or its columns are not quantized")
    columns = data.known_size(1, "the size of its rows") * 8 // bits
    blocks = columns // block_size
    require(columns % block_size == 0, "a block of its quantized table extends over two rows")
    row = op.reshape(indices, [-1])
    data, scales = op.Gather(data, row), op.Gather(scales, row)
    rows = op.size(row, 0)
    if zero_points is not None:
        zero_points = unpacked(op, op.Gather(zero_points, row), bits, [rows, -1], blocks)
    values = dequantized(op, data, scales, zero_points, bits, [rows], blocks, block_size)
    y = op.reshape(values, [*op.sizes(indices, range(indices.rank)), columns])
    op.stands_for(y)
    return y


def dequantized(
    op: Op, packed: Val, scales: Val, zeros: Val | None, bits: int, lead: Sequence[int | Val], blocks: int, size: int
) -> Val:
    """Unpack low-bit integers from bytes and dequantize them. Return floats of shape [*lead, blocks * size].

    Args:
        op: the emitter.
        packed: the bytes.
        scales: the scale of each block, [*lead, blocks], or flat.
        zeros: the zero point of each block, [*lead, blocks], as bytes or floats. None means the middle of the range of
            the integers, 2^(bits - 1).
        bits: the number of bits of a value.
        lead: the sizes of the leading axes.
        blocks: the number of blocks in a row.
        size: the number of values in a block.
    """
    every = [*lead, blocks * size]
    steps = unpacked(op, packed, bits, every)
    if zeros is not None and zeros.dtype != TensorProto.UINT8:
        by_block = op.cast(op.reshape(steps, [-1, size]), zeros) - op.reshape(zeros, [-1, 1])
        return op.reshape(by_block * op.reshape(scales, [-1, 1]), every)
    if zeros is None:
        middle = numpy_helper.from_array(np.array([2 ** (bits - 1)], np.uint8))
        shape = [*(dim if isinstance(dim, int) else None for dim in lead), blocks]
        zeros = op.ConstantOfShape(op.vector([*lead, blocks]), value=middle, shape=shape)
    if scales.rank == len(every):
        return op.DequantizeLinear(steps, scales, zeros, axis=len(lead), block_size=size)
    steps, zeros = op.reshape(steps, [-1, size]), op.reshape(zeros, [-1])
    return op.reshape(op.DequantizeLinear(steps, scales, zeros, axis=0), every)


BNB4 = {
    0: [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4, 0, -1 / 192, -2 / 3, -1, -1 / 3, -1 / 2, -1 / 6, -1 / 4],
    1: [-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1],
}  # fmt: skip
"""The float value of each 4-bit code, 0 to 15: for FP4 (key 0) and for NF4 (key 1).

Source: T. Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023, appendix E; the library bitsandbytes.
"""


@definition("MatMulBnb4", domain=MICROSOFT)
def matmul_bnb4(op, a, b, absmax, *, K, N, block_size, quant_type, training_mode=0, transB=1):
    """A Bᵀ, where B is [N, K], stored as 4-bit codes of FP4 or NF4 with one scale per block.

    B is packed with the high bits first. B and the scales are constant.
    """
    require(quant_type in BNB4, f"its quant_type {quant_type} is not supported")
    require(transB, "its matrix is not transposed (transB=0), and onnxruntime's CPU kernel reads wrong memory then")
    low, high = _halves(op, b)
    codes = op.reshape(op.Concat(op.unsqueeze(high, [1]), op.unsqueeze(low, [1]), axis=1), [-1])
    count, blocks = N * K, -(-N * K // block_size)
    if blocks * block_size != count + count % 2:
        codes = op.Pad(codes, op.ints([0, blocks * block_size - count - count % 2]), op.const(0, codes))
    values = op.Gather(op.const(BNB4[quant_type], a), op.cast(codes, TensorProto.INT32))
    values = op.reshape(values, [blocks, block_size]) * op.cast(op.reshape(absmax, [blocks, 1]), a)
    if blocks * block_size != count:
        values = op.Slice(op.reshape(values, [-1]), op.ints([0]), op.ints([count]), op.ints([0]), shape=[count])
    return a @ op.swap_last(op.reshape(values, [N, K]))


@definition("MatMulFpQ4", domain=MICROSOFT)
def matmul_fp_q4(op, a, b, shape, *, blk_quant_type=1):
    """A B, where each column of B is stored in blocks of 32 values of 4 bits.

    A block is a float32 scale, a zero point and 16 bytes. The low 4 bits of the 16 bytes are the first 16 values, and
    the high bits are the other 16. With blk_quant_type=0, blocks have no zero points.
    """
    if shape.const is None or blk_quant_type not in (0, 1):
        raise Unknown(f"the sizes of its matrix are given by an input, or its blk_quant_type is {blk_quant_type}")
    rows, columns = (int(size) for size in shape.const)
    blocks, lead = -(-rows // 32), 4 + blk_quant_type
    stored = op.reshape(b, [columns, blocks, lead + 16])
    parts = op.split(stored, [1, 1, 1, 1, *[1] * blk_quant_type, 16], axis=2)
    scales, packed = _float_of_bytes(op, parts[:4], a), parts[-1]
    steps = op.Concat(*_halves(op, packed), axis=2)
    zeros = op.cast(parts[4], a) if blk_quant_type else 8.0
    weight = op.reshape((op.cast(steps, a) - zeros) * scales, [columns, blocks * 32])
    if blocks * 32 != rows:
        weight = op.Slice(weight, op.ints([0]), op.ints([rows]), op.ints([1]), shape=[columns, rows])
    return a @ op.swap_last(weight)


def _halves(op: Op, packed: Val) -> tuple[Val, Val]:
    """Return the low 4 bits and the high 4 bits of each byte."""
    four = op.const(4, packed)
    low = op.BitShift(op.BitShift(packed, four, direction="LEFT"), four, direction="RIGHT")
    return low, op.BitShift(packed, four, direction="RIGHT")


def _float_of_bytes(op: Op, parts: Sequence[Val], like: Val) -> Val:
    """Decode four bytes, the lowest first, as a float32 number. Return it in the type of `like`.

    Subnormal numbers, which are below 2^-126, become 0.
    """
    low, middle, high, top = (op.cast(part, like) for part in parts)
    # the top bit of the third byte is the lowest bit of the exponent
    bit, sign = op.Floor(high / 128), op.Floor(top / 128)
    mantissa = (low + middle * 256 + (high - bit * 128) * 65536) * 2.0**-23
    exponent = (top - sign * 128) * 2 + bit
    size = op.Pow(op.const(2.0, like), exponent - 127) * (1 + mantissa)
    return op.Where(exponent > 0, size * (1 - 2 * sign), op.const(0.0, like))


@definition("WordConvEmbedding", domain=MICROSOFT)
def word_conv_embedding(
    op, words, weight, bias, table, *, char_embedding_size=None, conv_window_size=None, embedding_size=None
):  # fmt: skip
    """For each word, embed the characters, convolve, apply tanh, and take the maximum over all positions.

    The number of characters of a word is the number of its entries above 0. For a word that is shorter than the window,
    the first window is used. A word without characters gives zeros here; for it, onnxruntime's kernel returns
    uninitialized memory.
    """
    window = op.size(weight, 2)
    shown = op.cast(words > 0, TensorProto.INT64)
    first = op.Slice(shown, op.ints([0]), op.ints([1]), op.ints([1]))
    length = op.sum(shown, [1]) * first
    images = op.unsqueeze(op.Gather(table, words, axis=0), [1])
    y = op.squeeze(op.Tanh(op.Conv(images, weight, bias, shape=(words.shape[0], weight.shape[0], None, 1))), [3])
    last = op.Max(length, op.vector([window])) - op.vector([window])
    seen = op.unsqueeze(op.steps(op.size(y, 2), axis=1, rank=2) <= last, [1])
    best = op.max(op.Where(seen, y, op.const(-2.0, y)), [2], keepdims=False)
    return op.Where(first > 0, best, op.const(0.0, best))


# -- activations -----------------------------------------------------------------------------------------------------


@definition("Gelu BiasGelu FastGelu", domain=MICROSOFT, needs_opset=20)
def gelu(op, x, bias=None):
    approximate = "tanh" if op.node.op_type == "FastGelu" else None
    return op.Gelu(x if bias is None else x + bias, approximate=approximate)


_formula("QuickGelu", lambda op, x, *, alpha=1.702: x * op.Sigmoid(x if alpha == 1 else x * alpha))

# -- normalizations --------------------------------------------------------------------------------------------------


@definition("SkipLayerNormalization", domain=MICROSOFT, needs_opset=17)
def skip_layer_normalization(op, x, skip, gamma, beta=None, bias=None, *, epsilon=1e-12):
    """Outputs: y, the mean, 1 / standard deviation, and x + skip + bias, which is the sum that is normalized."""
    total = x + skip if bias is None else x + skip + bias
    return (*op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon, outputs=3), total)


@definition("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(op, x, skip, gamma, bias=None, *, epsilon=1e-12):
    """Outputs: y, an omitted mean, 1 / root mean square, and x + skip + bias, which is the sum that is normalized."""
    total = x + skip if bias is None else x + skip + bias
    y, r = _by_root_mean_square(op, total, gamma, -1, epsilon)
    return y, None, r, total


@definition("SimplifiedLayerNormalization")
def simplified_layer_normalization(op, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """Outputs: y and 1 / root mean square. onnxruntime adds this operator to the standard's domain."""
    require(stash_type == 1, "it computes in a type other than float32")
    return _by_root_mean_square(op, x, scale, axis, epsilon)


@definition("GatedRMSNorm", domain=MICROSOFT)
def gated_rms_norm(op, x, scale, gate, *, activation="silu", epsilon=1e-5):
    """Divide groups of x, as long as `scale`, by their root mean square. Multiply by `scale` and activation(gate)."""
    require(activation in ("silu", "swish", "sigmoid"), f"its activation '{activation}' is not supported")
    size = scale.known_size(0, "the size of its groups")
    last = x.rank - 1
    groups = op.Reshape(op.wide(x), op.ints([0] * last + [-1, size]), shape=(*x.shape[:last], None, size))
    y, _ = _by_root_mean_square(op, groups, scale, -1, epsilon)
    z = op.wide(gate)
    opened = op.Sigmoid(z) if activation == "sigmoid" else z * op.Sigmoid(z)
    return op.cast(op.reshape_like(y, x) * opened, x)


@definition("GatedAdd", domain=MICROSOFT)
def gated_add(op, x, y, gate, gate_weight=None):
    """x + y * gate, with one gate per row."""
    require(gate_weight is None, "it projects its gate, which onnxruntime's CPU kernel does not support")
    return x + y * gate


def _by_root_mean_square(op: Op, x: Val, scale: Val, axis: int, epsilon: float) -> tuple[Val, Val]:
    """Return (x r scale, r) with r = 1 / sqrt(mean(x²) + epsilon), where the mean is over `axis` and all later axes.

    The backward graph reads r.
    """
    v, axes = op.wide(x), list(range(axis % x.rank, x.rank))
    r = 1 / op.Sqrt(op.mean(v * v, axes) + epsilon)
    return op.cast(v * r * op.cast(scale, v), x), r


@definition("EmbedLayerNormalization", domain=MICROSOFT, needs_opset=17)
def embed_layer_normalization(
    op, ids, segments, words, positions, segment, gamma, beta, mask=None, places=None, *,
    epsilon=1e-12, mask_index_type=0,
):  # fmt: skip
    """Outputs: the normalized sum of the embeddings, the number of unmasked tokens of each sample, and the sum."""
    if places is None:
        at = op.Slice(positions, op.ints([0]), op.dim(ids, 1), op.ints([0]), shape=(ids.shape[1], positions.shape[1]))
    else:
        at = op.Gather(positions, places)
    total = op.Gather(words, ids) + at
    if segments is not None:
        total = total + op.Gather(segment, segments)
    shown = op.cast(ids, TensorProto.INT32) * op.const(0, TensorProto.INT32)
    if mask is not None:
        shown = op.cast(op.Equal(mask, op.const(1, mask)), TensorProto.INT32)
    count = op.sum(shown, [1], keepdims=False)
    return op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon), count, total


# -- operators that the standard has too -----------------------------------------------------------------------------


@definition("QuantizeLinear DequantizeLinear", domain=MICROSOFT, needs_opset=21)
def quantize_linear(op, x, scale, zero=None, *, axis=1, block_size=0):
    """The standard operator of opset 21, which is the first that supports 16-bit and 4-bit integers."""
    return op.emit(op.node.op_type, x, scale, zero, axis=axis, block_size=block_size or None)


_formula("ExpandDims", lambda op, x, axis: op.Unsqueeze(x, op.cast(op.reshape(axis, [1]), TensorProto.INT64)))
_formula("GatherND", lambda op, x, indices: op.GatherND(x, op.cast(indices, TensorProto.INT64)))
_formula("Trilu", lambda op, x, k=None, *, upper=1: op.Trilu(x, k, upper=upper), needs_opset=14)
# the identity, which is an example in onnxruntime's documentation
_formula("SampleOp", lambda op, x: op.Identity(x))


@definition("Pad", domain=MICROSOFT)
def pad(op, x, pads, value=None, *, mode="constant"):
    return op.Pad(x, op.reshape(pads, [-1]), None if value is None else op.Reshape(value, op.ints([])), mode=mode)


@definition("Range", domain=MICROSOFT)
def range_(op, start, limit, delta=None):
    step = op.const(1, start) if delta is None else delta
    return op.Range(*(op.Reshape(x, op.ints([])) if x.rank else x for x in (start, limit, step)))


@definition("Unique", domain=MICROSOFT)
def unique(op, x):
    """Outputs: the distinct values in the order of first occurrence, the index of each element, and the counts."""
    y, _, places, counts = op.Unique(x, sorted=0, outputs=4)
    return y, places, counts


@definition("CDist", domain=MICROSOFT)
def cdist(op, a, b, *, metric="sqeuclidean"):
    """The distance between each row of A and each row of B."""
    require(metric in ("euclidean", "sqeuclidean"), f"its metric '{metric}' is not supported")
    kind = "ReduceL2" if metric == "euclidean" else "ReduceSumSquare"
    return op.reduce(kind, op.unsqueeze(a, [1]) - op.unsqueeze(b, [0]), [2], keepdims=False)


# -- operators that are refused --------------------------------------------------------------------------------------

refuse(
    "AveragePool Conv GlobalAveragePool GlobalMaxPool MaxPool ReorderInput ReorderOutput Upsample",
    "its data are stored in blocks of channels for a specific kind of processor",
    "start from the model before it was optimized, or optimize it at level ORT_ENABLE_EXTENDED or lower",
    domain="com.microsoft.nchwc",
)
refuse(
    "BiasAdd BiasDropout BiasSoftmax BiasSplitGelu BitmaskBiasDropout BitmaskDropout ComplexMul ComplexMulConj "
    "ConvStateReplay DecoderAttention DecoderMaskedSelfAttention DequantizeWithOrder DynamicSparseAttention "
    "EPContext FusedMatMulActivation GatedDeltaNetStateReplay GatedRelativePositionBias GemmFastGelu GemmFloat8 "
    "GemmaRotaryEmbedding GroupNorm HyperConnectionLowRankMix Irfft LongformerAttention Mamba2Verify "
    "MatMulBlockQuantizedFp4Weight MatMulBlockQuantizedFp8Weight MatMulNBitsMlp MatMulNBitsQLoRA MatMulNBitsQkv "
    "MatMulPacked MoEPacked NhwcConv NhwcFusedConv PackedAttention PackedMultiHeadAttention "
    "PackedSparseAttentionIndexer PagedAttention RMSNormRotary RelativePositionBias RemovePadding RestorePadding "
    "Rfft RouterGateUpProj SkipGroupNorm Snpe SparseAttentionIndexer SparsePagedAttention SwiGLU TorchEmbedding",
    "it is made for another processor: onnxruntime has no CPU kernel to check a gradient with",
    "start from the model before it was optimized, or optimize it for the CPU",
    domain=MICROSOFT,
)
refuse(
    "BeamSearch GreedySearch Sampling WhisperBeamSearch",
    "it chooses tokens step by step, and choices have no derivative",
    "start from the decoder, before it was built into the search",
    domain=MICROSOFT,
)
refuse(
    "NGramRepeatBlock",
    "it is a step of token generation, which can't be trained",
    "start from the model without the generation loop",
    domain=MICROSOFT,
)
refuse(
    "SparseToDenseMatMul",
    "it reads a sparse tensor, which no standard operator supports",
    "store the matrix as a dense tensor, and multiply with MatMul",
    domain=MICROSOFT,
)
refuse(
    "SparseAttention",
    "onnxruntime's CPU kernel runs it only if the old and the new cache share memory, so a gradient can't be checked",
    "export the model with GroupQueryAttention",
    domain=MICROSOFT,
)
