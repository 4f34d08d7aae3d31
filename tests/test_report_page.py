import base64
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import vl_convert
from PIL import Image
from run_folders import CLASSES, evaluated, refused, write_run

from evaluator import cli
from evaluator.datasets import open_dataset
from evaluator.errors import DatasetError
from evaluator.protocols import make_protocol
from evaluator.reporting.charts import FEW_CLASSES, error_chart
from evaluator.reporting.gallery import (
    SHOWN,
    SHOWN_OF_A_CLASS,
    THUMBNAIL,
    Gallery,
    choose_mistakes,
    make_gallery,
)
from evaluator.reporting.html import VEGA_LITE
from evaluator.reporting.page import render_page, worst_classes
from evaluator.reporting.report import build_report
from evaluator.reporting.write import write_report
from evaluator.validation.run import find_dataset, read_run
from fakes import FakeSession, fake_contract, validated

WNIDS = [entry["wnid"] for entry in CLASSES]
HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=https:example.org/x onerror=alert(1)>',
    "{{ 7 * 7 }}{% raw %}",
    "<!-- & ' ` \u2028 עברית 鯛",
]


class Elements(HTMLParser):
    """Collects what a browser would see: elements with attributes, text, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in {"script", "style"} else ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(folder: Path, lines: list[dict[str, Any]], **rest: Any) -> Elements:
    run = read_run(write_run(folder, lines, **rest))
    return Elements(render_page(build_report(run), make_gallery(run, None)).decode())


def make_images(folder: Path, sizes: dict[str, tuple[int, int]]) -> Path:
    """Write one PNG per name, of (width, height); its pixels differ from any other's."""
    for number, (name, size) in enumerate(sizes.items()):
        path = folder / "val" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


def fingerprint_of(folder: Path) -> str:
    return open_dataset(folder, split="val", class_names=WNIDS).fingerprint


def mistake(file: str, label: int, wrong: int, first: float = 0.6) -> dict[str, Any]:
    return evaluated(file, label, [wrong, label], 2, first=first)


def thumbnail(address: str | None) -> Image.Image:
    assert address is not None
    return Image.open(io.BytesIO(base64.b64decode(address.split(",")[1])))


def many_classes(count: int) -> list[dict[str, str]]:
    return [{"wnid": f"n{index:04}", "name": f"class {index}"} for index in range(count)]


def test_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"n01/a.png": (20, 31)})
    page = page_of(tmp_path / "run", [mistake("n01/a.png", 0, 2)], fingerprint=fingerprint_of(data), data=str(data))
    (policy,) = [m["content"] or "" for m in page.named("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "eval" not in policy
    assert not {"iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.elements}
    for tag, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "poster", "background"):
            address = attributes.get(name)
            if address is not None:
                assert re.match(r"data:|#|report\.json$|classes\.csv$", address), (tag, name, address[:80])
    css = (Path(cli.__file__).parent / "reporting" / "report.css").read_text()
    assert "url(" not in css
    assert "@import" not in css


def test_hostile_class_and_file_names_stay_text(tmp_path: Path) -> None:
    classes = [{"wnid": f"{index}{name}", "name": name} for index, name in enumerate(HOSTILE)]
    lines = [
        *(mistake(f"{name}/{index}.png", index, (index + 1) % 4) for index, name in enumerate(HOSTILE)),
        refused(HOSTILE[0], 0, HOSTILE[1]),
    ]
    plain = page_of(tmp_path / "plain", [mistake("n01/a.png", 0, 2), refused("n01/b.png", 0)])
    page = page_of(tmp_path / "run", lines, classes=classes)
    assert len(page.scripts) == len(plain.scripts) == 3
    assert page.named("img") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    for name in HOSTILE:
        assert page.text.count(name) >= 4  # worst, confusions, mistakes, all classes
    rows = json.loads(page.scripts[1])["data"]["values"]
    assert {row["name"] for row in rows} == set(HOSTILE)


def test_scripts_of_the_page_cannot_end_early() -> None:
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    ours = (Path(cli.__file__).parent / "reporting" / "report.js").read_text()
    for script in (bundle, ours):
        assert "</script" not in script.lower()
        assert "<!--" not in script


def test_page_shows_the_headline_the_banner_and_the_circumstances(tmp_path: Path) -> None:
    page = page_of(
        tmp_path, [mistake("n01/a.png", 0, 2), evaluated("n02/b.png", 1, [1], 1), refused("n03/c.png", 2, "cut")]
    )
    for text in ("50.00", "9.45 – 90.55", "1 of 3 images was refused", "n03/c.png", "cut", "numpy 2.4.6", "CPU, fp32"):
        assert text in page.text
    assert "images were refused" not in page.text


def test_page_without_refusals_has_no_banner(tmp_path: Path) -> None:
    page = page_of(tmp_path, [evaluated("n01/a.png", 0, [0], 1)])
    assert "banner" not in [attributes.get("class") for attributes in page.named("p")]
    assert "No image was misclassified" in page.text


def test_a_page_is_the_same_bytes_again(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"n01/a.png": (300, 200)})
    folder = write_run(tmp_path / "run", [mistake("n01/a.png", 0, 2)], fingerprint=fingerprint_of(data), data=str(data))
    first = write_report(folder).html.read_bytes()
    assert write_report(folder).html.read_bytes() == first


def test_mistakes_are_shown_most_confident_first_and_few_of_a_class(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [
        mistake(f"{number:04}.png", int(rng.integers(0, 3 if number % 2 else 40)), 50, float(rng.uniform(0.5, 1)))
        for number in range(400)
    ]
    lines += [evaluated("right.png", 0, [0], 1, first=1.0), refused("refused.png", 0)]
    expected: list[str] = []
    taken: list[int] = []
    for line in sorted((line for line in lines if line.get("rank", 1) > 1), key=lambda line: -line["top"][0][1]):
        if len(expected) < SHOWN and taken.count(line["label"]) < SHOWN_OF_A_CLASS:
            expected.append(line["file"])
            taken.append(line["label"])
    chosen = choose_mistakes(read_run(write_run(tmp_path, lines, classes=many_classes(51))).predictions)
    assert [prediction.file for prediction in chosen] == expected
    assert len(expected) == SHOWN


def test_thumbnails_keep_tiny_images_exactly_and_shrink_large_ones(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"n01/tiny.png": (20, 31), "n02/large.png": (300, 200)})
    lines = [mistake("n01/tiny.png", 0, 2, 0.9), mistake("n02/large.png", 1, 2, 0.8)]
    run = read_run(write_run(tmp_path / "run", lines, fingerprint=fingerprint_of(data)))
    tiny, large = make_gallery(run, data).mistakes
    assert tiny.tiny
    original = np.asarray(Image.open(data / "val" / "n01" / "tiny.png"))
    np.testing.assert_array_equal(np.asarray(thumbnail(tiny.thumbnail)), original)
    assert not large.tiny
    assert thumbnail(large.thumbnail).size == (THUMBNAIL, THUMBNAIL * 2 // 3)


def test_images_are_found_where_the_last_run_found_them(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"n01/a.png": (20, 31)})
    folder = write_run(tmp_path / "run", [mistake("n01/a.png", 0, 2)], fingerprint=fingerprint_of(data))
    places = (("start", "/gone"), ("resume", str(data)))
    starts = [json.dumps({"event": event, "dataset": place}) for event, place in places]
    (folder / "log.jsonl").write_text("\n".join([starts[0], "[]", starts[1], '{"event": "chunk"}', '{"event": "sta']))
    assert find_dataset(folder) == data
    assert make_gallery(read_run(folder), None).mistakes[0].thumbnail is not None


def test_what_validate_leaves_is_reported_with_its_images(tmp_path: Path) -> None:
    wnids = [entry.wnid for entry in fake_contract().classes]
    sizes = {f"{wnid}/{number}.png": (40 + number, 33) for wnid in wnids[1:] for number in range(4)}
    dataset = open_dataset(make_images(tmp_path / "data", sizes), split="val", class_names=wnids)
    protocol = make_protocol("multi-scale", fake_contract())
    run = validated(FakeSession(), dataset, protocol, tmp_path / "run")
    written = write_report(tmp_path / "run")
    schema = json.loads((Path(__file__).parent.parent / "docs" / "report.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(written.json.read_bytes()), schema)
    wrong = [prediction for prediction in run.predictions if prediction.rank > 1]
    assert len(Elements(written.html.read_text()).named("img")) == len(choose_mistakes(wrong)) > 0


@pytest.mark.parametrize("data", ["/gone/away", None])
def test_unreachable_images_are_said_with_the_command_and_without_a_path(tmp_path: Path, data: str | None) -> None:
    page = page_of(tmp_path / "run", [mistake("n01/a.png", 0, 2)], data=data)
    assert "prelunet report RUN --data DIR|ARCHIVE" in page.text
    assert "/gone" not in page.text
    assert "n01/a.png" in page.text
    assert page.named("img") == []


def test_changed_images_are_not_shown_as_those_of_the_run(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"n01/a.png": (20, 31)})
    folder = write_run(tmp_path / "run", [mistake("n01/a.png", 0, 2)], fingerprint="cd" * 32, data=str(data))
    gallery = make_gallery(read_run(folder), None)
    assert gallery.missing is not None
    assert gallery.mistakes[0].thumbnail is None


def test_another_dataset_given_by_hand_is_refused_and_no_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_images(tmp_path / "data", {"n01/a.png": (20, 31)})
    folder = write_run(tmp_path / "run", [mistake("n01/a.png", 0, 2)], fingerprint="cd" * 32)
    with pytest.raises(DatasetError, match="not the images of this run: 1 images with fingerprint"):
        write_report(folder, data=data)
    assert cli.run(["report", str(folder), "--data", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
    assert not (folder / "report").exists()


def test_an_image_that_went_bad_since_the_run_leaves_a_gap_not_an_error(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"n01/a.png": (20, 31), "n02/b.png": (22, 33)})
    fingerprint = fingerprint_of(data)
    bad = data / "val" / "n01" / "a.png"
    bad.write_bytes(b"x" * bad.stat().st_size)  # same length, so the fingerprint still fits
    lines = [mistake("n01/a.png", 0, 2), mistake("n02/b.png", 1, 2)]
    page = page_of(tmp_path / "run", lines, fingerprint=fingerprint, data=str(data))
    assert len(page.named("img")) == 1
    assert "cannot be read any more" in page.text


def test_few_classes_are_named_worst_first_in_the_chart(tmp_path: Path) -> None:
    lines = [
        *(mistake(f"n01/{number}.png", 0, 2) for number in range(3)),
        mistake("n02/a.png", 1, 2),
        evaluated("n02/b.png", 1, [1], 1),
        evaluated("n06/a.png", 5, [5], 1),
    ]
    chart = error_chart(build_report(read_run(write_run(tmp_path, lines))))
    assert chart is not None
    svg = vl_convert.vegalite_to_svg({**chart, "width": 600}, vl_version=VEGA_LITE)
    labels = re.findall(r">(tench|crane|fox|never seen)</text>", svg)
    assert labels == ["tench", "crane", "fox"]


def test_many_classes_become_two_curves_that_each_ascend(tmp_path: Path) -> None:
    count = FEW_CLASSES + 5
    rng = np.random.default_rng(2)
    lines = []
    for label in range(1, count):  # class 0 has no image
        for number in range(5):
            rank = int(rng.integers(1, 9))
            answers = [label if place == rank else (label + place) % count for place in range(1, 6)]
            lines.append(evaluated(f"{label}/{number}.png", label, answers, rank))
    report = build_report(read_run(write_run(tmp_path, lines, classes=many_classes(count))))
    chart = error_chart(report)
    assert chart is not None
    for key, metric in (("top1", "top-1"), ("top5", "top-5")):
        rows = [row for row in chart["data"]["values"] if row["metric"] == metric]
        assert [row["place"] for row in rows] == list(range(1, count))
        errors = [row["error"] for row in rows]
        assert errors == sorted(errors)
        assert errors[0] < errors[-1]
        assert all(row["error"] == report["classes"][row["index"]][f"{key}_error"] for row in rows)
    svg = vl_convert.vegalite_to_svg({**chart, "width": 600}, vl_version=VEGA_LITE)
    assert "over all images (dashed)" in svg


def test_worst_classes_leave_out_perfect_and_unseen_ones(tmp_path: Path) -> None:
    lines = [
        mistake("a.png", 0, 2),
        mistake("b.png", 3, 2),
        evaluated("c.png", 3, [3], 1),
        evaluated("d.png", 1, [1], 1),
    ]
    report = build_report(read_run(write_run(tmp_path, lines)))
    assert [entry["index"] for entry in worst_classes(report, "top1", 9)] == [0, 3]
    assert [entry["index"] for entry in worst_classes(report, "top1", 1)] == [0]
    assert worst_classes(report, "top5", 9) == []


def test_a_page_of_a_thousand_classes_stays_small(tmp_path: Path) -> None:
    lines = [
        mistake(f"n{label:04}/ILSVRC2012_val_{number:08}.JPEG", label, (label + number) % 1000, 0.5 + label / 2500)
        for label in range(1000)
        for number in (1, 2)
    ]
    report = build_report(read_run(write_run(tmp_path, lines, classes=many_classes(1000))))
    picture = "data:image/jpeg;base64," + "A" * 14_000  # a dense 192-pixel JPEG
    gallery = make_gallery(read_run(tmp_path), None)
    assert len(gallery.mistakes) == SHOWN
    shown = Gallery(tuple(replace(m, thumbnail=picture) for m in gallery.mistakes), gallery.total)
    assert len(render_page(report, shown)) < 8_000_000
