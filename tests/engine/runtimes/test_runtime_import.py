"""Importing onnxruntime: a single, undamaged distribution, and no files in the user's home."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.errors import EnvironmentFault
from tests.conftest import ExportedNet


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"any bytes")
    return path


def install(folder: Path, name: str) -> None:
    """Lay down the part of an installed distribution by which Python knows it."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


@pytest.mark.parametrize("other", ["onnxruntime-gpu", "onnxruntime-openvino"])
def test_two_distributions_of_the_runtime_are_refused_naming_both(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    for name in ("onnxruntime", other):
        install(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentFault, match=rf"onnxruntime and .*{other} are both installed.*pip uninstall"):
        open_session(model, "cpu")


def test_a_runtime_that_two_distributions_overwrote_is_said_to_be_damaged(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", ModuleType("onnxruntime"))
    with pytest.raises(EnvironmentFault, match=r"onnxruntime is damaged.*all of onnxruntime, onnxruntime-gpu"):
        open_session(model, "cpu")


def test_a_missing_runtime_is_reported_with_the_extra_to_install(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # which makes its import fail
    with pytest.raises(EnvironmentFault, match=r"onnxruntime cannot be imported .*\[cpu\]"):
        open_session(model, "cpu")


def test_the_runtime_leaves_nothing_in_the_users_home(exported: dict[str, ExportedNet], tmp_path: Path) -> None:
    """onnxruntime 1.31 keeps a device id and a store of events there, to upload them, unless that is disabled."""
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    code = (
        "from pathlib import Path; from prelunet.evaluator.engine.load import open_session; "
        f"open_session(Path({str(exported['demo-channel'].path)!r}), 'cpu')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**environment, "HOME": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []
