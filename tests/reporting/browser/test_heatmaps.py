"""Heat maps of mistakes in a browser: Debian's Chromium opens report.html and nothing else."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Locator, expect

from prelunet.evaluator.engine.heatmap import apply_color_map
from prelunet.evaluator.reporting.report_page import write_report
from prelunet.evaluator.validation.mistakes import mistakes_as_shown
from prelunet.evaluator.validation.run import read_run
from tests.helpers.run_folders import evaluated, write_heat_maps, write_run
from tests.reporting.browser.browsing import LAPTOP, PHONE, MonitoredPage, violations
from tests.reporting.pages import fingerprint_of, make_images, mistake

pytestmark = pytest.mark.browser

LEFT = [[254, 254, 0, 0, 0, 0, 0, 255]] * 6  # a class seen on the left; no view saw the right edge
BELOW = [[0] * 8] * 4 + [[178] * 8] * 2  # 70 %


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of three mistakes, of which the two most confident have maps, and the same without pictures."""
    folder = tmp_path_factory.mktemp("mapped")
    wrong = [mistake(f"n0{label + 1}/a.png", label, label + 2, 0.9 - label / 10) for label in (0, 1)]
    lines = [*wrong, mistake("n03/a.png", 2, 0, 0.4), evaluated("n03/b.png", 2, [2], 1)]
    data = make_images(folder / "data", {line["file"]: (160, 120) for line in lines})
    write_run(folder / "run", lines, fingerprint=fingerprint_of(data), data=str(data))
    write_heat_maps(folder / "run", [(line, (120, 160), [LEFT, BELOW]) for line in wrong])
    shutil.copytree(folder / "run", folder / "moved")
    (folder / "moved" / "log.jsonl").unlink()
    write_report(folder / "moved")
    return write_report(folder / "run").html


def color(figure: Locator, x: float, y: float) -> list[int]:
    """Return red, green and blue of the drawn map at a place, from 0 to 1."""
    found: list[int] = figure.locator("canvas").evaluate(
        """(canvas, [x, y]) => {
          const copy = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
          copy.drawImage(canvas, -Math.floor(x * canvas.width), -Math.floor(y * canvas.height));
          return [...copy.getImageData(0, 0, 1, 1).data.slice(0, 3)];
        }""",
        [x, y],
    )
    return found


BLACK, YELLOW, WHITE = [0, 0, 4], [252, 255, 164], [255, 255, 255]


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_the_buttons_of_a_mistake_show_and_hide_the_maps_of_the_answer_and_of_the_true_class(
    size: tuple[int, int], mapped: Path, visit: Callable[..., MonitoredPage]
) -> None:
    watched = visit(mapped, size=size)
    page = watched.page
    figures = page.locator("#mistakes figure")
    assert [figures.nth(n).locator(".maps button").count() for n in range(3)] == [2, 2, 0]
    figure = figures.first
    answer, truth = figure.get_by_role("button", name="answer"), figure.get_by_role("button", name="true class")
    canvas = figure.locator("canvas")
    expect(canvas).to_be_hidden()
    answer.click()
    expect(answer).to_have_attribute("aria-pressed", "true")
    expect(canvas).to_be_visible()
    assert [color(figure, x, 0.5) for x in (0.02, 0.6, 0.98)] == [YELLOW, BLACK, WHITE]
    expect(figure.locator(".range")).to_have_text("0 – 100 %")
    shapes = [figure.locator(tag).evaluate("(e) => (e.naturalWidth ?? e.width) / (e.naturalHeight ?? e.height)")
              for tag in ("img", "canvas")]  # fmt: skip
    assert shapes == [pytest.approx(160 / 120, rel=0.01)] * 2
    truth.press("Space")
    expect(answer).to_have_attribute("aria-pressed", "false")
    expect(truth).to_have_attribute("aria-pressed", "true")
    assert color(figure, 0.02, 0.1) == BLACK
    assert color(figure, 0.5, 0.95) == YELLOW
    expect(figure.locator(".range")).to_have_text("0 – 70 %")
    assert watched.overflow() == 0
    truth.click()
    expect(canvas).to_be_hidden()
    expect(figure.locator("img")).to_have_css("filter", "none")
    expect(page.locator("#mistakes .map-legend")).to_contain_text("its corner states both")
    assert violations(page) == []


# lowest and highest score of a map in percent, and where its lowest and its highest lie on the scale of colors
@pytest.mark.parametrize(
    ("low", "high", "darkest", "brightest"),
    [(30, 70, 0, 1), (50, 52, 0, 0.2), (0, 4, 0, 0.4), (98, 100, 0.8, 1), (2, 60, 0, 1)],
)
def test_the_map_of_an_uncertain_net_spans_the_colors_and_one_without_differences_is_not_orange(
    low: int, high: int, darkest: float, brightest: float, tmp_path: Path, visit: Callable[..., MonitoredPage]
) -> None:
    line = mistake("n01/a.png", 0, 2)
    write_run(tmp_path, [line])
    halves = [[round(2.54 * low)] * 8 + [round(2.54 * high)] * 8] * 4
    write_heat_maps(tmp_path, [(line, (120, 160), [halves, halves])])
    figure = visit(write_report(tmp_path).html).page.locator("#mistakes figure")
    expect(figure.locator(".range")).to_have_text(f"{low} – {high} %")
    for x, place in ((0.05, darkest), (0.95, brightest)):
        # a byte is 0.4 points, and a step of the scale at least 4 of its 255 colors
        assert color(figure, x, 0.5) == pytest.approx(apply_color_map(np.array(place)).tolist(), abs=14)


def test_the_panel_of_a_class_has_the_maps_too(mapped: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(mapped, "#class-1").page
    figure = page.locator("#class-view figure")
    figure.get_by_role("button", name="true class").click()
    assert color(figure, 0.5, 0.95) == YELLOW
    expect(page.locator("#class-view .map-legend")).to_have_count(1)
    page.goto(f"{mapped.as_uri()}#class-2")
    expect(page.locator("#class-view h2")).to_have_text("bottle")
    expect(page.locator("#class-view .maps, #class-view .map-legend")).to_have_count(0)


def test_without_pictures_the_maps_are_shown_alone(mapped: Path, visit: Callable[..., MonitoredPage]) -> None:
    watched = visit(mapped.parents[2] / "moved" / "report" / "report.html", "#class-0")
    page = watched.page
    assert page.locator("img").count() == 0
    for figure in (page.locator("#class-view figure"), page.locator("#mistakes figure").first):
        expect(figure.locator("canvas")).to_be_visible()
        expect(figure.get_by_role("button", name="answer")).to_have_attribute("aria-pressed", "true")
        assert color(figure, 0.02, 0.5) == YELLOW
    assert watched.overflow() == 0


def test_a_report_of_1000_classes_with_200_maps_opens_and_stays_small(
    thousand: Path, tmp_path: Path, visit: Callable[..., MonitoredPage]
) -> None:
    shutil.copytree(thousand.parents[1], tmp_path / "run", ignore=lambda *_: ["report"])
    wrong = mistakes_as_shown(read_run(tmp_path / "run").predictions)[:200]
    noise = np.random.default_rng(5).integers(0, 255, (200, 2, 21, 28)).tolist()
    write_heat_maps(tmp_path / "run", [(p.to_json(), (375, 500), each) for p, each in zip(wrong, noise, strict=True)])
    html = write_report(tmp_path / "run").html
    assert html.stat().st_size - thousand.stat().st_size < 200 * 2 * 1000
    for size in (LAPTOP, PHONE):
        watched = visit(html, f"#class-{wrong[199].label}", size=size)
        expect(watched.page.locator("#class-view figure canvas").first).to_be_visible()
        expect(watched.page.locator("#mistakes canvas")).to_have_count(48)
        assert watched.overflow() == 0


def test_the_report_of_a_run_without_maps_has_neither_buttons_nor_legend(
    few: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(few, "#class-0").page
    expect(page.locator("#class-view figure")).to_have_count(1)
    expect(page.locator(".maps, .map-legend, canvas")).to_have_count(0)
