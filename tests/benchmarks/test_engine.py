"""benchmarks/engine: its reference scores against the oracle, and a rehearsal of each benchmark."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common.dense_torch import DenseNet
from benchmarks.engine import competitors, run
from benchmarks.engine.competitors import COMPETITORS, REFERENCE
from benchmarks.engine.table import goals_of
from prelunet.evaluator.architectures import ACTIVATIONS
from prelunet.training.net.checkpoints import Checkpoint
from prelunet.training.net.dense_reference import dense_windows
from prelunet.training.net.network import PreluNet, load_tensors
from tests.helpers.discriminating_nets import discriminating_checkpoint, noise
from tests.helpers.tiny_nets import tiny_checkpoint


def check_against_every_window(checkpoint: Checkpoint, *, channels_last: bool = False) -> None:
    """Compare the dense torch net in float64 with the net applied window by window."""
    net = PreluNet(checkpoint.architecture, len(checkpoint.classes))
    load_tensors(net, checkpoint.tensors)
    net = net.eval().double()
    mean = checkpoint.mean.astype(np.float64)
    dense = DenseNet(net, mean, dtype=torch.float64, channels_last=channels_last)
    crop = checkpoint.architecture.crop
    for height, width in ((crop, crop), (crop, crop + 13), (crop + 21, crop + 7)):
        images = np.stack([noise(height, width, seed) for seed in (1, 2)])
        expected = [dense_windows(net, image, checkpoint.mean)[0].mean(axis=(0, 1)) for image in images]
        # rtol: float64 sums in another order
        np.testing.assert_allclose(dense.scores(images), expected, rtol=1e-10, err_msg=f"{height}x{width}")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_reference_of_all_competitors_scores_every_window(activation: str, channels_last: bool) -> None:
    check_against_every_window(tiny_checkpoint(activation), channels_last=channels_last)


def test_the_reference_has_the_pyramid_of_a_net_whose_bins_overlap_and_repeat() -> None:
    check_against_every_window(discriminating_checkpoint("demo", classes=7))


def test_the_engine_benchmark_runs_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "engine.json"
    chosen = ["naive", "onnxruntime, plain export", "ours, cpu"]
    arguments = ["--nets", "demo", "--protocols", "dense-28-45", "--images", "2", "2", "--seconds", "0"]
    arguments += ["--threads", "1", "--output", str(output), "--only", *chosen]
    monkeypatch.setattr("sys.argv", ["run.py", *arguments])
    monkeypatch.setattr(competitors, "PEAK_SIDE", 64)
    run.main()
    result = json.loads(output.read_text())
    (one,) = result["results"]
    assert one["protocol"]["name"] == "dense-28-45"
    rows = {row["competitor"]: row for row in one["rows"]}
    assert set(rows) == set(COMPETITORS)
    there = {name for name, row in rows.items() if "not_available" not in row}
    assert {"naive", REFERENCE, "onnxruntime, plain export", "ours, cpu"} <= there
    assert rows["ours, cpu"]["images"] == 2
    assert rows["ours, cpu"]["largest_deviation"] < 1e-5
    assert rows["ours, cpu"]["peak_memory_mb"] < rows[REFERENCE]["peak_memory_mb"]  # which needs torch
    assert output.with_suffix(".md").read_text() in capsys.readouterr().out


def test_the_goals_of_int8_depend_on_the_processor() -> None:
    speeds = {"ours, openvino": 100.0, "ours, openvino bf16": 200.0, "onnxruntime, plain export": 50.0}
    rows = [
        {
            "competitor": name,
            "precision": COMPETITORS[name].precision,
            "ours": False,
            "gflop_per_second": {"median": speed},
        }
        for name, speed in {**speeds, "ours, openvino int8": 360.0}.items()
    ]
    result = {"net": "A", "protocol": {"name": "multi-scale", "scales": [256, 384]}, "rows": rows}
    vnni, with_amx = (goals_of([result], amx=amx) for amx in (False, True))
    assert [(goal["measured"], goal["met"]) for goal in vnni] == [(3.6, True)]
    assert [(goal["measured"], goal["met"]) for goal in with_amx] == [(1.8, True), (7.2, False)]
