"""benchmarks/serving: the peers' classifier against the engine, and a rehearsal without the peers."""

import ast
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.common.results import ROOT
from benchmarks.serving import run as serving
from benchmarks.serving.bench import check_answers
from benchmarks.serving.peer_classifier import Classifier
from benchmarks.serving.peers import Spec
from benchmarks.serving.table import goals_of
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.protocols import build_protocol


def jpeg(height: int, width: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


@pytest.mark.parametrize("protocol", ["center", "dense-32", "center-40"])
def test_the_peers_classifier_gives_the_engines_answers(protocol: str, exported: Any, tmp_path: Path) -> None:
    net = exported["demo-channel"]
    images = [jpeg(*size, seed) for seed, size in enumerate(((40, 57), (57, 40), (33, 61), (40, 57)))]
    parsed = build_protocol(protocol, net.session.contract)
    Spec(net.path, parsed.scales[0], parsed.crop, parsed.mirror, cores=2).write(tmp_path / "peer")
    indices, scores = Classifier(tmp_path / "peer").classify(images)  # two of one shape share a batch
    found = [list(zip(*row, strict=True)) for row in zip(indices.tolist(), scores.tolist(), strict=True)]
    expected = classify_images(net.session, [decode_image(image) for image in images], parsed)
    check_answers(protocol, found, [one.top(5) for one in expected])
    with pytest.raises(SystemExit, match="answers differ from the engine's"):
        check_answers(protocol, found[::-1], [one.top(5) for one in expected])


@pytest.mark.parametrize("name", ["peer_classifier.py", "peer_mlserver.py", "peer_triton.py"])
def test_a_file_that_is_copied_to_a_peer_imports_nothing_of_this_project(name: str) -> None:
    tree = ast.parse((ROOT / "benchmarks" / "serving" / name).read_text(encoding="utf-8"))
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert imported
    assert not [module for module in imported if module.split(".")[0] in {"benchmarks", "prelunet"}]


def case_of(settings: dict[str, Any], **contenders: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a result file with one case."""
    named = {name.replace("_", ", "): {"failed": 0, **one} for name, one in contenders.items()}
    result = {"calls_of_a_turn": 8, "rounds": 3, "contenders": named}
    return {"runs": [{"tiny": False}], "cases": [{"run": 0, "settings": settings, "result": result}]}


def test_goals_beside_triton_are_reported_as_met_or_missed_and_failed_calls_meet_none() -> None:
    settings = {"part": "peers", "net": "demo", "protocol": "dense-64", "pictures": "mixed", "load": "closed"}
    ours, triton = {"rates": [90.0, 99.0, 90.0], "p50_ms": 9.0}, {"rates": [100.0, 90.0, 100.0], "p50_ms": 10.0}
    rate, p50 = goals_of(case_of(settings, prelunet=ours, triton=triton))
    assert rate.startswith("- NOT met: demo, dense-64, mixed pictures")
    assert "at least 1.0; measured 0.900" in rate
    assert p50.startswith("- met: ")
    assert p50.endswith("at most 1.0; measured 0.900")
    (center,) = goals_of(case_of({**settings, "protocol": "center"}, prelunet=ours, triton=triton))
    assert center.startswith("- met: ")
    (failed,) = goals_of(case_of({**settings, "protocol": "center"}, prelunet={**ours, "failed": 2}, triton=triton))
    assert failed.startswith("- NOT met: ")
    assert failed.endswith("2 calls of that table failed")


def test_the_front_is_compared_with_the_echo_without_the_time_of_decoding() -> None:
    cpus = {"prelunet_Classify": [1.1, 1.3], "echo_Classify": [0.4, 0.5], "decoding": [0.1, 0.1]}
    contenders = {name: {"cpus_ms": values} for name, values in cpus.items()}
    (front,) = goals_of(case_of({"part": "overhead", "clients": 16}, **contenders))
    assert front.startswith("- NOT met: ")
    assert "CPU at most 2.0; measured 2.450" in front


def test_the_serving_benchmark_runs_from_end_to_end_without_the_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "serving.json"
    assert serving.main(["--tiny", "--threads", "1", "--output", str(output)]) == 0
    data = json.loads(output.read_text())
    parts = [case["settings"]["part"] for case in data["cases"]]
    assert parts == ["throughput", "peers", "peers", "overhead"]
    for case in data["cases"]:
        for name, one in case["result"]["contenders"].items():
            assert (one["calls"], one["failed"]) == (8, 0), name
        assert all(off < 1e-4 for off in case["result"].get("off", {}).values())
    assert set(data["cases"][0]["result"]["contenders"]) == {
        "validate", "classify_images", "Classify", "ClassifyStream", "OIP"
    }  # fmt: skip
    under_load = data["cases"][-1]["result"]["contenders"]
    assert {"main", "compute"} <= set(under_load["prelunet, Classify"]["threads_ms"])
    assert set(under_load["echo, Classify"]["threads_ms"]).isdisjoint({"decode", "compute"})
    text = output.with_suffix(".md").read_text()
    assert text in capsys.readouterr().out
    assert "- triton: not measured: --triton-python is not set" in text
