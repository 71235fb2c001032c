"""python client.py MODEL.json WEIGHTS.bin SAMPLES.npz UPDATE.bin STEPS SIZE RATE: what training changes in weights."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort


class Client:
    """Trains a model of `onnxgrad build --weights inputs --optimizer NAME`, from what its JSON says."""

    def __init__(self, roles: Path) -> None:
        self.roles = json.loads(roles.read_text())
        self.session = ort.InferenceSession(roles.with_name(self.roles["model"]))
        self.held = {name: port for name, port in self.roles["inputs"].items() if "offset" in port}
        self.shared = [name for name, port in self.held.items() if "slot" not in port]  # the rest is the optimizer's

    def arrays(self, data: bytes) -> tuple[bytearray, dict[str, np.ndarray]]:
        """A copy of the bytes, with the zeros that the file of the start leaves out, and the arrays that lie in it."""
        if len(data) not in (self.roles["stored"], self.roles["bytes"]):
            raise SystemExit(f"{len(data)} bytes are not the {self.roles['bytes']} of '{self.roles['model']}'")
        whole = bytearray(data.ljust(self.roles["bytes"], b"\0"))
        return whole, {n: np.ndarray(p["dims"], p["type"], whole, p["offset"]) for n, p in self.held.items()}

    def update(self, weights: bytes, batches: Iterable[dict[str, np.ndarray]], rate: float) -> bytes:
        """What a step on each batch changes in weights and running statistics; zeros for the optimizer's own state."""
        (_, start), (update, into) = self.arrays(weights), self.arrays(bytes(self.roles["bytes"]))
        held, given, after = dict(start), self.roles["learning_rate"], {n: p["next"] for n, p in self.held.items()}
        for batch in batches:
            feeds = {**held, **batch, given: np.array(rate, self.roles["inputs"][given]["type"])}
            held = dict(zip(after, self.session.run(list(after.values()), feeds), strict=True))
        for name in self.shared:
            if not np.isfinite(np.subtract(held[name], start[name], out=into[name])).all():
                raise SystemExit(f"'{name}' is not finite after training: there is no update")
        return bytes(update)


def batches(data: dict[str, np.ndarray], steps: int, size: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of the samples in their order, from the first again after the last."""
    return ({k: a.take(range(i * size, (i + 1) * size), 0, mode="wrap") for k, a in data.items()} for i in range(steps))


if __name__ == "__main__":
    roles, weights, samples, out, steps, size, rate = sys.argv[1:]
    taken = batches(dict(np.load(samples)), int(steps), int(size))
    Path(out).write_bytes(Client(Path(roles)).update(Path(weights).read_bytes(), taken, float(rate)))
