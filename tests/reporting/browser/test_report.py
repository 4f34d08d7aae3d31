"""The report in a browser: Debian's Chromium opens report.html and nothing else.

Skipped where there is no Chromium; `make test-browser` fails there instead.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from prelunet.evaluator.reporting.report import Report
from prelunet.evaluator.reporting.report_page import write_report
from prelunet.evaluator.validation.predictions import Prediction
from prelunet.evaluator.validation.run import read_run
from tests.helpers.run_folders import evaluated, write_run
from tests.reporting.browser.browsing import (
    HOSTILE,
    LAPTOP,
    PHONE,
    MonitoredPage,
    brightness,
    check_sorting,
    names_of,
    violations,
)

pytestmark = pytest.mark.browser


def report_of(html: Path) -> Report:
    report: Report = json.loads((html.parent / "report.json").read_text())
    return report


RUNS = ("thousand", "few", "ensemble", "hostile")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_a_report_fits_its_window_without_requests_or_console_messages(
    run: str, size: tuple[int, int], visit: Callable[..., MonitoredPage], request: pytest.FixtureRequest
) -> None:
    watched = visit(request.getfixturevalue(run), size=size, color_scheme="light")
    page = watched.page
    expect(page.locator("#error-chart svg")).to_be_visible()
    expect(page.locator("#reliability-chart svg")).to_be_visible()
    assert watched.overflow() == 0
    page.locator("table.all tbody a.name").first.click()
    expect(page.locator("#class-view h2")).to_be_visible()
    assert watched.overflow() == 0
    assert brightness(page, "dialog") > 700
    page.emulate_media(color_scheme="dark")
    assert brightness(page, "dialog") < 100
    assert brightness(page, "body") < 100
    assert watched.overflow() == 0
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize(
    ("run", "fragment"), [("many", ""), ("many", "#class-0"), ("few", ""), ("few", "#class-0"), ("ensemble", "")]
)
def test_axe_finds_nothing_to_object_to(
    run: str, fragment: str, visit: Callable[..., MonitoredPage], request: pytest.FixtureRequest
) -> None:
    page = visit(request.getfixturevalue(run), fragment, reduced_motion="reduce").page
    expect(page.locator("#risk-chart svg")).to_be_attached()
    assert violations(page) == []


@pytest.mark.parametrize("run", ["thousand", "few"])
def test_the_table_begins_with_the_worst_classes(
    run: str, visit: Callable[..., MonitoredPage], request: pytest.FixtureRequest
) -> None:
    html = request.getfixturevalue(run)
    page = visit(html).page
    seen = [entry for entry in report_of(html)["classes"] if entry["evaluated"]]
    names = {entry["name"]: entry["top1_interval"][0] for entry in seen}
    lower_ends = [names[name] for name in names_of(page)]
    assert lower_ends == sorted(names.values(), reverse=True)
    assert names_of(page)[:2] == page.locator("#worst tr td:first-child > a.name").all_text_contents()[:2]


def test_classes_without_images_are_hidden_until_the_switch_shows_them_or_a_search_names_them(
    few: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(few).page
    switch = page.get_by_role("checkbox", name="Show 4 classes without evaluated images")
    assert sorted(names_of(page)) == ["bottle", "crane", "tench"]
    page.get_by_role("searchbox").fill("never")
    assert names_of(page) == ["never seen"]
    page.get_by_role("searchbox").fill("")
    switch.check()
    assert names_of(page)[3:] == ["crane", "abacus", "fox", "never seen"]
    switch.uncheck()
    assert len(names_of(page)) == 3


def test_the_worst_classes_show_pictures_of_their_mistakes_that_open_the_confusion(
    few: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(few).page
    pictures = page.locator("#worst tr").first.locator("img")
    wrong = [prediction for prediction in read_run(few.parent.parent).predictions if prediction.rank > 1]
    assert 0 < pictures.count() <= len(wrong)
    pictures.first.click()
    expect(page.locator("#class-view figure img").first).to_be_visible()
    assert re.search(r"#pair-\d-\d$", page.url)


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_the_panel_of_a_class_begins_with_its_images_above_the_fold(
    size: tuple[int, int], few: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(few, "#class-0", size=size).page
    expect(page.locator("#class-view section h3").first).to_have_text("Mistakes (1)")
    box = page.locator("#class-view .picture").first.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] / 2 < size[1]


def test_bars_stand_beside_names_and_not_under_them(few: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(few, "#class-0").page
    for row, bar in (
        (".pairs li", ".bar"),
        ("#mistakes li", "i"),
        (".taken-for li", ".bar"),
        ("#class-view figure li", "i"),
    ):
        name, beside = (page.locator(row).first.locator(part).first.bounding_box() for part in (".name", bar))
        assert name is not None
        assert beside is not None
        assert beside["x"] >= name["x"] + name["width"], row
        assert name["y"] < beside["y"] + beside["height"] / 2 < name["y"] + name["height"], row


def test_search_finds_a_class_by_its_name_its_wnid_and_its_index(
    many: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(many).page
    search = page.get_by_role("searchbox")
    search.fill("Class 19")
    assert sorted(names_of(page)) == ["class 19", *(f"class {index}" for index in range(190, 200))]
    search.fill("n00000117")
    assert names_of(page) == ["crane"]
    search.fill("134")
    assert names_of(page) == ["crane"]
    search.fill("no such class")
    assert names_of(page) == []
    expect(page.locator("#found")).to_have_text("0 of 200 classes")
    search.fill("")
    assert len(names_of(page)) == 200


KEYS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "index": lambda entry: entry["index"],
    "evaluated": lambda entry: entry["evaluated"],
    "error1": lambda entry: entry["top1_error"],
    "low1": lambda entry: entry["top1_interval"][0],
    "error5": lambda entry: entry["top5_error"],
    "low5": lambda entry: entry["top5_interval"][0],
    "medianRank": lambda entry: entry["median_rank"],
    "confidence": lambda entry: round(entry["confidence"], 1),
    "taken": lambda entry: entry["confusions"][0]["count"] if entry["confusions"] else None,
}


def test_every_column_sorts_both_ways_and_what_has_no_number_stays_last(
    many: Path, visit: Callable[..., MonitoredPage]
) -> None:
    check_sorting(visit(many).page, report_of(many)["classes"], KEYS)


def test_names_sort_as_people_count(many: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(many).page
    page.get_by_role("button", name="class", exact=True).click()
    expected = [f"class {index}" for index in range(200) if index not in {117, 134}] + ["crane", "crane"]
    assert names_of(page) == expected


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_filters_show_the_classes_they_name(
    size: tuple[int, int], many: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(many, size=size).page
    report = report_of(many)
    rules: dict[str, Callable[[dict[str, Any]], bool]] = {
        "With errors": lambda entry: entry["top1_wrong"] > 0,
        "Without error": lambda entry: entry["top1_error"] == 0,
        "Worse than average": lambda entry: entry["top1_interval"][0] > report["top1_error"],
        "Better than average": lambda entry: entry["top1_interval"][1] < report["top1_error"],
        "Refused images": lambda entry: entry["refused"] > 0,
        "Shared names": lambda entry: entry["name"] == "crane",
        "All": lambda entry: True,
    }
    shown = page.locator(".chips button").all_text_contents()
    assert shown[0] == "All"
    tried = 0
    for label, rule in rules.items():
        expected = sorted(entry["name"] for entry in report["classes"] if rule(entry))
        if not expected:  # five images are too few for some filters
            assert not any(text.startswith(label) for text in shown)
            continue
        name = label if label == "All" else f"{label} {len(expected):,}"
        button = page.locator(".chips").get_by_role("button", name=name, exact=True)
        button.click()
        assert sorted(names_of(page)) == expected
        expect(button).to_have_attribute("aria-pressed", "true")
        tried += 1
    assert tried >= 5
    assert page.locator(".chips button[aria-pressed=true]").count() == 1


def test_search_and_filter_hold_together_and_the_first_hits_are_shown(
    many: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(many).page
    page.locator(".chips button", has_text="Without error").click()
    page.get_by_role("searchbox").fill("class 1")
    report = report_of(many)
    expected = [c["name"] for c in report["classes"] if c["top1_error"] == 0 and c["name"].startswith("class 1")]
    assert sorted(names_of(page)) == sorted(expected)
    assert page.locator("table.all tbody tr:visible").count() == 25 < len(expected)
    page.get_by_role("button", name=f"Show all {len(expected)} classes").click()
    assert page.locator("table.all tbody tr:visible").count() == len(expected)


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_a_class_opens_from_the_table_and_back_leaves_it(
    size: tuple[int, int], many: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(many, size=size).page
    dialog = page.locator("#class-view")
    page.get_by_role("searchbox").fill("117")
    page.locator("table.all tbody tr:visible").get_by_role("link", name="crane").click()
    expect(dialog.locator("h2")).to_have_text("crane")
    expect(dialog).to_contain_text("n00000117 · index 117 · same name as n00000134")
    assert page.url.endswith("#class-117")
    scrolled = page.evaluate("scrollY")
    page.go_back()
    expect(dialog).to_be_hidden()
    assert page.evaluate("scrollY") == scrolled > 0
    page.go_forward()
    expect(dialog.locator("h2")).to_have_text("crane")
    dialog.get_by_role("link", name="n00000134").click()
    expect(dialog).to_contain_text("index 134")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert "#" not in page.url
    page.go_back()  # the closed panel is one step back
    expect(dialog).to_contain_text("index 134")


def test_a_class_opens_from_the_worst_the_confusions_and_the_mistakes(
    few: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(few).page
    for place in (
        "#worst table",
        "#confusions .pairs",
        ".matrix thead",
        ".matrix tbody",
        "#mistakes .truth",
        "#mistakes ol",
    ):
        link = page.locator(place).locator("a.name").last
        name = link.text_content()
        link.click()
        expect(page.locator("#class-view h2")).to_have_text(name or "")
        page.locator("#class-view").get_by_role("button", name="Close").click()
        expect(page.locator("#class-view")).to_be_hidden()


def test_an_address_opens_its_class_and_neighbors_follow_the_table(
    many: Path, visit: Callable[..., MonitoredPage]
) -> None:
    worst_first = names_of(visit(many).page)
    place = worst_first.index("class 50")
    assert 0 < place < 199
    page = visit(many, "#class-50").page
    title = page.locator("#class-view h2")
    expect(title).to_have_text("class 50")
    page.keyboard.press("ArrowRight")
    expect(title).to_have_text(worst_first[place + 1])
    page.get_by_role("link", name="Previous class").click()
    page.keyboard.press("ArrowLeft")
    expect(title).to_have_text(worst_first[place - 1])
    page.keyboard.press("Escape")
    page.locator("table.all thead").get_by_role("button", name="top-1").click()
    order = names_of(page)
    page.locator("table.all tbody a.name").first.click()
    expect(title).to_have_text(order[0])
    expect(page.get_by_role("link", name="Previous class")).to_have_count(0)
    for name in order[1:4]:
        page.keyboard.press("ArrowRight")
        expect(title).to_have_text(name)
    page.go_back()  # past all neighbors at once
    expect(page.locator("#class-view")).to_be_hidden()


def test_an_address_of_no_class_opens_none(few: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(few).page
    for fragment in ("#class-7", "#class--1", "#class-", "#class-1e0", "#class-99999999", "#nothing", "#table"):
        page.goto("about:blank")
        page.goto(few.as_uri() + fragment)
        expect(page.locator("#error-chart svg")).to_be_visible()
        expect(page.locator("#class-view")).to_be_hidden()


def test_a_class_that_opens_while_another_closes_keeps_its_address(
    few: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(few, "#class-0").page
    expect(page.locator("#class-view")).to_be_visible()
    page.evaluate(
        """() => new Promise((done) => {
            location.hash = "nothing";
            setTimeout(() => (location.hash = "class-1"), 0);
            setTimeout(() => requestAnimationFrame(done), 100); // Chromium sends "close" with the next frame
        })"""
    )
    expect(page.locator("#class-view header")).to_contain_text("index 1")
    expect(page.locator("#class-view")).to_be_visible()
    assert page.url.endswith("#class-1")


def test_the_keyboard_alone_finds_and_opens_a_class(many: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(many).page
    page.keyboard.press("/")
    page.keyboard.type("class 17")
    first, second, *_ = names_of(page)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#class-view h2")).to_have_text(second)
    page.keyboard.press("Escape")
    focused = "document.activeElement.textContent"
    assert page.evaluate(focused) == second
    page.keyboard.press("ArrowUp")
    assert page.evaluate(focused) == first


def row_text(prediction: Prediction, names: Sequence[str]) -> str:
    """Return the expected text of an image's row."""
    answers = " · ".join(f"{names[index]} {score:.3f}" for index, score in prediction.top)
    return f"{prediction.file}|rank {prediction.rank:,}|{answers}"


def test_a_class_shows_all_its_images_mistakes_first_and_both_its_confusions(
    many: Path, visit: Callable[..., MonitoredPage]
) -> None:
    run = read_run(many.parent.parent)
    names = [entry.name for entry in run.info.classes]
    report = report_of(many)
    wrong_and_right = [e["index"] for e in report["classes"] if 0 < e["top1_wrong"] < e["evaluated"] and e["refused"]]
    wrong_and_right += [e["index"] for e in report["classes"] if 1 < e["top1_wrong"] < e["evaluated"] - 1][:2]
    assert wrong_and_right
    page = visit(many).page
    for label in wrong_and_right:
        page.goto(f"{many.as_uri()}#class-{label}")
        dialog = page.locator("#class-view")
        expect(dialog).to_contain_text(f"index {label}")
        own = [prediction for prediction in run.predictions if prediction.label == label]
        seen = [prediction for prediction in own if prediction.refused is None]
        wrong = sorted((p for p in seen if p.rank > 1), key=lambda p: -p.top[0][1])
        right = sorted((p for p in seen if p.rank == 1), key=lambda p: p.top[0][1])
        parts = "(row) => ['.file', '.number', '.answers'].map((part) => row.querySelector(part).textContent).join('|')"
        shown = dialog.locator(".shots li").evaluate_all(f"(rows) => rows.map({parts})")
        assert shown == [row_text(prediction, names) for prediction in (*wrong, *right)]
        for prediction in own:
            if prediction.refused is not None:
                expect(dialog.locator(".refused-files")).to_contain_text(prediction.file)
        for column, pairs in enumerate(
            (
                [p.top[0][0] for p in wrong],
                [p.label for p in run.predictions if p.refused is None and p.rank > 1 and p.top[0][0] == label],
            )
        ):
            counted = sorted((-pairs.count(index), index) for index in set(pairs))[:8]
            rows = dialog.locator(".columns > div").nth(column).locator("li .name").all_text_contents()
            assert rows == [names[index] for _, index in counted]


def test_a_class_shows_its_error_by_each_view_beside_that_of_all(
    many: Path, visit: Callable[..., MonitoredPage]
) -> None:
    report = report_of(many)
    entry = next(e for e in report["classes"] if len({view["top1_error"] for view in e["views"]}) > 2)
    page = visit(many, f"#class-{entry['index']}").page
    rows = page.locator(".class-views tbody tr").evaluate_all(
        "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent.replace('−', '-')))"
    )
    assert len(rows) == len(report["views"]) + 1
    for row, own, every in zip(rows, entry["views"], report["views"], strict=False):
        assert row[0] == f"scale {every['scale']}{' mirrored' if every['mirrored'] else ''}"
        gains = (own["top1_error"] - entry["top1_error"], every["top1_error"] - report["top1_error"])
        assert [float(cell) for cell in row[1:3]] == pytest.approx([own["top1_error"], gains[0]], abs=0.051)
        assert float(row[3]) == pytest.approx(gains[1], abs=0.0051)


def test_the_views_of_a_class_fit_a_phone(many: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(many, "#class-3", size=PHONE).page
    scrolled = page.locator("#class-view .scroll")
    expect(scrolled).to_be_visible()
    assert scrolled.evaluate("(element) => element.scrollWidth - element.clientWidth") == 0
    assert page.locator(".class-views thead th:visible").all_text_contents() == [
        "view",
        "top-1",
        "gain",
        "top-5",
        "gain",
    ]


def test_mistakes_with_pictures_are_shown_as_tiles_identical_to_those_of_the_gallery(
    few: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(few, "#class-0").page
    tiles = page.locator("#class-view .gallery figure")
    expect(tiles).to_have_count(1)
    sizes = page.eval_on_selector_all("img", "(images) => images.map((image) => image.naturalWidth)")
    assert len(sizes) > 3
    assert all(sizes)
    expect(tiles.first).to_contain_text("n01/00.png")
    page.goto(f"{few.as_uri()}#class-1")
    expect(page.locator("#class-view img.tiny")).to_have_attribute("alt", "crane, n02/04.png")


def test_print_shows_every_class_that_the_filter_shows_on_white_and_never_the_panel(
    many: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(many, "#class-7").page
    expect(page.locator("#class-view")).to_be_visible()
    for scheme in ("light", "dark"):
        page.emulate_media(media="print", color_scheme="dark" if scheme == "dark" else "light")
        expect(page.locator("#class-view")).to_be_hidden()
        expect(page.locator(".tools")).to_be_hidden()
        assert page.locator("table.all tbody tr:visible").count() == 200
        expect(page.locator("#error-chart svg")).to_be_visible()
        assert brightness(page, "body") == 3 * 255
        ink = page.evaluate("getComputedStyle(document.body).color")
        assert sum(map(int, re.findall(r"\d+", ink))) < 200
    page.emulate_media(media="screen")
    page.keyboard.press("Escape")
    page.get_by_role("searchbox").fill("class 1")
    page.emulate_media(media="print")
    assert page.locator("table.all tbody tr:visible").count() == 109


def test_without_scripts_the_figures_and_every_class_can_be_read(
    thousand: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(thousand, java_script_enabled=False).page
    report = report_of(thousand)
    expect(page.locator(".figures")).to_contain_text(f"{report['top1_error']:.2f}")
    expect(page.locator(".figures")).to_contain_text(f"{report['macro']['top5_error']:.2f}")
    assert page.locator("table.all tbody tr:visible").count() == 1000
    expect(page.locator(".tools")).to_be_hidden()
    expect(page.locator("#calibration")).to_contain_text(f"{report['calibration']['expected_error']:.2f} %")


def test_reduced_motion_is_respected(few: Path, visit: Callable[..., MonitoredPage]) -> None:
    for motion, still in (("reduce", True), ("no-preference", False)):
        page = visit(few, "#class-0", reduced_motion=motion).page
        expect(page.locator("#class-view")).to_be_visible()
        name, scrolling = page.evaluate(
            "[getComputedStyle(document.querySelector('dialog')).animationName,"
            " getComputedStyle(document.documentElement).scrollBehavior]"
        )
        assert (name == "none", scrolling == "auto") == (still, still)


def test_an_ensemble_names_its_members_and_has_no_views(ensemble: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(ensemble, "#class-1").page
    expect(page.locator("#class-view h2")).to_be_visible()
    expect(page.locator(".class-views")).to_have_count(0)
    expect(page.locator("#views")).to_have_count(0)
    expect(page.locator(".members li")).to_have_count(2)
    expect(page.locator(".members")).to_contain_text("weight 0.75")


def test_hostile_names_stay_text_in_the_panel_too(hostile: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(hostile).page
    for index, name in enumerate(HOSTILE):
        page.goto(f"{hostile.as_uri()}#class-{index}")
        title = page.locator("#class-view h2")
        expect(page.locator("#class-view header")).to_contain_text(f"index {index}")
        assert title.text_content() == name
    assert page.evaluate("window.hacked") is None
    assert page.locator("#class-view img").count() == 0


def test_a_point_of_the_chart_opens_its_class(few: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(few).page
    page.locator("#error-chart .mark-symbol path").first.click()
    expect(page.locator("#class-view")).to_be_visible()


def test_every_true_class_of_an_image_is_marked_in_the_view_of_its_class(
    tmp_path: Path, visit: Callable[..., MonitoredPage]
) -> None:
    lines = [
        {**evaluated("a.jpg", 1, [5, 2, 1], 2), "also": [2]},
        {**evaluated("b.jpg", 1, [0, 1], 1), "also": [0, 3]},
        evaluated("c.jpg", 1, [4, 2], 3),
    ]
    page = visit(write_report(write_run(tmp_path / "run", lines)).html, "#class-1").page
    rows = page.locator("#class-view ul.shots li")
    marked = {
        row.locator(".file").first.inner_text(): row.locator(".answer.right").all_inner_texts() for row in rows.all()
    }
    names = {file: [text.rpartition(" ")[0].split(" n0")[0] for text in texts] for file, texts in marked.items()}
    assert names == {"a.jpg": ["bottle", "crane"], "b.jpg": ["tench", "crane", "crane"], "c.jpg": ["crane"]}
    assert "; also tench, also crane" in rows.filter(has_text="b.jpg").inner_text()
    assert "; also bottle" in rows.filter(has_text="a.jpg").inner_text()
    assert "; also" not in rows.filter(has_text="c.jpg").inner_text()
