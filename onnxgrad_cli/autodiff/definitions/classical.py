"""Definitions of linear models, support vector machines and scalers of ai.onnx.ml, as used by scikit-learn's converter.

Coefficients are attributes of these operators. The definitions turn them into initializers, which can be trained.
Statistics of the data, such as the offset of a scaler and the values of an imputer, stay constant. All definitions
compute in float32 for every input type. Where onnxruntime's kernels deviate from the specification or the specification
is ambiguous, the definitions follow the kernels.
Source: https://onnx.ai/onnx/operators (ai.onnx.ml), and onnxruntime's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import definition, no_gradient, refuse
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.domains import ML

Numbers = Sequence[float] | np.ndarray | None
"""The type of an attribute that is a list of floats and may be absent."""

# -- linear models ---------------------------------------------------------------------------------------------------


@definition("LinearRegressor", domain=ML)
def linear_regressor(op, x, *, coefficients, intercepts=None, targets=1, post_transform="NONE"):
    """x Aᵀ + b, with one column per target."""
    if targets == 1 and post_transform != "NONE":
        raise Unknown(f"with one target, onnxruntime's kernel ignores its post_transform '{post_transform}'")
    transform = _transform(post_transform)
    return transform(op, _linear(op, _rows(op, x), coefficients, intercepts, targets))


@definition("LinearClassifier", domain=ML)
def linear_classifier(
    op, x, *, coefficients, intercepts=None, classlabels_ints=None, classlabels_strings=None, multi_class=0,
    post_transform="NONE",
):  # fmt: skip
    """The label of the highest score, and the scores x Aᵀ + b. If A has a single row, there are two classes."""
    labels = _labels(classlabels_ints, classlabels_strings)
    count = len(_floats(intercepts))
    if count != len(labels) and (count, len(labels)) != (1, 2):
        raise Unknown(f"it has {len(labels)} classes and {count} intercepts")
    transform = _transform(post_transform)
    scores = _linear(op, _rows(op, x), coefficients, intercepts, count)
    if count == len(labels):
        return _label(op, scores, labels), transform(op, scores)
    both = op.Concat(-scores, scores, axis=1)
    of_both = op.Sigmoid(both) if post_transform == "LOGISTIC" else op.Concat(1 - scores, scores, axis=1)
    return _label(op, both, labels), of_both


def _linear(op: Op, x: Val, coefficients: Numbers, intercepts: Numbers, rows: int) -> Val:
    coefficients, intercepts = _floats(coefficients), _floats(intercepts)
    if not rows or len(coefficients) % rows or len(intercepts) not in (0, rows):
        given = f"{len(coefficients)} coefficients and {len(intercepts)} intercepts"
        raise Unknown(f"{given} do not make {rows} linear functions")
    matrix = np.reshape(coefficients, [rows, -1]).T
    if isinstance(x.shape[1], int) and x.shape[1] != len(matrix):
        raise Unknown(f"its input has {x.shape[1]} columns, but its coefficients are for {len(matrix)}")
    y = x @ op.weight("coefficients", matrix)
    return y + op.weight("intercepts", intercepts) if len(intercepts) else y


def _label(op: Op, scores: Val, labels: np.ndarray) -> Val:
    """Return the label of the highest score in each row. Ties go to the first label."""
    return op.Gather(op.const(labels), op.ArgMax(scores, axis=1, keepdims=0))


def _rows(op: Op, x: Val) -> Val:
    """Return x in float32 with one row per sample. A vector is a single sample."""
    require(x.rank <= 2, "its input is not a matrix")
    x = op.cast(x, TensorProto.FLOAT)
    return x if x.rank == 2 else op.unsqueeze(x, [0])


def _transform(how: str) -> Callable[[Op, Val], Val]:
    """Return the function that a post_transform applies to the scores."""
    known: dict[str, Callable[[Op, Val], Val]] = {
        "NONE": lambda op, scores: scores,
        "LOGISTIC": lambda op, scores: op.Sigmoid(scores),
        "SOFTMAX": lambda op, scores: op.Softmax(scores, axis=1),
    }
    require(how in known, f"its post_transform '{how}' is not differentiable everywhere")
    return known[how]


def _labels(numbers: Sequence[int] | None, names: Sequence[bytes] | None) -> np.ndarray:
    return np.array(numbers, np.int64) if numbers else np.array([name.decode() for name in names or ()], object)


def _floats(values: Numbers) -> np.ndarray:
    return np.asarray([] if values is None else values, np.float32)


# -- support vectors -------------------------------------------------------------------------------------------------

KERNELS = frozenset({"LINEAR", "POLY", "RBF", "SIGMOID"})


@definition("SVMRegressor", domain=ML)
def svm_regressor(
    op, x, *, coefficients, kernel_params=None, kernel_type="LINEAR", n_supports=0, one_class=0, post_transform="NONE",
    rho, support_vectors=None,
):  # fmt: skip
    """K(x, support vectors) coefficients + rho. Without support vectors, x coefficients + rho."""
    require(not one_class, "it returns only the sign of a function, whose derivative is zero")
    require(not n_supports or kernel_type in KERNELS, f"its kernel '{kernel_type}' is not supported")
    require(post_transform == "NONE", f"onnxruntime's kernel ignores its post_transform '{post_transform}'")
    k = _rows(op, x)
    if n_supports:
        k = _kernel(op, k, kernel_type, kernel_params, np.reshape(_floats(support_vectors), [n_supports, -1]))
    column = np.reshape(_floats(coefficients), [-1, 1])
    if isinstance(k.shape[1], int) and k.shape[1] != len(column):
        raise Unknown(f"it has {len(column)} coefficients for {k.shape[1]} {'vectors' if n_supports else 'columns'}")
    return k @ op.weight("coefficients", column) + op.weight("rho", _floats(rho)[:1])


@definition("SVMClassifier", domain=ML)
def svm_classifier(
    op, x, *, classlabels_ints=None, classlabels_strings=None, coefficients, kernel_params=None, kernel_type="LINEAR",
    post_transform="NONE", prob_a=None, prob_b=None, rho, support_vectors=None, vectors_per_class=None,
):  # fmt: skip
    """The class with the most votes among all pairs of classes, and the score of each pair.

    The score of a pair (i, j) is K(x, vectors of i) a + K(x, vectors of j) b + rho, where a is from row j - 1 of the
    coefficients and b from row i. The pair votes for i if its score is above 0, otherwise for j. With two classes, the
    second output consists of minus the score, and the score. Source: C. Chang and C. Lin, LIBSVM, 2011.
    """
    labels, counts = _labels(classlabels_ints, classlabels_strings), list(vectors_per_class or ())
    if not sum(counts) or len(counts) != len(labels) or kernel_type not in KERNELS:
        what = f"{len(labels)} classes, support vectors for {len(counts)} classes"
        raise Unknown(f"it has {what}, and the kernel '{kernel_type}'")
    require(post_transform == "NONE", f"its post_transform '{post_transform}' is not supported")
    if prob_a or prob_b:
        raise Unknown("an iteration without a gradient computes its probabilities", "export it without probabilities")
    first, second = np.triu_indices(len(counts), 1)
    given, needed = (len(coefficients), len(rho)), (sum(counts) * (len(counts) - 1), len(first))
    require(given == needed, "it has {} coefficients and {} values of rho, but needs {} and {}".format(*given, *needed))
    k = _kernel(op, _rows(op, x), kernel_type, kernel_params, np.reshape(_floats(support_vectors), [sum(counts), -1]))
    scores = k @ _of_pairs(op, coefficients, np.repeat(range(len(counts)), counts), first, second)
    scores = scores + op.weight("rho", _floats(rho))
    for_first = op.cast(scores > 0.0, scores)
    votes = for_first @ op.const(np.eye(len(counts))[first], scores)
    votes = votes + (1 - for_first) @ op.const(np.eye(len(counts))[second], scores)
    label = _label(op, votes, labels)
    return label, scores if len(labels) > 2 else op.Concat(-scores, scores, axis=1)


def _of_pairs(op: Op, coefficients: Numbers, owner: np.ndarray, first: np.ndarray, second: np.ndarray) -> Val:
    """Return the coefficient of each support vector for each pair of classes, [vectors, pairs].

    It is 0 if the vector belongs to neither class of the pair.

    Args:
        op: the emitter.
        coefficients: the attribute of the node, [classes - 1, vectors].
        owner: the class of each vector.
        first, second: the two classes of each pair.
    """
    stored = op.weight("coefficients", np.reshape(_floats(coefficients), [-1, len(owner)]))
    of_first, of_second = owner[:, None] == first, owner[:, None] == second
    rows = np.where(of_first, second - 1, np.where(of_second, first, 0))
    found = op.GatherElements(op.swap_last(stored), op.const(rows), axis=1)
    return found * op.const(of_first | of_second, found)


def _kernel(op: Op, x: Val, kind: str, parameters: Numbers, vectors: np.ndarray) -> Val:
    """Return K(x, s) for every row x and every support vector s."""
    if isinstance(x.shape[1], int) and x.shape[1] != vectors.shape[1]:
        raise Unknown(f"its input has {x.shape[1]} columns, but its support vectors have {vectors.shape[1]}")
    s = op.weight("support_vectors", vectors)
    gamma, zero, degree = [*(parameters or ()), 0.0, 0.0, 0.0][:3]
    if kind == "RBF":
        apart = op.unsqueeze(x, [1]) - s
        return op.Exp(op.sum(apart * apart, [2], keepdims=False) * -gamma)
    product = x @ op.swap_last(s)
    if kind == "LINEAR":
        return product
    inner = product * gamma + zero
    if kind == "SIGMOID":
        return op.Tanh(inner)
    return inner**degree


# -- preprocessing ---------------------------------------------------------------------------------------------------


@definition("Normalizer", domain=ML)
def normalizer(op, x, *, norm="MAX"):
    """Each row divided by its largest element, its L1 norm or its L2 norm, if that is not 0."""
    require(x.rank <= 2, "its input is not a matrix")
    kinds = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}
    require(norm in kinds, f"its norm '{norm}' is not supported")
    x = op.cast(x, TensorProto.FLOAT)
    size = op.reduce(kinds[norm], x, [x.rank - 1])
    zero = op.Equal(size, op.const(0.0, size))
    return op.Where(zero, x, x / op.Where(zero, op.const(1.0, size), size))


@definition("Scaler", domain=ML)
def scaler(op, x, *, offset=None, scale=None):
    """(x - offset) scale. Offset and scale have one element per column or a single one."""
    require(x.rank <= 2, "its input is not a matrix")
    given = [_floats(offset), _floats(scale)]
    require(all(map(len, given)), "it has no offset or no scale")
    less, factor = (op.const(values if len(values) > 1 else values[0], TensorProto.FLOAT) for values in given)
    return (op.cast(x, TensorProto.FLOAT) - less) * factor


@definition("Imputer", domain=ML)
def imputer(
    op, x, *, imputed_value_floats=None, imputed_value_int64s=None, replaced_value_float=0.0, replaced_value_int64=0
):
    """x with its missing values replaced: by one value per column, or by the same value in all columns."""
    require(x.dtype == TensorProto.FLOAT, "its input is not float32")
    missing = op.IsNaN(x) if np.isnan(replaced_value_float) else op.Equal(x, op.const(replaced_value_float, x))
    values = _floats(imputed_value_floats)
    return op.Where(missing, op.const(values if len(values) > 1 else values[0], x), x)


@definition("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(op, x, places):
    """The columns of x at the given places."""
    require(x.rank == 2, "its input is not a matrix")
    return op.Gather(x, op.reshape(places, [-1]), axis=1)


@definition("FeatureVectorizer", domain=ML)
def feature_vectorizer(op, *xs, inputdimensions=None):
    """The columns of all inputs, side by side."""
    require(all(x.rank == 2 for x in xs), "an input is not a matrix")
    widths = [x.shape[1] for x in xs]
    if not all(isinstance(width, int) for width in widths):
        raise Unknown("the numbers of columns of its inputs are known only at run time")
    if widths != list(inputdimensions or ()):
        raise Unknown(f"its inputs have {widths} columns, but its inputdimensions are {list(inputdimensions or ())}")
    return op.Concat(*(op.cast(x, TensorProto.FLOAT) for x in xs), axis=1)


# -- operators without a derivative ----------------------------------------------------------------------------------

no_gradient("Binarizer", domain=ML, kink="0 at the threshold")
no_gradient("LabelEncoder OneHotEncoder", domain=ML, kink="0 where the code changes")
refuse(
    "TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor",
    "the output of a tree is constant between its thresholds, so its gradient is zero",
    "choose an output before the trees with `output=NAME`, and train the trees with the library that created them",
    domain=ML,
)
