"""`Net.evaluate` and `prelunet.compare`: the same files as `prelunet validate`, `report` and `compare` write."""

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import prelunet
from prelunet.evaluator.cli import run
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.errors import (
    DatasetError,
    EnvironmentFault,
    Interrupted,
    PreluNetError,
    RunFolderError,
    UsageError,
)
from prelunet.evaluator.python.net import Net
from prelunet.evaluator.reporting.html import signed
from prelunet.evaluator.reporting.statistics import wilson_interval
from tests.conftest import ExportedNet
from tests.helpers import tiny_datasets
from tests.helpers.fakes import FakeSession
from tests.helpers.tiny_datasets import LABELS, name_of, write_folder, write_list, write_tar
from tests.validation.shared_data import CLASSES, contents, write_images

IMAGES = 150  # two chunks and part of a third
REPORT = ("report.json", "classes.csv", "report.html")


@pytest.fixture(scope="module")
def net(exported: dict[str, ExportedNet]) -> Net:
    return prelunet.load(exported["demo-image"].path, "cpu")


@pytest.fixture(scope="module")
def data(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 30 images, one of them damaged, into the folders of ten of the net's classes."""
    files = {f"{net.classes[label + 3].wnid}/{name}": tiny_datasets.DATA[name] for name, label in LABELS.items()}
    return write_folder(tmp_path_factory.mktemp("data") / "val", files)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fake_net(session: FakeSession | None = None) -> Net:
    return Net(session or FakeSession(), Path("dir/m.onnx"))  # type: ignore[arg-type]


def test_a_negative_number_of_heat_maps_is_refused(here: Path) -> None:
    with pytest.raises(UsageError, match="heatmaps=-3"):
        fake_net().evaluate("val", heatmaps=-3)


def test_run_and_report_are_those_of_the_commands_byte_for_byte(net: Net, data: Path, here: Path) -> None:
    found = net.evaluate(data, protocol="dense-30", output="by-python", heatmaps=2)
    options = ["--model", str(net.path), "--device", "cpu", "--data", str(data), "--protocol", "dense-30"]
    assert run(["validate", *options, "--heatmaps", "2", "--run", "by-command"]) == 0
    assert run(["report", "by-command"]) == 0
    assert contents(here / "by-python") == contents(here / "by-command")
    maps = Path("by-command/heatmaps.jsonl").read_bytes()
    assert Path("by-python/heatmaps.jsonl").read_bytes() == maps
    assert maps.count(b"\n") == 2
    for name in REPORT:
        assert Path("by-python/report", name).read_bytes() == Path("by-command/report", name).read_bytes(), name
    assert found.report == json.loads(Path("by-command/report/report.json").read_text())
    assert (found.folder, found.html) == (Path("by-python"), Path("by-python/report/report.html"))


def test_options_mean_the_same_as_those_of_the_command(net: Net, data: Path, here: Path) -> None:
    tar = write_tar(here / "flat.tar.gz", tiny_datasets.DATA, "w:gz")
    labels = write_list(here / "labels.txt", lambda name, label: f"{name} {net.classes[label + 3].wnid}")
    chosen = [net.classes[index].wnid for index in (3, 4, 8)]
    text = ",".join(chosen)
    net.evaluate(str(tar), protocol="center", output="a", labels=labels, limit=4, classes=chosen, apply_exif=True)
    net.evaluate(tar, protocol="center", output="b", labels=str(labels), limit=4, classes=text, apply_exif=True)
    options = ["--model", str(net.path), "--device", "cpu", "--data", str(tar), "--protocol", "center", "--run", "c"]
    more = ["--labels", str(labels), "--limit", "4", "--classes", text, "--exif"]
    assert run(["validate", *options, *more]) == 0
    assert contents(here / "a") == contents(here / "b") == contents(here / "c")
    assert json.loads(Path("a/run.json").read_text())["dataset"]["images"] == 4


def test_the_errors_are_those_of_the_images_with_their_intervals(here: Path) -> None:
    write_images(here / "val", [CLASSES[index] for index in (0, 1, 2, 3, 5)], 40)
    found = fake_net().evaluate("val", protocol="center")
    lines = [json.loads(line) for line in (found.folder / "predictions.jsonl").read_text().splitlines()]
    for k, error, interval in ((1, found.top1_error, found.top1_interval), (5, found.top5_error, found.top5_interval)):
        wrong = sum(line["rank"] > k for line in lines)
        assert error == pytest.approx(100 * wrong / 40)
        assert interval == pytest.approx(wilson_interval(wrong, 40), abs=1e-4)  # four decimals in the report
    assert found.top1_error is not None
    assert str(found).startswith(f"top-1 error {found.top1_error:.2f} % [")


def test_without_a_folder_the_run_is_named_after_model_data_and_protocol_and_resumes(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(here / "val", CLASSES, 12)
    first = fake_net().evaluate("val/", protocol="center")
    assert first.folder == Path("runs/m-val-center")
    session = FakeSession()
    with caplog.at_level(logging.INFO, "prelunet"):
        assert fake_net(session).evaluate(here / "val", protocol="center") == first
    assert session.calls == []
    assert "runs/m-val-center: already finished" in caplog.text
    assert "12 images of 6 of the model's 6 classes (class folders)" in caplog.text
    assert fake_net().evaluate("val").folder == Path("runs/m-val-multi-scale")


def test_another_run_in_the_folder_is_refused_and_fresh_starts_over(here: Path) -> None:
    write_images(here / "val", CLASSES, 12)
    fake_net().evaluate("val", protocol="center", output="run")
    before = contents(here / "run")
    with pytest.raises(RunFolderError, match=r"protocol\.name: center in the folder, dense-40 now"):
        fake_net().evaluate("val", protocol="dense-40", output="run")
    assert contents(here / "run") == before
    restarted = fake_net().evaluate("val", protocol="dense-40", output="run", fresh=True)
    assert restarted.report["protocol"]["name"] == "dense-40"


class InterruptedSession(FakeSession):
    """A session during whose second batch Ctrl-C is pressed."""

    def compute(self, staged: Any) -> Outputs:
        if self.calls:
            raise KeyboardInterrupt
        return super().compute(staged)


def test_ctrl_c_keeps_what_is_done_and_the_same_call_resumes(here: Path) -> None:
    write_images(here / "val", CLASSES, IMAGES)
    undisturbed = fake_net().evaluate("val", protocol="center", output="undisturbed")
    with pytest.raises(Interrupted, match=r"m-val-center: .*; 64 of 150 images are done\. Repeat .* call"):
        fake_net(InterruptedSession()).evaluate("val", protocol="center")
    assert not Path("runs/m-val-center/report").exists()
    session = FakeSession()
    resumed = fake_net(session).evaluate("val", protocol="center")
    assert sum(call[0] for call in session.calls) == IMAGES - 64
    assert contents(here / resumed.folder) == contents(here / "undisturbed")
    assert resumed.report == undisturbed.report


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"data": "gone"}, UsageError, "gone: no such file or folder. Pass a folder of images"),
        ({"data": "photo.png"}, DatasetError, "photo.png"),
        ({"data": "unknown"}, DatasetError, "cat"),
        ({"limit": 0}, UsageError, "--limit 0: give the number of images, at least 1"),
        ({"classes": ["nothing"]}, DatasetError, "nothing"),
        ({"protocol": "centre"}, UsageError, "unknown protocol 'centre'"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_written(
    here: Path, arguments: dict[str, Any], error: type[PreluNetError], text: str
) -> None:
    write_images(here / "val", CLASSES, 12)
    Path("photo.png").write_bytes(next((here / "val").rglob("*.png")).read_bytes())
    Path("unknown/cat").mkdir(parents=True)
    Path("unknown/cat/photo.png").write_bytes(Path("photo.png").read_bytes())
    with pytest.raises(error, match=text):
        fake_net().evaluate(**{"data": "val", **arguments})
    assert not Path("runs").exists()


def test_the_table_has_each_line_of_the_run(net: Net, data: Path, here: Path) -> None:
    table = net.evaluate(data, protocol="center").to_pandas()
    lines = [json.loads(line) for line in Path("runs/demo-val-center/predictions.jsonl").read_text().splitlines()]
    assert len(table) == len(lines) == 30
    names = [entry.name for entry in net.classes]
    refused = []
    for row, line in zip(table.to_dict("records"), lines, strict=True):
        assert (row["file"], row["label"], row["name"]) == (line["file"], line["label"], names[line["label"]])
        if "refused" in line:
            refused.append(row["file"])
            assert row["refused"] == line["refused"]
            assert all(pd.isna(row[key]) for key in ("rank", "predicted", "class_1", "score_1", "class_5", "score_5"))
        else:
            assert [[row[f"class_{place}"], row[f"score_{place}"]] for place in range(1, 6)] == line["top"]
            assert (row["rank"], row["capped"]) == (line["rank"], line["capped"])
            assert row["predicted"] == names[line["top"][0][0]]
            assert pd.isna(row["refused"])
    assert [Path(file).name for file in refused] == [name_of(tiny_datasets.BAD)]
    assert (table["rank"] > 1).sum() == sum(line.get("rank", 0) > 1 for line in lines)
    assert np.issubdtype(table["score_1"].dtype, np.floating)


def test_a_table_of_few_allowed_classes_has_a_pair_of_columns_for_each(net: Net, data: Path, here: Path) -> None:
    bad = LABELS[name_of(tiny_datasets.BAD)]
    wnids = [net.classes[label + 3].wnid for label in (bad, *sorted(set(LABELS.values()) - {bad})[:2])]
    table = net.evaluate(data, protocol="center", classes=wnids, restrict_classes=wnids).to_pandas()
    assert [name for name in table.columns if name.startswith("class_")] == ["class_1", "class_2", "class_3"]
    assert table["capped"].tolist() == [False] * len(table)
    assert table["class_3"].isna().tolist() == table["refused"].notna().tolist()
    assert table["refused"].notna().sum() == 1


def test_without_pandas_the_error_has_the_command_that_installs_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(here / "val", CLASSES, 12)
    found = fake_net().evaluate("val", protocol="center")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(EnvironmentFault, match=r"to_pandas needs pandas.*pip install pandas"):
        found.to_pandas()


def test_the_card_of_an_evaluation_shows_errors_worst_classes_and_mistakes(here: Path) -> None:
    write_images(here / "val", CLASSES[:4], 60)
    found = fake_net().evaluate("val", protocol="center")
    lines = [json.loads(line) for line in (found.folder / "predictions.jsonl").read_text().splitlines()]
    card = found._repr_html_()
    for k in (1, 5):
        wrong = sum(line["rank"] > k for line in lines)
        low, high = wilson_interval(wrong, 60) or (0, 0)
        assert f">{100 * wrong / 60:.2f} % [{low:.1f}, {high:.1f}]<" in card
    wrong_of = [sum(line["rank"] > 1 for line in lines if line["label"] == label) for label in range(4)]
    worst = sorted(range(4), key=lambda label: (-wrong_of[label], label))  # of 15 images each
    assert re.findall(r"scope='row'[^>]*>(class \d)<", card) == [f"class {label}" for label in worst if wrong_of[label]]
    mistakes = sorted((line for line in lines if line["rank"] > 1), key=lambda line: -line["top"][0][1])
    text = f"class {mistakes[0]['label']}, taken for class {mistakes[0]['top'][0][0]} ({mistakes[0]['top'][0][1]:.0%})"
    assert card.count("<img src='data:image/") == min(12, len(mistakes))
    assert re.findall(r">(class \d, taken for [^<]*)<", card)[0] == text
    assert repr(found) == f"<Evaluation: {str(found).split(' | ', maxsplit=1)[0]}>"
    assert [name for name in dir(found) if not name.startswith("_")] == [
        *("folder", "html", "report", "to_pandas", "top1_error", "top1_interval", "top5_error", "top5_interval")
    ]


def test_the_card_of_an_evaluation_without_usable_images_says_so(here: Path) -> None:
    path = here / "val" / CLASSES[0] / "bad.png"
    path.parent.mkdir(parents=True)
    path.write_text("no image")
    found = fake_net().evaluate("val", protocol="center")
    assert repr(found) == "<Evaluation: no image evaluated; 1 of 1 refused, listed>"
    assert "no image evaluated; 1 of 1 refused, listed" in found._repr_html_()
    assert "<img" not in found._repr_html_()
    assert "no image was evaluated in both" in prelunet.compare(found, found)._repr_html_()


def test_a_notebook_shows_the_protocol_and_a_link_to_the_report(here: Path) -> None:
    write_images(here / "val", CLASSES, 12)
    found = fake_net().evaluate("val", protocol="center", output="a <b> #1")
    assert str(found).partition(" | ")[2] in found._repr_html_()
    assert '<a href="a%20%3Cb%3E%20%231/report/report.html"' in found._repr_html_()
    assert ">a &lt;b&gt; #1/report/report.html</a>" in found._repr_html_()
    absolute = fake_net().evaluate("val", protocol="center", output=here / "run")
    assert f'<a href="file://{here}/run/report/report.html"' in absolute._repr_html_()


def test_a_comparison_of_evaluations_or_folders_is_that_of_the_command(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(here / "val", CLASSES, 30)
    a, b = (fake_net().evaluate("val", protocol=name, output=name) for name in ("center", "dense-40"))
    by_python = prelunet.compare(a, b)
    top1 = by_python.comparison["top1"]
    assert repr(by_python).startswith(f"<Comparison: top-1 error of B - A: {signed(top1['difference'])} points [")
    files = [Path("dense-40/report/compared-with-center", f"compare.{kind}") for kind in ("json", "csv", "html")]
    written = [file.read_bytes() for file in files]
    assert [by_python.json, by_python.csv, by_python.html] == files
    assert by_python.comparison == json.loads(written[0])
    capsys.readouterr()
    assert run(["compare", "center", "dense-40"]) == 0
    assert capsys.readouterr().out == f"{by_python}\n"
    assert [file.read_bytes() for file in files] == written
    elsewhere = prelunet.compare("center", here / "dense-40", output="elsewhere", data="val")
    assert elsewhere.html == Path("elsewhere/compare.html")
    assert elsewhere.json.read_bytes() == written[0]
    assert '<a href="elsewhere/compare.html"' in elsewhere._repr_html_()
    with pytest.raises(RunFolderError, match=r"gone: no run\.json"):
        prelunet.compare("gone", b)


def test_the_card_of_a_comparison_shows_changed_classes_and_the_images_that_only_one_run_gets_wrong(here: Path) -> None:
    write_images(here / "val", CLASSES[:4], 60)
    runs = [fake_net().evaluate("val", protocol=name, output=name) for name in ("center", "dense-40")]
    found = prelunet.compare(*runs)
    card = found._repr_html_()
    changes = [entry["top1"]["difference"] for entry in found.comparison["classes"]]
    worse = sorted((n for n in range(4) if changes[n] > 0), key=lambda n: (-changes[n], n))
    better = sorted((n for n in range(4) if changes[n] < 0), key=lambda n: (changes[n], n))
    assert worse or better, "some class changes"
    assert re.findall(r"scope='row'[^>]*>(class \d)<", card) == [f"class {n}" for n in worse + better]
    lines = [[json.loads(line) for line in (run.folder / "predictions.jsonl").read_text().splitlines()] for run in runs]
    flips = {
        side: sum((a["rank"] > 1, b["rank"] > 1) == way for a, b in zip(*lines, strict=True))
        for side, way in (("A", (True, False)), ("B", (False, True)))
    }
    for side, count in flips.items():
        assert (f"Wrong in {side} only: {count} images" in card) == (count > 0)
    assert 0 < card.count("<img src='data:image/") <= sum(flips.values())
    assert [name for name in dir(found) if not name.startswith("_")] == ["comparison", "csv", "html", "json"]
