import sys

import numpy as np
import onnxruntime as ort

ort.set_default_logger_severity(3)  # it warns of every weight that can be fed
data, random = np.load("sample_models/digits.npz"), np.random.default_rng(0)
x, y = data["train_x"], data["train_y"]
session = ort.InferenceSession(sys.argv[1])
weights = {w.name: np.zeros(w.shape, np.float32) for w in session.get_overridable_initializers()}
for name, weight in weights.items():  # random weights to start from; a normalization's scale is 1, a bias 0
    spread = np.sqrt(2 / np.prod(weight.shape[1:]))
    weight += random.normal(0, spread, weight.shape) if weight.ndim > 1 else name.endswith("weight")
outputs = ["loss", *(f"{name}_grad" for name in weights)]
for epoch in range(20):
    for batch in np.array_split(random.permutation(len(x)), len(x) // 32):
        loss, *gradients = session.run(outputs, {"x": x[batch], "y": y[batch], **weights})
        for weight, gradient in zip(weights.values(), gradients, strict=True):
            weight -= 0.1 * gradient
    print(f"epoch {epoch + 1:2}  loss {loss:.4f}")
options, trained = ort.SessionOptions(), {name: ort.OrtValue.ortvalue_from_numpy(w) for name, w in weights.items()}
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # a fusion would keep the file's weights
for name, value in trained.items():
    options.add_initializer(name, value)
logits = ort.InferenceSession("sample_models/digits_cnn.onnx", options).run(None, {"x": data["test_x"]})[0]
print(f"held-out accuracy {np.mean(logits.argmax(1) == data['test_y']):.1%}")
