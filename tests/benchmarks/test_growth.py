import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.common.results import shuffled
from benchmarks.engine import growth
from benchmarks.engine.growth import ENGINES, interleave
from benchmarks.engine.growth_plots import draw, points_of, tables
from benchmarks.engine.isolated import repeated, run_isolated
from prelunet.evaluator.architectures import multiply_adds
from prelunet.evaluator.datasets import Dataset, Sample
from prelunet.evaluator.errors import EnvironmentFault

FIRST, SECOND, HALF = "onnxruntime fp32", "OpenVINO fp32", "OpenVINO bf16"
ALL = (FIRST, SECOND, HALF)


def measured(output: Path, *more: str) -> dict[str, Any]:
    """Rehearse on one engine and return the result file."""
    arguments = ["--tiny", "--engines", FIRST, "--most-images", "100", "--output", str(output), *more]
    assert growth.main(arguments) == 0
    return json.loads(output.read_text())


def made_up(**changes: Any) -> dict[str, Any]:
    """Return a result file of every part; seconds grow with the operations, bf16 is twice as fast."""
    cases = []

    def add(part: str, settings: dict[str, Any], **result: Any) -> None:
        cases.append({"run": 0, "settings": {"part": part, **settings}, "seconds": 1.0, "result": result})

    def seconds(gflop: float) -> dict[str, list[float]]:
        return {FIRST: [gflop / 500, gflop / 400, gflop / 100], SECOND: [gflop / 480], HALF: [gflop / 1000]}

    for scale, windows, head in ((224, 10, 4.0), (384, 418, 128.0), (1024, 7344, 2250.0)):
        amount = {"pixels": 2 * scale * scale, "views": [[scale, scale]] * 2, "windows": windows}
        gflop = head + scale * scale / 500
        add("area", {"scale": scale}, seconds=seconds(gflop), gflop=gflop, head_gflop=head, **amount)
        for engine in ALL:
            add("memory", {"scale": scale, "engine": engine}, loading_mb=1500, settled_mb=1000, peak_mb=1200 + scale,
                foretold_loading_mb=1600, foretold_settled_mb=1100, foretold_peak_mb=2200 + scale)  # fmt: skip
    for times in (1.0, 4.0):
        amount = {"pixels": 1000, "views": [[256, int(256 * times)]] * 2, "windows": 8}
        add("elongation", {"times": times}, seconds=seconds(100 * times), gflop=100 * times, head_gflop=5, **amount)
    for scales in ((256,), (256, 384, 480)):
        amount = {"pixels": 1000, "views": [[256, 256]] * 2 * len(scales), "windows": 8}
        add("scales", {"scales": list(scales)}, seconds=seconds(100), gflop=100, head_gflop=5, **amount)
    for engine in ALL:
        for classes in (10, 21841):
            add("classes", {"classes": classes, "engine": engine}, seconds=[0.5, 0.7, 0.6], gflop=300, file_mb=800.4,
                window_scores_mb=34.8, loading_mb=1500, peak_mb=1700)  # fmt: skip
        for images in (10, 100, 10_100):
            peak = 30 + 60 * (images > 10) + images // 1000
            add("dataset", {"images": images, "engine": engine}, seconds=images / 400, peak_mb=peak,
                foretold_peak_mb=900, list_bytes_an_image=150, written_bytes_an_image=238)  # fmt: skip
    run = {"date": "2026-11-20", "command": "python -m benchmarks.engine.growth", "tiny": False,
           "machine": {"cores": 2, "cpu": "a processor"}, "versions": {"numpy": "2.4.6"},
           "engines": {name: {"provider": name} for name in ALL}}  # fmt: skip
    return {"part": "growth", "runs": [run], "cases": cases, **changes}


def table_of(text: str, part: str) -> list[dict[str, str]]:
    """Return the rows of a part's table, by column."""
    lines = text.split(f"\n\n{part}\n\n")[1].partition("\n\n")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_a_rehearsal_measures_every_kind_of_point_and_the_same_command_measures_none_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "growth.json"
    parts = ["--parts", "elongation", "memory", "dataset"]
    found = measured(output, *parts)
    assert [case["settings"] for case in found["cases"]] == [
        {"part": "elongation", "times": 1.0},
        {"part": "elongation", "times": 4.0},
        {"part": "memory", "scale": 224, "engine": FIRST},
        {"part": "memory", "scale": 640, "engine": FIRST},
        {"part": "dataset", "images": 100, "engine": FIRST},
    ]
    square, long, small, large, dataset = (case["result"] for case in found["cases"])
    assert (square["views"], long["views"]) == ([[32, 32]] * 2, [[32, 128]] * 2)  # 256 pixels, an eighth of them
    assert len(long["seconds"][FIRST]) == growth.MIN_ROUNDS
    assert min(*square["seconds"][FIRST], small["seconds"], dataset["seconds"]) > 0
    for point in (small, large, dataset):
        assert point["foretold_loading_mb"] > point["loading_mb"] > 10
        assert point["foretold_settled_mb"] > point["settled_mb"] > 10
        assert point["foretold_peak_mb"] > point["peak_mb"] > point["settled_mb"] - 10  # pages that were given back
    assert large["peak_mb"] > small["peak_mb"]
    assert small["refused"] == large["refused"] == 0
    assert dataset["refused"] == 0
    assert dataset["written_bytes_an_image"] > 40  # ten scores alone
    assert 100 < dataset["list_bytes_an_image"] < 400  # three references, a name of 30 characters
    for name in ("run_engine_isolated", "interleave"):
        monkeypatch.setattr(growth, name, lambda *_: pytest.fail("measured again"))
    assert measured(output, *parts)["cases"] == found["cases"]


def test_classes_and_scales_are_measured_with_other_nets_and_protocols(tmp_path: Path) -> None:
    found = measured(tmp_path / "growth.json", "--parts", "scales", "classes")
    one, six, few, many = (case["result"] for case in found["cases"])
    assert (len(one["views"]), len(six["views"])) == (2, 12)
    assert few["window_scores_mb"] == 0  # 120 windows of ten classes: 5 kB
    assert many["window_scores_mb"] == round(120 * 21_841 * 4 / 2**20, 2)
    assert many["file_mb"] - few["file_mb"] == pytest.approx(21_831 * 257 * 4 / 2**20, abs=1.5)  # and their names
    assert many["peak_mb"] > few["peak_mb"]
    assert len(many["seconds"]) == 2  # the first of three calls is a warm-up


def test_an_engine_that_does_not_come_up_is_left_out_and_the_tables_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = growth.open_with_placement

    def without_openvino(path: Path, placement: Any) -> Any:
        if placement.device == "openvino":
            raise EnvironmentFault("openvino is not installed")
        return opens(path, placement)

    monkeypatch.setattr(growth, "open_with_placement", without_openvino)
    output = tmp_path / "growth.json"
    assert growth.main(["--tiny", "--parts", "elongation", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert [list(case["result"]["seconds"]) for case in found["cases"]] == [[FIRST], [FIRST]]
    text = tables(found)
    assert f"{HALF}: not measured: openvino is not installed" in text
    assert "A rehearsal" in text
    assert "area: not measured" in text


@pytest.mark.parametrize("windows", [1, 6])
def test_head_operations_are_those_of_the_fully_connected_layers_in_every_window(windows: int, tmp_path: Path) -> None:
    nets = growth.Nets("cpu", tiny=True, files=tmp_path, count=17)
    sides = {1: (28, 28), 6: (32, 36)}[windows]  # stride 4: 1x1 and 2x3 windows
    amount = growth._amount(nets, [sides, sides])
    layers = (9 + 4 + 1) * 96 * 256 + 256 * 256 + 256 * 17
    assert amount["windows"] == 2 * windows
    assert amount["head_gflop"] == pytest.approx(4 * windows * layers / 1e9, abs=1e-4)
    whole = 4 * multiply_adds(nets.net("A"), *sides, 17) / 1e9
    assert amount["gflop"] == pytest.approx(whole, abs=1e-4)
    assert amount["gflop"] > amount["head_gflop"]


def test_engines_take_turns_in_shuffled_rounds_after_an_untimed_call() -> None:
    calls: list[str] = []

    def answer(name: str, value: float) -> Any:
        return lambda: calls.append(name) or np.array([value, 1 - value])

    taken, deviations = interleave({name: answer(name, 0.25 + 1e-5 * i) for i, name in enumerate(ALL)}, tiny=True)
    assert calls == [*ALL, *shuffled(ALL, 0), *shuffled(ALL, 1)]
    assert {name: len(seconds) for name, seconds in taken.items()} == dict.fromkeys(ALL, 2)
    assert deviations == {FIRST: 0.0, SECOND: pytest.approx(1e-5 / 0.75), HALF: pytest.approx(2e-5 / 0.75)}


@pytest.mark.parametrize(("name", "value", "right"), [
    (SECOND, 0.251, False), (HALF, 0.251, True), (HALF, 0.5, False), (SECOND, float("nan"), False),
])  # fmt: skip
def test_wrong_scores_are_no_measurement(name: str, value: float, right: bool) -> None:
    answers = {FIRST: lambda: np.array([0.25, 0.75]), name: lambda: np.array([value, 0.75])}
    if right:
        interleave(answers, tiny=True)
    else:
        with pytest.raises(RuntimeError, match=f"{name}: scores deviate"):
            interleave(answers, tiny=True)


def test_a_point_that_fails_is_an_error_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("scores are off")

    monkeypatch.setattr(growth, "interleave", fails)
    output = tmp_path / "growth.json"
    assert growth.main(["--tiny", "--engines", FIRST, "--parts", "elongation", "--output", str(output)]) == 1
    assert points_of(json.loads(output.read_text()), "elongation") == []


class Names:
    """Reads a file as its own name."""

    def read(self, file: str) -> bytes:
        return file.encode()


def small_dataset() -> Dataset:
    samples = [Sample(f"{label}/{index}.png", label, 7) for label in range(3) for index in range(2)]
    return Dataset(Path("somewhere"), ("0", "1", "2"), samples, Names())


def test_a_repeated_dataset_has_each_image_equally_often_under_names_of_their_own() -> None:
    grown = repeated(small_dataset(), 18)
    names = [sample.file for sample in grown.samples]
    assert len(names) == 18
    assert names == sorted(set(names))
    assert [sample.label for sample in grown.samples] == [0, 0, 1, 1, 2, 2] * 3
    assert [grown.read(sample) for sample in grown.samples[6:8]] == [b"0/0.png", b"0/1.png"]


def test_a_smaller_dataset_is_chosen_evenly_and_an_uneven_repetition_refused() -> None:
    assert [sample.file for sample in repeated(small_dataset(), 3).samples] == [
        "0000/0/0.png",
        "0000/1/0.png",
        "0000/2/0.png",
    ]
    with pytest.raises(SystemExit, match="not a multiple of 6"):
        repeated(small_dataset(), 20)


def test_large_photos_are_made_once_with_a_class_each(tmp_path: Path) -> None:
    folder = growth.photos(tmp_path, [(30, 40), (17, 68)])
    files = sorted(folder.rglob("*.jpg"))
    assert [Image.open(file).size for file in files] == [(40, 30), (68, 17)]
    assert len({file.parent for file in files}) == 2
    written = [file.stat().st_mtime_ns for file in files]
    assert growth.photos(tmp_path, [(30, 40), (17, 68)]) == folder
    assert [file.stat().st_mtime_ns for file in files] == written


def test_what_fails_alone_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"failed in its own process: (?s:.*)no\.onnx"):
        run_isolated({"task": "validate", "model": str(tmp_path / "no.onnx"), "device": "cpu", "precision": "fp32"})


def test_every_plot_is_drawn_on_white_with_titles_units_and_the_engines_names(tmp_path: Path) -> None:
    draw(made_up(), tmp_path)
    drawn = {file.stem: file.read_text() for file in tmp_path.iterdir()}
    words = {
        "growth-area": ("pixels of one view (millions)", "seconds for a view"),
        "growth-elongation": ("longer side / shorter side",),
        "growth-memory": ("peak after loading (GB)", "measured", "estimated maximum"),
        "growth-classes": ("21,841",),
        "growth-dataset": ("10,100", "peak after loading (MB)"),
    }
    assert set(drawn) == set(words)
    for name, svg in drawn.items():
        assert 'fill="white"' in svg
        assert "var(" not in svg, name
        assert "NaN" not in svg, name
        assert len(svg) < 60_000  # small files: they are in the repository
        assert all(f">{word}" in svg for word in (*ALL, *words[name])), name


def test_points_are_drawn_where_their_values_are(tmp_path: Path) -> None:
    draw(made_up(), tmp_path)
    svg = (tmp_path / "growth-dataset.svg").read_text().replace(",", "")
    point = r"images of the dataset: ([\d.]+); peak after loading \(MB\): ([\d.]+); series: OpenVINO bf16"
    described = {tuple(map(float, found)) for found in re.findall(point, svg)}
    assert described == {(10.0, 30.0), (100.0, 90.0), (10100.0, 100.0)}


def test_parts_that_were_not_measured_are_not_drawn(tmp_path: Path) -> None:
    only = [case for case in made_up()["cases"] if case["settings"]["part"] == "dataset"]
    draw(made_up(cases=only), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["growth-dataset.svg"]


def test_of_a_point_that_was_measured_twice_the_last_counts_and_errors_never() -> None:
    settings = {"part": "area", "scale": 224}
    cases = [{"run": 0, "settings": settings, "result": {"gflop": 1}},
             {"run": 1, "settings": settings, "result": {"gflop": 2}},
             {"run": 1, "settings": settings, "result": {"error": "no"}},
             {"run": 1, "settings": {**settings, "part": "memory"}, "result": {"gflop": 3}}]  # fmt: skip
    assert points_of({"cases": cases}, "area") == [{**settings, "gflop": 2}]


def test_the_tables_tell_medians_rates_shares_and_what_was_foretold() -> None:
    text = tables(made_up())
    first, _, last = table_of(text, "area")
    gflop = 4 + 224 * 224 / 500
    assert (first["scale"], first["view"], first["windows"]) == ("224", "224x224", "5")
    assert first["GFLOP"] == f"{gflop:.0f}"
    assert first["of it head"] == f"{100 * 4 / gflop:.0f} %"
    assert first[f"{FIRST}: s (GFLOP/s)"] == f"{gflop / 400:.3g} (400)"  # the median of three, not the mean
    assert last[f"{HALF}: s (GFLOP/s)"].endswith("(1000)")
    (largest,) = [row for row in table_of(text, "memory") if row["engine"] == SECOND and row["scale"] == "1024"]
    assert (largest["loaded"], largest["peak after loading"]) == ("1,000 / 1,100", "2,224 / 3,224")
    assert [row["scales"] for row in table_of(text, "scales")] == ["256", "256, 384, 480"]
    classes = [row for row in table_of(text, "classes") if row["classes"] == "21,841"]
    assert {(row["s"], row["file MB"], row["peak after loading MB"]) for row in classes} == {("0.6", "800", "1700")}
    (many,) = [row for row in table_of(text, "dataset") if (row["engine"], row["images"]) == (FIRST, "10,100")]
    assert many["ms per image"] == "2.5"
    assert text.startswith("Measured 2026-11-20 on 2 cores of a processor with numpy 2.4.6: `python")
    assert "rehearsal" not in text


def test_drawing_measures_nothing_and_prints_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "_engines", lambda *_: pytest.fail("measured"))
    output = tmp_path / "growth.json"
    output.write_text(json.dumps(made_up()))
    assert growth.main(["--output", str(output), "--draw", str(tmp_path / "drawn")]) == 0
    assert tables(made_up()) in capsys.readouterr().out
    assert (tmp_path / "drawn" / "growth-dataset.svg").exists()


def test_every_engine_asks_for_its_precision() -> None:
    assert {name: (engine.device, engine.precision) for name, engine in ENGINES.items()} == {
        FIRST: ("cpu", "fp32"),
        SECOND: ("openvino", "fp32"),
        HALF: ("openvino", "bf16"),
    }
