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


def goals_after(settings: dict[str, Any], *starts: dict[str, Any]) -> list[str]:
    """Return the verdicts on a case. starts: of each the contenders, `_` for `, `, with the numbers that matter."""
    cases = []
    for start, contenders in enumerate(starts):
        unread = {"failed": 0, "rates": [1.0], "cpu_ms": 1.0, "threads_ms": {}}
        named = {name.replace("_", ", "): {**unread, **one} for name, one in contenders.items()}
        result = {"calls_of_a_turn": 8, "contenders": named}
        cases.append({"run": 0, "settings": {**settings, "start": start}, "result": result})
    return goals_of({"runs": [{"tiny": False}], "cases": cases})


PEERS = {"part": "peers", "net": "demo", "protocol": "dense-64", "pictures": "mixed", "clients": 16}


def test_the_median_over_starts_is_compared_with_the_goals_beside_triton() -> None:
    starts = [{"prelunet": {"rates": [rate]}, "triton": {"rates": [100.0]}} for rate in (60.0, 72.0, 90.0)]
    row, mean = goals_after(PEERS, *starts)
    assert row.startswith("- met: demo, dense-64, mixed pictures: 16 clients: images/s ÷ Triton's at least 0.7")
    assert "measured 0.720" in row
    assert mean.startswith("- NOT met: mean of 1 rows: images/s ÷ Triton's at least 0.85 (aim 0.95); measured 0.720")
    failed, _ = goals_after(PEERS, *starts, {"prelunet": {"failed": 2, "first_error": "?"}, "triton": {}})
    assert failed.startswith("- NOT met: ")
    assert failed.endswith("; 2 calls of that table failed")


def test_a_peer_that_is_missing_after_one_start_is_left_out() -> None:
    assert goals_after(PEERS, {"prelunet": {}, "triton": {}}, {"prelunet": {}}) == ["- none measured"]


def test_the_cpu_time_of_a_call_and_the_calls_over_http_and_tls_have_goals() -> None:
    contenders = {"prelunet_Classify": {"cpu_ms": 0.9}, "prelunet_HTTP": {"rates": [0.8]}, "prelunet_Classify_TLS": {}}
    cpu, http, tls = goals_after({"part": "overhead", "clients": 16}, contenders)
    assert cpu.startswith("- met: Calls to a model that computes nothing: 16 clients: CPU ms at most 0.95 (aim 0.8)")
    assert "NOT met" in http
    assert "calls/s of HTTP ÷ Classify at least 0.9; measured 0.800" in http
    assert tls.startswith("- met: ")


def test_the_serving_benchmark_runs_from_end_to_end_without_the_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "serving.json"
    parts = ["throughput", "peers", "apis"]  # tests/client restarts servers, too
    assert serving.main(["--tiny", "--threads", "1", "--output", str(output), "--parts", *parts]) == 0
    results = {case["settings"]["part"]: case["result"] for case in json.loads(output.read_text())["cases"]}
    assert set(results) == {"throughput", "peers", "apis", "overhead"}
    for result in results.values():
        for name, one in result["contenders"].items():
            assert (one["calls"], one["failed"]) == (8, 0), name
        assert all(off < 1e-4 for off in result.get("off", {}).values())
    assert set(results["throughput"]["contenders"]) == {"validate", "Classify"}
    contenders = results["overhead"]["contenders"]
    assert {"main", "compute"} <= set(contenders["prelunet, Classify"]["threads_ms"])
    assert "compute" not in contenders["echo, Classify"]["threads_ms"]
    text = output.with_suffix(".md").read_text()
    assert text in capsys.readouterr().out
    assert "- triton: not measured: --triton-python is not set" in text
