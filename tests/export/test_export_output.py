"""The output path is checked before the minutes of work of an export."""

import os
from pathlib import Path

import pytest

import prelunet.export.dense.export
from prelunet.evaluator.cli import run
from prelunet.evaluator.errors import PreluNetError
from prelunet.export.dense.export import export_checkpoint
from prelunet.training.net.checkpoints import write_checkpoint
from tests.helpers.tiny_nets import tiny_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint whose export fails the test as soon as the work begins."""

    def work(*_: object) -> None:
        pytest.fail("the work has begun")

    monkeypatch.setattr(prelunet.export.dense.export, "network_from_checkpoint", work)
    path = tmp_path / "net.safetensors"
    write_checkpoint(path, tiny_checkpoint())
    return path


@pytest.mark.parametrize("output", ["nowhere/net.onnx", "", "folder", os.devnull, "net.safetensors/net.onnx"])
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    checkpoint: Path, tmp_path: Path, output: str
) -> None:
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PreluNetError, match="hoose another path"):
        export_checkpoint(checkpoint, tmp_path / output)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_verb_refuses_such_a_path_in_one_line_and_exits_2(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(checkpoint), "-o", str(tmp_path / "\udcff.onnx")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_work_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(prelunet.export.dense.export, "network_from_checkpoint", fail)
    write_checkpoint(tmp_path / "net", tiny_checkpoint())
    with pytest.raises(RuntimeError, match="out of luck"):
        export_checkpoint(tmp_path / "net", tmp_path / "net.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["net"]
