"""What onnxruntime's optimizer and exporters write in the domain com.microsoft, in operators of the standard.

They are the standard's operators with a bias, a residual or an activation fused into them, so taking them apart gives
every part its gradient; the kernels of the optimizer come back when the training model is loaded. What onnxruntime has
no CPU kernel for is refused: nothing would prove it.
Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.autodiff.registry import definition, refuse
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown

MICROSOFT = "com.microsoft"

# -- products --------------------------------------------------------------------------------------------------------


@definition("FusedMatMul TransposeMatMul", domain=MICROSOFT)
def fused_matmul(op, a, b, *, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):
    """alpha A B, of either the first axis moved to the rows, then rows and columns exchanged; vectors stay."""
    if transA and b.rank == 1:
        raise Unknown("it multiplies a transposed matrix by a vector, where onnxruntime's kernel does not transpose")
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


ACTIVATIONS = {
    "": (),
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "HardSwish": (),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Selu": ("alpha", "gamma"),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "ThresholdedRelu": ("alpha",),
}
"""The activations that are fused into products, and their parameters, none of which has a default there."""


def _activated(op: Op, x: Val, activation: str, given: dict[str, float | None]) -> Val:
    if activation not in ACTIVATIONS:
        raise Unknown(f"its activation '{activation}' is not known")
    parameters = {name: given.get(name) for name in ACTIVATIONS[activation]}
    if None in parameters.values():
        raise Unknown(f"its activation {activation} lacks a parameter")
    return getattr(op, activation)(x, **parameters) if activation else x


@definition("MatMulNBits", domain=MICROSOFT, needs_opset=21)
def matmul_n_bits(
    op, a, b, scales, zero_points=None, g_idx=None, bias=None, *, K, N, bits=4, block_size=128, accuracy_level=0,
    weight_prepacked=0,
):  # fmt: skip
    """A Bᵀ + bias, B holding N rows of K values of a few bits in blocks of `block_size`, each of its own scale.

    B is packed, the low bits first. It is constant, and so are the scales. Whatever `accuracy_level` allows a kernel,
    A is not quantized.
    """
    if g_idx is not None or weight_prepacked:
        raise Unknown("its weight is reordered or prepacked")
    if scales.dtype != a.dtype != TensorProto.DOUBLE:  # no kernel; in the narrower type, the matrix would lose digits
        raise Unknown("its scales are of another type than what it multiplies")
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
    """Rows of a table of bytes, each of some values of a few bits, in blocks that have a scale each; as floats."""
    if data.dtype != TensorProto.UINT8 or data.rank != 2:
        raise Unknown("its table is no matrix of bytes")
    if gather_axis % 2 != 0 or quantize_axis % 2 != 1:
        raise Unknown("it does not gather rows whose columns are quantized")
    width = data.shape[1]
    if not isinstance(width, int):
        raise Unknown("the size of its rows is unknown")
    columns = width * 8 // bits
    blocks = columns // block_size
    if columns % block_size:
        raise Unknown("its rows end within a block")
    row = op.reshape(indices, [-1])
    data, scales = op.Gather(data, row), op.Gather(scales, row)
    rows = op.size(row, 0)
    if zero_points is not None:
        zero_points = unpacked(op, op.Gather(zero_points, row), bits, [rows, -1], blocks)
    values = dequantized(op, data, scales, zero_points, bits, [rows], blocks, block_size)
    y = op.reshape(values, [*(op.size(indices, axis) for axis in range(indices.rank)), columns])
    op.stands_for(y)
    return y


def dequantized(
    op: Op, packed: Val, scales: Val, zeros: Val | None, bits: int, lead: Sequence[int | Val], blocks: int, size: int
) -> Val:
    """Bytes as the floats they stand for, [*lead, blocks * size].

    Args:
        packed: the bytes.
        scales, zeros: of each block, [*lead, blocks]; the scales may be flat, the zeros floats. Without zeros, the
            middle value is 0.
        bits: how many a value has.
        lead, blocks, size: how many rows there are, along some axes, how many blocks in each, and values in a block.
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


def unpacked(op: Op, packed: Val, bits: int, dims: Sequence[int | Val], kept: int | None = None) -> Val:
    """Bytes as the values of `bits` bits they hold, uint8, the low ones first; of the last axis, the first `kept`."""
    if bits not in (2, 4, 8):
        raise Unknown(f"its weight has {bits} bits")
    values = op.unsqueeze(packed, [packed.rank])
    if bits < 8:
        up = op.const(np.arange(8 - bits, -1, -bits), TensorProto.UINT8)  # what is above is shifted out
        values = op.BitShift(op.BitShift(values, up, direction="LEFT"), op.const(8 - bits, up), direction="RIGHT")
    values = op.reshape(values, dims)
    if kept is None:
        return values
    shape = (*values.shape[:-1], kept)
    return op.Slice(values, op.ints([0]), op.ints([kept]), op.ints([values.rank - 1]), shape=shape)


BNB4 = {
    0: [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4, 0, -1 / 192, -2 / 3, -1, -1 / 3, -1 / 2, -1 / 6, -1 / 4],
    1: [-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1],
}  # fmt: skip
"""The values of the 16 codes of FP4 and of NF4.

Source: T. Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023, appendix E; the library bitsandbytes.
"""


@definition("MatMulBnb4", domain=MICROSOFT)
def matmul_bnb4(op, a, b, absmax, *, K, N, block_size, quant_type, training_mode=0, transB=1):
    """A Bᵀ, where B holds N rows of K codes of FP4 or NF4 in blocks, each with a scale of its own.

    B is packed, the high bits first. It is constant, and so are the scales.
    """
    if quant_type not in BNB4:
        raise Unknown(f"its quant_type {quant_type} is not known")
    if not transB:
        raise Unknown("its matrix is not transposed (transB=0), where onnxruntime's CPU kernel reads other memory")
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
    """A B, where each column of B is stored in blocks of 32 values: a float32 scale, a zero point, 16 bytes of 4 bits.

    The low bits of a block's bytes are its first half, the high bits the second. Kind 0 has no zero points.
    """
    if shape.const is None or blk_quant_type not in (0, 1):
        raise Unknown(f"the sizes of its matrix are an input, or its blk_quant_type is {blk_quant_type}")
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
    """Return the low and the high 4 bits of bytes."""
    four = op.const(4, packed)
    low = op.BitShift(op.BitShift(packed, four, direction="LEFT"), four, direction="RIGHT")
    return low, op.BitShift(packed, four, direction="RIGHT")


def _float_of_bytes(op: Op, parts: Sequence[Val], like: Val) -> Val:
    """Return the float32 of four bytes, the lowest first, in the type of `like`; numbers below 2^-126 give 0."""
    low, middle, high, top = (op.cast(part, like) for part in parts)
    bit, sign = op.Floor(high / 128), op.Floor(top / 128)  # the third byte begins with the last bit of the exponent
    mantissa = (low + middle * 256 + (high - bit * 128) * 65536) * 2.0**-23
    exponent = (top - sign * 128) * 2 + bit
    size = op.Pow(op.const(2.0, like), exponent - 127) * (1 + mantissa)
    return op.Where(exponent > 0, size * (1 - 2 * sign), op.const(0.0, like))


@definition("WordConvEmbedding", domain=MICROSOFT)
def word_conv_embedding(
    op, words, weight, bias, table, *, char_embedding_size=None, conv_window_size=None, embedding_size=None
):  # fmt: skip
    """The maximum, over the windows of a word, of the tanh of a convolution of its characters' embeddings.

    A word has as many characters as it has numbers above 0. Windows may reach beyond a word that is shorter than they.
    Words without characters give zeros; onnxruntime's kernel leaves their memory as it was.
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


@definition("Gelu BiasGelu", domain=MICROSOFT, needs_opset=20)
def gelu(op, x, bias=None):
    return op.Gelu(x if bias is None else x + bias)


@definition("FastGelu", domain=MICROSOFT, needs_opset=20)
def fast_gelu(op, x, bias=None):
    return op.Gelu(x if bias is None else x + bias, approximate="tanh")


@definition("QuickGelu", domain=MICROSOFT)
def quick_gelu(op, x, *, alpha=1.702):
    return x * op.Sigmoid(x if alpha == 1 else x * alpha)


# -- normalizations --------------------------------------------------------------------------------------------------


@definition("SkipLayerNormalization", domain=MICROSOFT, needs_opset=17)
def skip_layer_normalization(op, x, skip, gamma, beta=None, bias=None, *, epsilon=1e-12):
    """y, mean, 1 / deviation, and what is normalized: x + skip + bias."""
    total = _total(x, skip, bias)
    return (*op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon, outputs=3), total)


@definition("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(op, x, skip, gamma, bias=None, *, epsilon=1e-12):
    """y, nothing, 1 / root mean square, and what is normalized: x + skip + bias."""
    total = _total(x, skip, bias)
    y, r = _by_root_mean_square(op, total, gamma, -1, epsilon)
    return y, None, r, total


@definition("SimplifiedLayerNormalization")
def simplified_layer_normalization(op, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """y and 1 / root mean square: of the default domain for onnxruntime, though the standard does not know it."""
    if stash_type != 1:
        raise Unknown("it computes in another type than float32")
    return _by_root_mean_square(op, x, scale, axis, epsilon)


@definition("GatedRMSNorm", domain=MICROSOFT)
def gated_rms_norm(op, x, scale, gate, *, activation="silu", epsilon=1e-5):
    """Each group of as many numbers as `scale` has, over its root mean square, times the activated gate; in float32."""
    if activation not in ("silu", "swish", "sigmoid"):
        raise Unknown(f"its activation '{activation}' is not known")
    size = scale.shape[0]
    if not isinstance(size, int):
        raise Unknown("the size of its groups is unknown")
    last = x.rank - 1
    groups = op.Reshape(op.wide(x), op.ints([0] * last + [-1, size]), shape=(*x.shape[:last], None, size))
    y, _ = _by_root_mean_square(op, groups, scale, -1, epsilon)
    z = op.wide(gate)
    opened = op.Sigmoid(z) if activation == "sigmoid" else z * op.Sigmoid(z)
    return op.cast(op.reshape_like(y, x) * opened, x)


@definition("GatedAdd", domain=MICROSOFT)
def gated_add(op, x, y, gate, gate_weight=None):
    """X + Y gate, one gate a row."""
    if gate_weight is not None:
        raise Unknown("it projects its gate, which onnxruntime's CPU kernel does not")
    return x + y * gate


def _total(x: Val, skip: Val, bias: Val | None) -> Val:
    return x + skip if bias is None else x + skip + bias


def _by_root_mean_square(op: Op, x: Val, scale: Val, axis: int, epsilon: float) -> tuple[Val, Val]:
    """(x r scale, r), r = 1 / sqrt(mean(x²) + epsilon) over the axes from `axis` on. The backward graph reads r."""
    v, axes = op.wide(x), list(range(axis % x.rank, x.rank))
    r = 1 / op.Sqrt(op.mean(v * v, axes) + epsilon)
    return op.cast(v * r * op.cast(scale, v), x), r


@definition("EmbedLayerNormalization", domain=MICROSOFT, needs_opset=17)
def embed_layer_normalization(
    op, ids, segments, words, positions, segment, gamma, beta, mask=None, places=None, *,
    epsilon=1e-12, mask_index_type=0,
):  # fmt: skip
    """The normalized sum of the embeddings, how many tokens of each sample the mask shows, and the sum itself."""
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


# -- forms that the standard has as well -----------------------------------------------------------------------------


@definition("ExpandDims", domain=MICROSOFT)
def expand_dims(op, x, axis):
    return op.Unsqueeze(x, op.cast(op.reshape(axis, [1]), TensorProto.INT64))


@definition("GatherND", domain=MICROSOFT)
def gather_nd(op, x, indices):
    return op.GatherND(x, op.cast(indices, TensorProto.INT64))


@definition("Pad", domain=MICROSOFT)
def pad(op, x, pads, value=None, *, mode="constant"):
    return op.Pad(x, op.reshape(pads, [-1]), None if value is None else op.Reshape(value, op.ints([])), mode=mode)


@definition("Range", domain=MICROSOFT)
def range_(op, start, limit, delta=None):
    step = op.const(1, start) if delta is None else delta
    return op.Range(*(op.Reshape(x, op.ints([])) if x.rank else x for x in (start, limit, step)))


@definition("Trilu", domain=MICROSOFT, needs_opset=14)
def trilu(op, x, k=None, *, upper=1):
    return op.Trilu(x, k, upper=upper)


@definition("Unique", domain=MICROSOFT)
def unique(op, x):
    """The values in the order in which they first occur, the place of each element among them, and their counts."""
    y, _, places, counts = op.Unique(x, sorted=0, outputs=4)
    return y, places, counts


@definition("SampleOp", domain=MICROSOFT)
def sample_op(op, x):
    """x, as an example of an operator."""
    return op.Identity(x)


@definition("CDist", domain=MICROSOFT)
def cdist(op, a, b, *, metric="sqeuclidean"):
    """The distance of each row of A from each row of B."""
    if metric not in ("euclidean", "sqeuclidean"):
        raise Unknown(f"its metric '{metric}' is not known")
    kind = "ReduceL2" if metric == "euclidean" else "ReduceSumSquare"
    return op.reduce(kind, op.unsqueeze(a, [1]) - op.unsqueeze(b, [0]), [2], keepdims=False)


# -- what is refused by name -----------------------------------------------------------------------------------------

refuse(
    "AveragePool Conv GlobalAveragePool GlobalMaxPool MaxPool ReorderInput ReorderOutput Upsample",
    "its data lie in blocks of channels, for one kind of processor",
    "start from the model before it was optimized, or optimize it at ORT_ENABLE_EXTENDED at most",
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
    "it is made for another processor: onnxruntime has no CPU kernel that would prove a gradient",
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
    "it is a step of a search for tokens, which has no loss",
    "start from the model before the search was added",
    domain=MICROSOFT,
)
refuse(
    "SparseToDenseMatMul",
    "it reads a sparse tensor, and no operator of the standard computes with one",
    "store the matrix as a dense tensor, and multiply with MatMul",
    domain=MICROSOFT,
)
refuse(
    "SparseAttention",
    "onnxruntime's CPU kernel runs it only where old and new cache share memory: nothing would prove a gradient",
    "export the model with GroupQueryAttention",
    domain=MICROSOFT,
)
