"""One model of each framework's exporter gets a training model whose gradients are those of differences taken here."""

from pathlib import Path

import pytest

from tests.exporters.frameworks import FRAMEWORKS
from tests.exporters.judged import judge


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_model_of_a_framework_is_judged_rightly(name: str, tmp_path: Path) -> None:
    write, expected = FRAMEWORKS[name]
    file = tmp_path / f"{name}.onnx"
    try:
        feeds = write(file)
    except ImportError as error:
        pytest.skip(f"what writes it is not installed: {error}")
    found = judge(file, feeds, tmp_path)
    assert found.verdict == expected, found
    assert not expected or (found.error is not None and found.error < 2e-2), found
