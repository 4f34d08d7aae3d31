"""`prelunet inspect --data` and `inspect RUN`: measurements of layers on images, and the trend of slopes with depth."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from prelunet.evaluator.cli import run
from prelunet.evaluator.datasets import open_dataset
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.imaging.views import make_views
from prelunet.evaluator.protocols import EvaluationProtocol
from prelunet.training.inspection.describe_file import inspect_file
from prelunet.training.inspection.layer_log import LayerResponse
from prelunet.training.inspection.layer_statistics import measure_layers
from prelunet.training.inspection.plots import draw_layers
from prelunet.training.inspection.slope_trend import slope_trend
from prelunet.training.loop.tracking import RunLogs
from prelunet.training.net.checkpoints import read_checkpoint, write_checkpoint
from prelunet.training.net.dense_reference import subtract_mean
from prelunet.training.net.network import network_from_checkpoint
from tests.helpers.tiny_nets import TINY, mean_image, tiny_checkpoint
from tests.training.training_folders import make_dataset, write_image

if TYPE_CHECKING:
    from tests.conftest import ExportedNet

WNIDS = ("n00000000", "n00000001", "n00000002")
CENTER = EvaluationProtocol("center", "center", (27,), mirror=False, crop=TINY.crop)  # 27 = round(24·256/224)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """Write TINY with a mean image, and weights small enough for scores between 0 and 1."""
    checkpoint = tiny_checkpoint(mean=mean_image())
    tensors = {**checkpoint.tensors, "conv1.weight": checkpoint.tensors["conv1.weight"] / 1000}
    write_checkpoint(tmp_path / "net", replace(checkpoint, tensors=tensors))
    return tmp_path / "net"


def output_of(arguments: list[str | Path], capsys: pytest.CaptureFixture[str], *, exit_code: int = 0) -> str:
    """Run the command; return its output, or its error if it should fail."""
    assert run(list(map(str, arguments))) == exit_code
    captured = capsys.readouterr()
    return " ".join((captured.out if exit_code == 0 else captured.err).split())


def plain_measurement(net: Path, data: Path, files: list[int]) -> list[dict[str, object]]:
    """Measure some files of a dataset on the views of the protocol `center`."""
    checkpoint = read_checkpoint(net)
    dataset = open_dataset(data, split="val", wnids=WNIDS)
    samples = [dataset.samples[number] for number in files]
    views = [make_views(decode_image(dataset.read(sample)), CENTER)[0].image for sample in samples]
    crops = subtract_mean(torch.from_numpy(np.stack(views)), checkpoint.mean)
    labels = torch.tensor([sample.label for sample in samples])
    return [layer.to_json() for layer in measure_layers(network_from_checkpoint(checkpoint), crops, labels)]


def test_layers_are_measured_on_central_views_spread_over_val(
    net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "data", val=5, classes=WNIDS)
    assert run(["inspect", str(net), "--data", str(data), "--images", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["images"], found["refused"]) == ("checkpoint", 4, {})
    assert found["layers"] == plain_measurement(net, data, [0, 3, 7, 11])  # floor(i·15/4)
    assert [layer["layer"] for layer in found["layers"]] == ["conv1", "conv2", "fc1", "fc2", "fc3"]


def test_the_measured_layers_are_printed_as_a_table(
    net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "data", val=2, classes=WNIDS)
    assert run(["inspect", str(net), "--data", str(data)]) == 0
    captured = capsys.readouterr()
    (row,) = (line for line in captured.out.splitlines() if line.startswith("conv2") and "%" in line)
    layer = plain_measurement(net, data, list(range(6)))[1]
    spread = [f"{layer[key]:.4g}" for key in ("mean", "variance", "gradient_variance")]
    assert row.split() == ["conv2", *spread, f"{100 * layer['never_positive']:.1f}", "%", f"{layer['slope']:.3f}"]
    assert "only the negative side" in " ".join(captured.out.split())
    assert "requested" not in captured.err  # --images was not given
    assert run(["inspect", str(net), "--data", str(data), "--images", "7"]) == 0
    assert "has fewer than the 7 images requested" in capsys.readouterr().err


def test_channels_that_are_never_positive_are_called_dead_with_relu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny_checkpoint("relu")
    tensors = {**checkpoint.tensors, "fc1.bias": np.array([1e6, -1e6, -1e6, 1e6, 1e6, 1e6], np.float32)}
    write_checkpoint(tmp_path / "net", replace(checkpoint, tensors=tensors))
    data = make_dataset(tmp_path / "data", val=2, classes=WNIDS)
    assert run(["inspect", str(tmp_path / "net"), "--data", str(data)]) == 0
    out = capsys.readouterr().out
    (_, row) = (line for line in out.splitlines() if line.startswith("fc1"))  # of the layers, and of the responses
    assert row.split()[-3:] == ["33.3", "%", "–"]  # two of six; a ReLU learns no slope
    assert "dead: share of the channels that are 0 for every image" in out


def test_an_image_that_cannot_be_decoded_is_left_out_and_named(
    net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "data", val=2, classes=WNIDS)
    (data / "val" / WNIDS[1] / "000.png").write_bytes(b"no image")
    assert run(["inspect", str(net), "--data", str(data), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["images"], list(found["refused"])) == (5, [f"{WNIDS[1]}/000.png"])
    assert found["layers"] == plain_measurement(net, data, [0, 1, 3, 4, 5])
    assert f"skipped: {WNIDS[1]}/000.png" in captured.err
    for path in data.glob("val/*/*.png"):
        path.write_bytes(b"no image")
    assert "0 of 6 images can be decoded" in output_of(["inspect", net, "--data", data], capsys, exit_code=2)


def test_the_plot_shows_every_layer(net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "data", val=2, classes=WNIDS)
    for name in ("once.svg", "again.svg"):
        assert run(["inspect", str(net), "--data", str(data), "--plot", str(tmp_path / name), "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err.splitlines()[-1] == f"plot: {tmp_path / name}"  # after the progress
        json.loads(captured.out)  # the plot's name is not on stdout
    assert (tmp_path / "once.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()
    assert b"var(" not in (tmp_path / "once.svg").read_bytes()  # a standalone file has no style sheet
    texts = ["".join(text.itertext()) for text in ElementTree.parse(tmp_path / "once.svg").iter(f"{SVG}text")]
    for title in ("response", "gradient", "slope", "never positive"):
        assert any(title in text for text in texts), title
    assert texts.count("conv2") == texts.count("fc3") == 4  # panels


def test_a_plot_of_two_nets_draws_both_on_the_same_axes_and_names_them(
    net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "data", val=2, classes=WNIDS)
    plain = tiny_checkpoint("relu")
    write_checkpoint(tmp_path / "relu", plain)
    pair = [str(net), str(tmp_path / "relu")]
    plot = tmp_path / "both.svg"
    assert run(["inspect", *pair, "--data", str(data), "--plot", str(plot), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["layers"] for entry in found] == [plain_measurement(Path(file), data, [*range(6)]) for file in pair]
    tree = ElementTree.parse(plot)
    texts = ["".join(text.itertext()) for text in tree.iter(f"{SVG}text")]
    assert [texts.count(name) for name in pair] == [1, 1]  # one legend for all panels
    assert texts.count("conv2") == 4  # panels, each with one axis
    lines = [line for line in tree.iter(f"{SVG}path") if line.get("aria-roledescription") == "line mark"]
    assert len(lines) == 2 + 2 + 1 + 2  # a net of ReLUs has no slopes
    colors = {line.get("stroke") for line in lines}
    assert len(colors) == 2


def test_nets_of_different_depths_share_an_axis_in_order_of_depth() -> None:
    layers = {
        "deep": ["conv1", "conv2_1", "conv2_2", "conv2_10", "fc1", "fc3"],
        "other": ["conv1_1", "conv1_2", "conv2_1", "fc1", "fc2", "fc3"],
    }
    measured = {
        net: [LayerResponse(name, 0.0, 1.0, 1e-4, 0.5, 0.25).to_json() for name in names]
        for net, names in layers.items()
    }
    tree = ElementTree.fromstring(draw_layers(measured))
    texts = ["".join(text.itertext()) for text in tree.iter(f"{SVG}text")]
    first_axis = [text for text in texts if text.startswith(("conv", "fc"))][:9]
    assert first_axis == ["conv1", "conv1_1", "conv1_2", "conv2_1", "conv2_2", "conv2_10", "fc1", "fc2", "fc3"]


def test_several_files_are_described_one_after_another(
    net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "relu", tiny_checkpoint("relu"))
    out = output_of(["inspect", net, tmp_path / "relu"], capsys)
    assert out.index("Slopes of this net") < out.index("No slopes: relu learns none.")
    assert run(["inspect", str(net), str(tmp_path / "relu"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [inspect_file(net), inspect_file(tmp_path / "relu")]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("net --data other", "not among the model's 3 classes"),
        ("net --data empty", "no images"),
        ("net --data nowhere", "no such file or folder"),
        ("net --data one", "1 of 1 images can be decoded, but a variance needs two"),
        ("net --plot plot.svg", "nothing to plot without measurements"),
        ("net --images 5", "--images: needs images"),
        ("net --labels labels.txt", "--labels: needs images"),
        ("net --data data --plot no/plot.svg", "does not exist"),
        ("net --data data --plot layers.pdf", "Give a name that ends in .svg"),
        ("run --plot history.png", "Give a name that ends in .svg"),
        ("run --plot svg", "Give a name that ends in .svg"),
        ("run --data 'my images'", "prelunet inspect run/last.safetensors --data 'my images'"),
        ("empty", "no diagnosis.jsonl, so"),
        ("net run --plot both.svg", "run: a run is shown alone. To compare nets, give checkpoints"),
        ("net run --data data", "run: a run is shown alone"),
    ],
)
@pytest.mark.usefixtures("net")
def test_invalid_requests_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, reason: str
) -> None:
    make_dataset(tmp_path / "data", train=1, val=1, classes=WNIDS)
    make_dataset(tmp_path / "other", train=1, val=1)
    write_image(tmp_path / "one" / WNIDS[2] / "0.png", 0, (30, 40), 9)
    (tmp_path / "empty/val").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    history(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert reason in output_of(["inspect", *shlex.split(command)], capsys, exit_code=2)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_layers_of_a_model_file_are_not_measured(
    exported: "dict[str, ExportedNet]", data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = output_of(["inspect", exported["demo-channel"].path, "--data", data], capsys, exit_code=2)
    assert "layers cannot be measured in a model file" in message


def test_a_plot_of_another_format_is_refused_before_any_work_and_an_existing_file_is_kept(
    net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plot.png").write_bytes(b"an image")
    for file in (net, tmp_path / "missing"):  # the file is not opened
        message = output_of(
            ["inspect", file, "--data", "nowhere", "--plot", tmp_path / "plot.png"], capsys, exit_code=2
        )
        assert "plots are written as SVG" in message
    assert (tmp_path / "plot.png").read_bytes() == b"an image"


# The history of a run


def history(folder: Path) -> Path:
    """Write three measurements of three layers, one of which has neither slope nor activation."""
    logs = RunLogs(folder, events=False, diagnose=True, report=pytest.fail)
    for step, spread in ((10, 4.0), (20, 9.0), (30, 0.25)):
        layers = (
            LayerResponse("conv1", 0.0, spread, 1e-6, 0.0, 0.25 + step / 100),
            LayerResponse("fc1", 0.0, 1.0, 1e-4, 0.5, 0.25),
            LayerResponse("fc3", 0.0, 1.0, float("inf"), None, None),
        )
        logs.write_layers(step, lambda layers=layers: layers)
    return folder


def test_a_history_is_printed_from_its_first_to_its_last_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = output_of(["inspect", history(tmp_path)], capsys)
    assert "3 measurements, step 10 → step 30" in out
    assert "conv1 2 → 0.5 0.001 0.0 % 0.350 → 0.550" in out
    assert "fc3 1 not finite – –" in out
    assert (
        "Slopes at step 30: smaller with depth (rank correlation -1.00, range 0.300); "
        "conv1 0.550, the layers above it 0.250" in out
    )


def test_a_history_is_drawn_with_a_line_for_each_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(history(tmp_path)), "--plot", str(tmp_path / "plot.svg")]) == 0
    assert capsys.readouterr().err == f"plot: {tmp_path / 'plot.svg'}\n"
    tree = ElementTree.parse(tmp_path / "plot.svg")
    texts = ["".join(text.itertext()) for text in tree.iter(f"{SVG}text")]
    assert [texts.count(name) for name in ("conv1", "fc1", "fc3")] == [1, 1, 1]  # one legend for all panels
    lines = [line for line in tree.iter(f"{SVG}path") if line.get("aria-roledescription") == "line mark"]
    assert len(lines) == 3 + 2 + 2 + 2  # fc3 has only a response: its gradient is not finite


def test_a_history_is_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(history(tmp_path)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "history"
    assert [entry["step"] for entry in found["measurements"]] == [10, 20, 30]
    assert found["measurements"][1]["layers"][0]["variance"] == 9.0


# Slopes and depth


@pytest.mark.parametrize("values", [[0.6, 0.1, 0.3, 0.2], [0.1, 0.3, 0.3, -0.2, 0.9], [0.5, 0.4, 0.4]])
def test_the_trend_is_the_rank_correlation_of_slope_and_depth(values: list[float]) -> None:
    trend = slope_trend({f"conv{number}": value for number, value in enumerate(values)})
    assert trend is not None
    assert trend.rank_correlation == pytest.approx(
        spearmanr(range(len(values)), values).statistic, abs=5e-5
    )  # four digits
    assert (trend.first, trend.others) == (values[0], pytest.approx(np.mean(values[1:]), abs=1e-6))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            [0.9, 0.5, 0.4, 0.1],
            "smaller with depth (rank correlation -1.00, range 0.800); conv0 0.900, the layers above it 0.333",
        ),
        ([0.1, 0.2, 0.3], "larger with depth (rank correlation +1.00, range 0.200)"),
        ([0.2, 0.1, 0.4, 0.1], "no clear order with depth (rank correlation -0.21, range 0.300)"),
        ([0.25, 0.25, 0.25], "alike at every depth (range below 0.01); conv0 0.250"),
        ([0.3, 0.31], "larger with depth (rank correlation +1.00, range 0.010)"),
    ],
)
def test_the_trend_is_described_in_words(values: list[float], words: str) -> None:
    assert str(slope_trend({f"conv{number}": value for number, value in enumerate(values)})).startswith(words)


def test_slopes_that_have_hardly_changed_are_alike_in_any_order() -> None:
    trend = slope_trend({f"conv{number}": 0.249995 + number * 1e-6 for number in range(4)})  # as after 12 steps
    assert trend is not None
    assert (trend.range, trend.rank_correlation) == (3e-6, None)
    trend = slope_trend({"conv1": 0.2599, "conv2": 0.25})
    assert trend is not None
    assert str(trend) == "alike at every depth (range below 0.01); conv1 0.260, the layers above it 0.250 on average"


def test_a_net_without_slopes_has_no_trend(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "net", tiny_checkpoint("relu"))
    assert inspect_file(tmp_path / "net")["slope_trend"] is None
    assert slope_trend({"conv1": 0.3}) is None


def test_the_trend_is_printed_beside_that_of_the_paper(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(["inspect", net], capsys)
    assert f"Slopes of this net: {inspect_file(net)['slope_trend']['text']}." in out
    # Table 1, channel-wise: conv1 0.596; the mean of the twelve others is 2.379 / 12.
    assert (
        "Table 1: smaller with depth (rank correlation -0.87, range 0.522); conv1 0.596, the layers above it 0.198"
        in out
    )
