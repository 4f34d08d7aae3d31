import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluator.complexity import multiply_adds
from evaluator.datasets import Dataset, Sample
from evaluator.errors import EnvironmentFault

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import growth  # noqa: E402
from growth import ENGINES, in_turn  # noqa: E402
from growth_alone import repeated  # noqa: E402
from growth_plots import apart, draw, points_of  # noqa: E402
from growth_text import section  # noqa: E402

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
            sizes = {
                f"{start}{key}_mb": value
                for start in ("", "predicted_")
                for key, value in (("loading", 1500), ("settled", 1000 + len(start)), ("peak", 1200 + scale))
            }
            add("memory", {"scale": scale, "engine": engine}, rows=2, **sizes, **amount)
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
                list_bytes_an_image=150, written_bytes_an_image=238)  # fmt: skip
    run = {"date": "2026-11-20", "command": "python benchmarks/growth.py", "tiny": False,
           "machine": {"cores": 2, "cpu": "a processor"}, "versions": {"numpy": "2.4.6"},
           "engines": {name: {"provider": name} for name in ALL}}  # fmt: skip
    return {"part": "growth", "runs": [run], "cases": cases, **changes}


def table_rows(text: str, title: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without its head."""
    part = text.split(f"### {title}\n")[1].partition("\n### ")[0]
    rows = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows[2:]]


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
        {"part": "memory", "scale": 1024, "engine": FIRST},
        {"part": "dataset", "images": 100, "engine": FIRST},
    ]
    square, long, small, large, dataset = (case["result"] for case in found["cases"])
    assert (square["views"], long["views"]) == ([[32, 32]] * 2, [[32, 128]] * 2)  # 256 pixels, an eighth of them
    assert len(long["seconds"][FIRST]) == growth.LEAST_ROUNDS
    assert min(*square["seconds"][FIRST], *small["seconds"], dataset["seconds"]) > 0
    assert small["views"] == [[28, 38]] * 2  # of a photo of 47x63
    for point in (small, large):
        assert point["peak_mb"] >= point["settled_mb"] > 10
        assert point["predicted_peak_mb"] > point["predicted_settled_mb"] > 128
    # 24 channels of float32 at 128x171 pixels, twice in a batch of two, are 8 MB
    assert large["predicted_peak_mb"] - small["predicted_peak_mb"] > 8
    assert dataset["refused"] == 0
    assert dataset["written_bytes_an_image"] > 40  # ten scores alone
    assert 100 < dataset["list_bytes_an_image"] < 400  # three references, a name of 30 characters
    for name in ("run_alone", "in_turn"):
        monkeypatch.setattr(growth, name, lambda *_: pytest.fail("measured again"))
    assert measured(output, *parts)["cases"] == found["cases"]


def test_classes_and_scales_are_measured_with_other_nets_and_protocols(tmp_path: Path) -> None:
    found = measured(tmp_path / "growth.json", "--parts", "scales", "classes")
    one, six, few, many = (case["result"] for case in found["cases"])
    assert (len(one["views"]), len(six["views"])) == (2, 12)
    assert few["window_scores_mb"] == 0  # 120 windows of ten classes: 5 kB
    assert many["window_scores_mb"] == round(120 * 21_841 * 4 / 2**20, 2)
    assert many["file_mb"] - few["file_mb"] == pytest.approx(21_831 * 257 * 4 / 2**20, abs=1.5)  # and their names
    assert many["peak_with_windows_mb"] >= many["peak_mb"] > few["peak_mb"]
    assert len(many["seconds"]) == 2  # the first of three calls is a warm-up


def test_an_engine_that_does_not_come_up_is_left_out_and_the_section_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = growth.open_placed

    def without_openvino(path: Path, placement: Any) -> Any:
        if placement.device == "openvino":
            raise EnvironmentFault("openvino is not installed")
        return opens(path, placement)

    monkeypatch.setattr(growth, "open_placed", without_openvino)
    output = tmp_path / "growth.json"
    assert growth.main(["--tiny", "--parts", "elongation", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert [list(case["result"]["seconds"]) for case in found["cases"]] == [[FIRST], [FIRST]]
    text = section(found, {})
    assert f"{HALF}: not measured: openvino is not installed" in text
    assert "A rehearsal" in text
    assert "Not measured." in text  # the other parts


@pytest.mark.parametrize("windows", [1, 6])
def test_head_operations_are_those_of_the_fully_connected_layers_in_every_window(windows: int, tmp_path: Path) -> None:
    nets = growth.Nets("cpu", tiny=True, files=tmp_path, count=17)
    sides = {1: (28, 28), 6: (32, 36)}[windows]  # stride 4: 1x1 and 2x3 windows
    amount = growth._amount(nets, [sides, sides])
    layers = (9 + 4 + 1) * 96 * 256 + 256 * 256 + 256 * 17
    assert amount["windows"] == 2 * windows
    assert amount["head_gflop"] == pytest.approx(4 * windows * layers / 1e9, abs=1e-4)
    whole = 4 * multiply_adds(nets.net("A").to_json(), *sides, 17) / 1e9
    assert amount["gflop"] == pytest.approx(whole, abs=1e-4)
    assert amount["gflop"] > amount["head_gflop"]


def test_engines_take_turns_and_each_round_begins_with_another() -> None:
    calls: list[str] = []

    def answer(name: str, value: float) -> Any:
        return lambda: calls.append(name) or np.array([value, 1 - value])

    taken, deviations = in_turn({"a": answer("a", 0.25), "b": answer("b", 0.25 + 1e-5)}, tiny=True)
    assert calls == ["a", "b", "a", "b", "b", "a"]  # untimed, first round, second round
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 2, "b": 2}
    assert deviations == {"a": 0.0, "b": pytest.approx(1e-5 / 0.75)}


@pytest.mark.parametrize(("name", "value", "right"), [
    ("b fp32", 0.251, False), ("b bf16", 0.251, True), ("b bf16", 0.5, False), ("b fp32", float("nan"), False),
])  # fmt: skip
def test_wrong_scores_are_no_measurement(name: str, value: float, right: bool) -> None:
    answers = {"a fp32": lambda: np.array([0.25, 0.75]), name: lambda: np.array([value, 0.75])}
    if right:
        in_turn(answers, tiny=True)
    else:
        with pytest.raises(RuntimeError, match=f"{name}: scores are off"):
            in_turn(answers, tiny=True)


def test_a_point_that_fails_is_an_error_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("scores are off")

    monkeypatch.setattr(growth, "in_turn", fails)
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
    with pytest.raises(SystemExit, match="no multiple of 6"):
        repeated(small_dataset(), 20)


def test_every_part_of_a_result_is_drawn_on_white_with_titles_units_and_names_at_the_lines(tmp_path: Path) -> None:
    names = draw(made_up(), tmp_path)
    assert sorted(names) == sorted(file.stem for file in tmp_path.iterdir())
    assert len(names) == 5
    drawn = {name: (tmp_path / f"{name}.svg").read_text() for name in names}
    for name, svg in drawn.items():
        assert 'fill="white"' in svg
        assert "var(" not in svg, name
        assert "NaN" not in svg, name
        assert len(svg) < 60_000  # small files: they are in the repository
    for name in ("growth-area", "growth-protocols", "growth-dataset"):
        assert all(f">{engine}<" in drawn[name] for engine in ALL), name
    for name, words in {
        "growth-area": ("pixels of one view (millions)", "seconds for a view", "trunk", "head"),
        "growth-protocols": ("longer side / shorter side", "scales"),
        "growth-memory": ("peak of the process (GB)", "measured", "expected at most"),
        "growth-classes": ("21,841", "model file", "all windows", "size (GB)"),
        "growth-dataset": ("10,100", "milliseconds for an image", "peak of the process (MB)"),
    }.items():
        assert all(word in drawn[name] for word in words), name


def test_points_are_drawn_where_their_values_are(tmp_path: Path) -> None:
    draw(made_up(), tmp_path)
    svg = (tmp_path / "growth-dataset.svg").read_text()
    described = [tuple(map(float, found)) for found in re.findall(
        r'images of the dataset: ([\d.]+); milliseconds for an image: ([\d.]+)', svg.replace(",", ""))]  # fmt: skip
    assert (100.0, 2.5) in described
    assert (10100.0, 2.5) in described


def test_parts_that_were_not_measured_are_not_drawn(tmp_path: Path) -> None:
    only = [case for case in made_up()["cases"] if case["settings"]["part"] == "dataset"]
    assert draw(made_up(cases=only), tmp_path) == ["growth-dataset"]


def test_of_a_point_that_was_measured_twice_the_last_counts_and_errors_never() -> None:
    settings = {"part": "area", "scale": 224}
    cases = [{"run": 0, "settings": settings, "result": {"gflop": 1}},
             {"run": 1, "settings": settings, "result": {"gflop": 2}},
             {"run": 1, "settings": settings, "result": {"error": "no"}},
             {"run": 1, "settings": {**settings, "part": "memory"}, "result": {"gflop": 3}}]  # fmt: skip
    assert points_of({"cases": cases}, "area") == [{**settings, "gflop": 2}]


@given(st.lists(st.floats(0, 100), max_size=6), st.floats(0.1, 20))
def test_labels_keep_their_order_and_distance_and_stay_where_there_is_room(values: list[float], least: float) -> None:
    places = apart(values, least)
    order = sorted(range(len(values)), key=lambda index: values[index])
    for before, after in pairwise(order):
        assert places[after] - places[before] >= least * (1 - 1e-9)  # sums of floats
    assert all(place >= 0 for place in places)
    gaps = [values[after] - values[before] for before, after in pairwise(order)]
    if all(gap >= least for gap in gaps):
        assert places == pytest.approx(values)


def test_the_section_tells_medians_rates_and_shares() -> None:
    text = section(made_up(), {"growth-area": "performance/growth-area.svg"})
    first, _, last = table_rows(text, "With the image's area")
    gflop = 4 + 224 * 224 / 500
    assert first[:3] == ["224", "224x224", "5"]
    assert first[3] == f"{gflop:.0f}"
    assert first[4] == f"{100 * 4 / gflop:.0f} %"
    assert first[5] == f"{gflop / 400:.3g} (400)"  # the median of three, not the mean
    assert last[7].endswith("(1000)")
    assert "![Seconds and operations against the pixels of a view](performance/growth-area.svg)" in text
    assert "| 21,841 | 300 | 800 | 34.8 | 0.60 | 1,500 / 1,700 |" in text
    assert "2026-11-20" in text and "2 cores of a processor with numpy 2.4.6" in text  # noqa: PT018
    assert "rehearsal" not in text


def test_the_section_tells_how_memory_grows_with_the_dataset() -> None:
    # 10 MB more for 10,000 images more: 1,049 bytes each
    assert "From 100 to 10,100 images the peak of onnxruntime fp32 grows by 10 MB, 1049 bytes an image" in section(
        made_up(), {}
    )


def test_the_section_says_when_more_memory_was_taken_than_expected() -> None:
    data = made_up()
    assert "No measured number is above what is expected" in section(data, {})
    point = next(case for case in data["cases"] if case["settings"]["part"] == "memory")
    point["result"]["settled_mb"] = point["result"]["predicted_settled_mb"] + 1
    assert "**1 numbers are above what is expected**" in section(data, {})


def test_drawing_measures_nothing_and_prints_the_section_with_paths_beside_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "_engines", lambda *_: pytest.fail("measured"))
    output = tmp_path / "growth.json"
    output.write_text(json.dumps(made_up()))
    assert growth.main(["--output", str(output), "--draw", str(tmp_path / "docs" / "performance")]) == 0
    assert "(performance/growth-dataset.svg)" in capsys.readouterr().out
    assert (tmp_path / "docs" / "performance" / "growth-dataset.svg").exists()


def test_every_engine_asks_for_its_precision() -> None:
    assert {name: (engine.device, engine.precision) for name, engine in ENGINES.items()} == {
        FIRST: ("cpu", "fp32"),
        SECOND: ("openvino", "fp32"),
        HALF: ("openvino", "bf16"),
    }
