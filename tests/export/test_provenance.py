"""Provenance on its way from the checkpoint through the model file and the run to the report."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from prelunet.evaluator.cli import run
from prelunet.evaluator.files import sha256_of
from prelunet.evaluator.rpc.convert import report_from_message
from prelunet.evaluator.serving.api.prelunet import report_message
from prelunet.training.data.splits import open_splits
from prelunet.training.loop.execution import Execution
from prelunet.training.loop.train import train
from tests.training.training_folders import RECIPE, make_dataset

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "report.schema.json").read_text())


def test_the_provenance_of_a_checkpoint_reaches_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    data, model, validated = make_dataset(tmp_path / "data"), tmp_path / "net.onnx", tmp_path / "run"
    first = train(replace(RECIPE, steps=1), data, tmp_path / "first").checkpoint
    recipe, deterministic = replace(RECIPE, steps=3, keep_every=2), Execution(deterministic=True)
    train(recipe, data, tmp_path / "tuned", start=first, execution=deterministic)
    tuned = tmp_path / "tuned" / "step-0000002.safetensors"
    assert run(["export", str(tuned), "-o", str(model)]) == 0
    words = ["--data", str(data), "--protocol", "center", "--run", str(validated), "--device", "cpu"]
    assert run(["validate", "--model", str(model), *words]) == 0
    assert run(["report", str(validated)]) == 0
    capsys.readouterr()

    inspected = []
    for file in (tuned, model):
        assert run(["inspect", str(file), "--json"]) == 0
        inspected.append(json.loads(capsys.readouterr().out)["provenance"])
    provenance = inspected[0]
    assert provenance["parent_sha256"] == sha256_of(first)
    (environment,) = provenance["environments"]
    assert (environment["from_step"], environment["deterministic"]) == (0, True)
    fingerprint = open_splits(data).train.fingerprint
    assert (provenance["step"], provenance["total_steps"]) == (2, 3)
    assert provenance["dataset_fingerprint"] == fingerprint
    assert inspected[1] == provenance

    report = json.loads((validated / "report/report.json").read_text())
    for of_run in (json.loads((validated / "run.json").read_text())["model"], report["model"]):
        assert of_run["provenance"] == provenance
        assert of_run["checkpoint_sha256"] == sha256_of(tuned)
    jsonschema.validate(report, SCHEMA)
    on_the_wire = report_from_message(report_message(report))
    assert json.dumps(on_the_wire["model"]) == json.dumps(report["model"])

    assert run(["compare", str(validated), str(validated), "--out", str(tmp_path / "compared")]) == 0
    capsys.readouterr()
    assert run(["inspect", str(model)]) == 0
    pages = (validated / "report/report.html", tmp_path / "compared/compare.html")
    for shown in ("".join(text.split()) for text in (capsys.readouterr().out, *(page.read_text() for page in pages))):
        assert sha256_of(first) in shown
        assert sha256_of(tuned) in shown
        assert "2of3steps" in shown
        assert f"datasetwithfingerprint{fingerprint}" in shown
        assert f"threadsofeach:{environment['threads']}),fp32,deterministic;numpy" in shown
