"""`report --mlflow`, against a local file store."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from prelunet.evaluator.cli import run
from tests.helpers.run_folders import evaluated, refused, write_run

LINES = [
    *(evaluated(f"{n}.png", 0, [n % 4 and 1, 2], 1 if n % 4 == 0 else 3) for n in range(8)),
    refused("x.png", 0),
]
EXPERIMENT = "photos"


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Let MLflow keep its runs in a folder."""
    for name, value in (
        ("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri()),
        ("MLFLOW_EXPERIMENT_NAME", EXPERIMENT),
        ("MLFLOW_ALLOW_FILE_STORE", "true"),
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0"),
    ):
        monkeypatch.setenv(name, value)
    found: ModuleType = pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    return found


def test_a_run_becomes_an_entry_with_its_parameters_errors_and_files(
    mlflow: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "mine", LINES)
    chunk = {"event": "chunk", "date": "2026-11-02T10:00:07+01:00", "images": 9, "seconds": 2}
    (folder / "log.jsonl").write_text(json.dumps(chunk))
    assert run(["report", str(folder), "--json", "--mlflow"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    (entry,) = mlflow.search_runs(experiment_names=[EXPERIMENT], output_format="list")
    assert f"run {entry.info.run_id}" in printed.err
    assert (entry.info.run_name, entry.info.status) == ("mine", "FINISHED")
    metrics = {"images_per_second": 4.5, "evaluated": 8, "refused": 1}
    for top in ("top1", "top5"):
        low, high = report[f"{top}_interval"]
        metrics |= {f"{top}_error": report[f"{top}_error"], f"{top}_low": low, f"{top}_high": high}
    assert entry.data.metrics == metrics
    assert metrics["top1_error"] == 75
    expected = {
        "model": "c.onnx", "architecture": "C", "sha256": "3f9c" + "0" * 60, "dataset": "val", "images": "9",
        "fingerprint": "ab" * 32, "protocol": "multi-scale", "views": "scales 256,384 mirrored", "provider": "CPU",
        "precision": "fp32", "versions": "numpy 2.4.6",
    }  # fmt: skip
    assert entry.data.params == expected
    stored = Path(entry.info.artifact_uri.removeprefix("file://"))
    assert {path.name: path.read_bytes() for path in stored.iterdir()} == {
        path.name: path.read_bytes()
        for path in (folder / "run.json", folder / "report" / "report.json", folder / "report" / "report.html")
    }


def test_the_same_run_keeps_its_entry_and_another_gets_its_own(mlflow: ModuleType, tmp_path: Path) -> None:
    for name, change in (("a", "c.onnx"), ("again", "c.onnx"), ("other", "d.onnx")):
        folder = write_run(tmp_path / name, LINES)
        (folder / "run.json").write_text((folder / "run.json").read_text().replace("c.onnx", change))
        assert run(["report", str(folder), "--mlflow"]) == 0
    entries = mlflow.search_runs(experiment_names=[EXPERIMENT], output_format="list")
    assert sorted(entry.data.params["model"] for entry in entries) == ["c.onnx", "d.onnx"]


def test_a_server_that_does_not_answer_is_named_and_the_report_is_written(
    mlflow: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    folder = write_run(tmp_path / "mine", LINES)
    assert run(["report", str(folder), "--mlflow"]) == 5
    message = capsys.readouterr().err
    assert "MLflow at http://127.0.0.1:9: " in message
    assert "Set MLFLOW_TRACKING_URI to a server" in message
    assert (folder / "report" / "report.html").exists()


def test_without_the_extra_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert run(["report", str(write_run(tmp_path / "mine", LINES)), "--mlflow"]) == 5
    message = capsys.readouterr().err
    assert "mlflow, which is not installed" in message
    assert "[mlflow]" in message
