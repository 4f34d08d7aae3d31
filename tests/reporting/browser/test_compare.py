"""The comparison in a browser: Debian's Chromium opens compare.html and nothing else."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from prelunet.evaluator.reporting.compare import Comparison
from prelunet.evaluator.reporting.compare_page import write_comparison
from tests.conftest import Shared
from tests.helpers.run_folders import evaluated, refused, write_run
from tests.reporting.browser.browsing import (
    HOSTILE,
    LAPTOP,
    PHONE,
    MonitoredPage,
    brightness,
    check_sorting,
    imagenet_shape,
    names_of,
    violations,
)

pytestmark = pytest.mark.browser
Run = list[dict[str, Any]]


def comparison_of(html: Path) -> Comparison:
    comparison: Comparison = json.loads((html.parent / "compare.json").read_text())
    return comparison


def compare_shapes(folder: Path, classes: int) -> Path:
    """Compare two runs with three images of each class; class 8 has no image evaluated in both."""
    shape = imagenet_shape(per_class=3, classes=classes)
    for name, number in (("a", 1), ("b", 2)):
        shape.write(folder / name, 3, number)
        lines = [json.loads(line) for line in (folder / name / "predictions.jsonl").read_text().splitlines()]
        lines = [refused(line["file"], 8) if line["label"] == 8 else line for line in lines]
        (folder / name / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return write_comparison(folder / "a", folder / "b").html


@pytest.fixture(scope="module")
def thousand_compared(shared: Shared) -> Path:
    return _page_in(shared("thousand compared", lambda folder: compare_shapes(folder, 1000)))


@pytest.fixture(scope="module")
def many_compared(shared: Shared) -> Path:
    return _page_in(shared("many compared", lambda folder: compare_shapes(folder, 200)))


def _page_in(folder: Path) -> Path:
    (page,) = folder.rglob("compare.html")
    return page


def ten_runs(names: list[str]) -> tuple[Run, Run]:
    """Two runs of ten classes: B is right more often, but not in all classes, and refuses one image."""
    a, b = [], []
    for label in range(10):
        for number in range(12):
            file = f"{label}/{number:02}.png"
            for lines, skill in ((a, 5), (b, 9 if label % 3 else 4)):
                good = number * 7 % 12 < skill
                answers = [label, (label + 1) % 10] if good else [(label + 1) % 10, label]
                lines.append(evaluated(file, label, answers, 1 if good else 2, first=0.5 + number / 40))
    b[5] = refused(b[5]["file"], b[5]["label"], names[0])
    return a, b


def write_ten(folder: Path, names: list[str]) -> Path:
    classes = [{"wnid": f"n{index:08}{name}", "name": name} for index, name in enumerate(names)]
    for name, lines in zip("ab", ten_runs(names), strict=True):
        write_run(folder / name, lines, classes=classes)
    return write_comparison(folder / "a", folder / "b").html


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "Architecture"]
    return write_ten(tmp_path_factory.mktemp("ten"), names)


@pytest.fixture(scope="module")
def hostile_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ten(tmp_path_factory.mktemp("hostile"), (HOSTILE * 2)[:10])


@pytest.mark.parametrize("pair", ["thousand_compared", "ten", "hostile_pair"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_a_comparison_fits_its_window_without_requests_or_console_messages(
    pair: str, size: tuple[int, int], visit: Callable[..., MonitoredPage], request: pytest.FixtureRequest
) -> None:
    watched = visit(request.getfixturevalue(pair), size=size, color_scheme="light")
    page = watched.page
    for chart in ("#top1-chart svg", "#top5-chart svg"):
        expect(page.locator(chart)).to_be_visible()
    assert watched.overflow() == 0
    assert brightness(page, "body") > 700
    page.emulate_media(color_scheme="dark")
    assert brightness(page, "body") < 100
    assert watched.overflow() == 0
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("pair", ["many_compared", "ten"])
def test_axe_finds_nothing_to_object_to(
    pair: str, visit: Callable[..., MonitoredPage], request: pytest.FixtureRequest
) -> None:
    page = visit(request.getfixturevalue(pair)).page
    for chart in ("#top1-chart svg", "#top5-chart svg"):
        expect(page.locator(chart)).to_be_attached()
    assert violations(page) == []


def test_saved_charts_show_the_classes_that_got_worse(many_compared: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(many_compared, color_scheme="dark").page
    expect(page.locator("#top1-chart svg")).to_be_visible()
    with page.expect_download() as caught:
        page.locator(".save button", has_text="SVG").first.click()
    svg = Path(caught.value.path()).read_text()
    assert "#b3541e" in svg
    assert 'fill=""' not in svg
    assert 'stroke=""' not in svg


def cut_words(page: Page) -> list[str]:
    """Return the single words in cells of the runs' table that wrap."""
    broken: list[str] = page.eval_on_selector_all(
        ".runs th, .runs .whole, .figures .value, .figures .whole",
        """(cells) => cells.filter((cell) => {
          const range = document.createRange();
          range.selectNodeContents(cell);
          const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
          return cell.textContent.trim() && lines.size > 1 && !cell.querySelector("small, .under");
        }).map((cell) => cell.textContent)""",
    )
    return broken


def test_on_a_phone_neither_labels_nor_intervals_nor_captions_break(
    ten: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(ten, size=PHONE).page
    expect(page.locator("#top1-chart svg")).to_be_visible()
    assert cut_words(page) == []
    outside = page.eval_on_selector_all(
        ".chart svg text",
        """(texts) => texts.filter((text) => {
          const [own, all] = [text.getBoundingClientRect(), text.closest("svg").getBoundingClientRect()];
          return own.width && (own.left < all.left - 1 || own.right > all.right + 1);
        }).map((text) => text.textContent)""",
    )
    assert outside == []


def test_every_column_sorts_both_ways_and_classes_without_images_stay_last(
    many_compared: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(many_compared).page
    keys: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "index": lambda entry: entry["index"],
        "evaluated": lambda entry: entry["evaluated"],
    }
    for metric in ("top1", "top5"):
        for column, figure in (("a", "a_error"), ("b", "b_error"), ("difference", "difference")):
            keys[f"{metric}-{column}"] = lambda entry, metric=metric, figure=figure: entry[metric][figure]
    check_sorting(page, comparison_of(many_compared)["classes"], keys)
    page.locator("th[data-key=name] button").click()
    assert names_of(page) == [f"class {index}" for index in range(200)], "as people count"


def test_the_first_order_is_by_what_got_worse_most_and_25_rows_are_shown(
    thousand_compared: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(thousand_compared).page
    classes = comparison_of(thousand_compared)["classes"]
    seen = sorted((e for e in classes if e["evaluated"]), key=lambda e: (-e["top1"]["difference"], e["index"]))
    assert names_of(page) == [entry["name"] for entry in seen]
    assert page.locator("table.all tbody tr:visible").count() == 25
    page.get_by_role("button", name="Show all 999 classes").click()
    assert page.locator("table.all tbody tr:visible").count() == 999
    page.get_by_role("checkbox", name="Show 1 class without evaluated images").check()
    assert names_of(page)[999:] == ["class 8"]


def test_search_and_filters_show_the_classes_they_name(
    many_compared: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(many_compared).page
    classes = comparison_of(many_compared)["classes"]
    page.keyboard.press("/")
    page.keyboard.type("Class 19")
    assert set(names_of(page)) == {"class 19", *(f"class {index}" for index in range(190, 200))}
    search = page.get_by_role("searchbox")
    search.fill("n00000117")
    assert names_of(page) == ["class 117"]
    search.fill("")
    rules: dict[str, Callable[[dict[str, Any]], bool]] = {}
    for metric, title in (("top1", "top-1"), ("top5", "top-5")):
        rules[f"Improved by {title}"] = lambda entry, metric=metric: (entry[metric]["difference"] or 0) < 0
        rules[f"Worse by {title}"] = lambda entry, metric=metric: (entry[metric]["difference"] or 0) > 0
    for label, rule in rules.items():
        expected = {entry["name"] for entry in classes if rule(entry)}
        page.get_by_role("button", name=f"{label} {len(expected)}", exact=True).click()
        assert set(names_of(page)) == expected != set()
    search.fill("no such class")
    expect(page.locator("#found")).to_have_text("0 of 200 classes")


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_an_address_shows_and_marks_the_row_of_its_class(
    size: tuple[int, int], many_compared: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(many_compared, "#class-3", size=size, reduced_motion="reduce").page
    row = page.locator("#class-3")
    expect(row).to_be_in_viewport()
    marked = "(row) => getComputedStyle(row.cells[1]).backgroundColor"
    assert row.evaluate(marked) != page.locator("#class-4").evaluate(marked)
    page.get_by_role("searchbox").fill("class 17")
    page.locator(".chips button", has_text="Worse by top-1").click()
    page.evaluate("location.hash = 'class-8'")
    expect(page.locator("#class-8")).to_be_in_viewport()
    expect(page.get_by_role("searchbox")).to_have_value("")
    assert len(names_of(page)) == 200


def test_an_address_of_no_class_leaves_the_table_alone(ten: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(ten).page
    for fragment in ("#class-77", "#class--1", "#class-", "#class-1e0", "#nothing", "#table"):
        page.goto("about:blank")
        page.goto(ten.as_uri() + fragment)
        expect(page.locator("#top1-chart svg")).to_be_visible()
        assert page.locator("tr:target").count() == 0
        assert len(names_of(page)) == 10


def test_points_of_the_chart_and_flipped_images_lead_to_the_row(ten: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(ten, reduced_motion="reduce").page
    page.locator("#top1-chart .mark-symbol path").first.click()
    expect(page.locator("tr:target")).to_be_in_viewport()
    link = page.locator("#flips .truth a").last
    name = link.text_content() or ""
    link.click()
    expect(page.locator("tr:target")).to_contain_text(name)
    expect(page.locator("tr:target")).to_be_in_viewport()


def test_arrow_keys_walk_the_rows(many_compared: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(many_compared).page
    page.locator("th[data-key=index] button").click()
    page.keyboard.press("/")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == "class 1"
    page.keyboard.press("Enter")
    assert page.url.endswith("#class-1")


def test_without_scripts_and_in_print_every_class_can_be_read(
    many_compared: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(many_compared, java_script_enabled=False).page
    assert page.locator("table.all tbody tr:visible").count() == 200
    expect(page.locator(".tools")).to_be_hidden()
    printed = visit(many_compared).page
    printed.emulate_media(media="print")
    assert printed.locator("table.all tbody tr:visible").count() == 199  # all with images
    expect(printed.locator(".tools")).to_be_hidden()
