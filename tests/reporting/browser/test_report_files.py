"""What a reader takes from the report in a browser: images of a confusion pair, charts, tables, the headline."""

import csv
import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from prelunet.evaluator.reporting import page_data
from prelunet.evaluator.validation.run import read_run
from tests.reporting.browser.browsing import HOSTILE, LAPTOP, PHONE, MonitoredPage
from tests.reporting.browser.conftest import html_of

pytestmark = pytest.mark.browser

Visit = Callable[..., MonitoredPage]


def pairs_of(html: Path) -> list[tuple[tuple[int, int], int]]:
    """Return the pairs of true class and wrong answer with their number of images, most frequent first."""
    wrong = [(p.label, p.top[0][0]) for p in read_run(html.parent.parent).predictions if p.rank > 1]
    return sorted(Counter(wrong).items(), key=lambda item: (-item[1], item[0]))


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_a_pair_opens_all_its_images_and_back_leaves_it(many: Path, visit: Visit, size: tuple[int, int]) -> None:
    ((label, answer), count), *_ = pairs_of(many)
    assert label not in {117, 134}  # whose name is not their index
    watched = visit(many, size=size)
    page, dialog = watched.page, watched.page.locator("#class-view")
    page.locator(".pairs li").first.locator(".bar").click()  # anywhere but on the names
    expect(dialog.locator("h2")).to_have_text(f"class {label} → class {answer}")
    assert page.url.endswith(f"#pair-{label}-{answer}")
    own = [
        p for p in read_run(many.parent.parent).predictions if p.rank > 1 and (p.label, p.top[0][0]) == (label, answer)
    ]
    expected = [p.file for p in sorted(own, key=lambda p: -p.top[0][1])]
    assert dialog.locator(".shots .file .file").all_text_contents() == expected
    expect(dialog).to_contain_text(f"{count} of 5 images")
    assert watched.overflow() == 0
    dialog.get_by_role("link", name=f"class {answer}", exact=True).first.click()
    expect(dialog.locator("h2")).to_have_text(f"class {answer}")
    page.go_back()
    expect(dialog.locator("h2")).to_contain_text("→")
    page.go_back()
    expect(dialog).to_be_hidden()
    page.go_forward()
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert "#" not in page.url


def test_the_keyboard_opens_pairs_from_the_list_the_matrix_and_both_sides_of_a_class(few: Path, visit: Visit) -> None:
    page = visit(few).page
    title = page.locator("#class-view h2")
    (label, answer), count = pairs_of(few)[0]
    names = [entry.name for entry in read_run(few.parent.parent).info.classes]
    for fragment, link in (
        ("", page.locator("#confusions .pairs a.number").first),
        ("", page.locator(f".matrix a[href='#pair-{label}-{answer}']")),
        (f"#class-{label}", page.locator("#class-view .columns > div").nth(0).locator("a.number").first),
        (f"#class-{answer}", page.locator("#class-view .columns > div").nth(1).locator("a.number").first),
    ):
        page.goto("about:blank")
        page.goto(few.as_uri() + fragment)
        expect(link).to_contain_text(str(count))
        link.press("Enter")
        expect(title).to_contain_text(f"{names[label]}")
        assert page.url.endswith(f"#pair-{label}-{answer}")
        page.keyboard.press("Escape")


def test_a_pair_shows_the_pictures_that_the_page_has(few: Path, visit: Visit) -> None:
    (label, answer), count = pairs_of(few)[0]
    page = visit(few, f"#pair-{label}-{answer}").page
    expect(page.locator("#class-view .gallery figure")).to_have_count(count)
    widths = page.eval_on_selector_all("#class-view img", "(images) => images.map((image) => image.naturalWidth)")
    assert len(widths) == count
    assert all(widths)


def test_an_address_of_no_pair_opens_nothing(few: Path, visit: Visit) -> None:
    (label, answer), _ = pairs_of(few)[0]
    good = f"{few.as_uri()}#pair-{label}-{answer}"
    page = visit(few).page
    for wrong in ("0-0", "99-1", "0-99", f"{label}-{answer}-1", f"{label}", f"{answer}-{label}"):
        page.goto(good)
        expect(page.locator("#class-view")).to_be_visible()
        page.goto(f"{few.as_uri()}#pair-{wrong}")
        expect(page.locator("#class-view")).to_be_hidden()


def saved(page: Page, button: Locator) -> tuple[str, bytes]:
    """Click a button; return the name and content of the file that it saves."""
    with page.expect_download() as caught:
        button.click()
    return caught.value.suggested_filename, caught.value.path().read_bytes()


def test_every_chart_of_a_dark_page_is_saved_as_svg_and_png_in_light_colors_on_white(few: Path, visit: Visit) -> None:
    page = visit(few, color_scheme="dark").page
    specifications = json.loads(page.locator("#charts").text_content() or "")
    assert set(specifications) == {"error", "reliability", "bins", "histogram", "risk"}
    expect(page.locator(".save button", has_text="SVG")).to_have_count(5)
    names = {}
    for kind in ("SVG", "PNG"):
        for button in page.locator(".save button", has_text=kind).all():
            name, content = saved(page, button)
            names[name] = content
    assert set(names) == {f"c.onnx-on-val-{name}.{kind}" for name in specifications for kind in ("svg", "png")}
    svg = names["c.onnx-on-val-risk.svg"].decode()
    assert "var(" not in svg
    assert "#0a6a8f" in svg
    assert "top-1 error of these" in svg
    picture = Image.open(io.BytesIO(names["c.onnx-on-val-risk.png"])).convert("RGB")
    width, height = map(float, re.search(r'width="([\d.]+)" height="([\d.]+)"', svg).groups())  # type: ignore[union-attr]
    assert picture.size == (2 * int(width), 2 * int(height))
    assert picture.getpixel((0, 0)) == (255, 255, 255)
    assert (10, 106, 143) in {color for _, color in picture.getcolors(2**20) or []}  # the accent of light pages


def rows_of(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode())))


def test_mistakes_and_pairs_are_saved_as_csv_with_all_that_the_run_has(many: Path, visit: Visit) -> None:
    page = visit(many).page
    run = read_run(many.parent.parent)
    wrong = [p for p in run.predictions if p.rank > 1]
    name, content = saved(page, page.get_by_role("button", name="Download the mistakes as CSV"))
    assert name == "model-1.onnx-on-imagenet-shape-mistakes.csv"
    rows = rows_of(content)
    assert {row["file"]: (int(row["label"]), int(row["answer"]), int(row["rank"])) for row in rows} == {
        p.file: (p.label, p.top[0][0], p.rank) for p in wrong
    }
    scores = {p.file: p.top[0][1] for p in wrong}
    assert all(abs(float(row["score"]) - scores[row["file"]]) <= 0.00051 for row in rows)  # three decimals
    classes = run.info.classes
    assert all(
        (row["wnid"], row["answer_name"]) == (classes[int(row["label"])].wnid, classes[int(row["answer"])].name)
        for row in rows
    )
    name, content = saved(page, page.get_by_role("button", name="Download all confusion pairs as CSV"))
    assert name == "model-1.onnx-on-imagenet-shape-confusions.csv"
    assert [((int(row["label"]), int(row["answer"])), int(row["images"])) for row in rows_of(content)] == pairs_of(many)


def test_a_page_that_lists_only_some_mistakes_says_so(
    tmp_path: Path, many: Path, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_data, "MAX_LISTED_IMAGES", 400)
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("run.json", "predictions.jsonl"):
        (copy / name).write_bytes((many.parent.parent / name).read_bytes())
    page = visit(html_of(copy)).page
    total = sum(count for _, count in pairs_of(many))
    expect(page.locator("#mistakes .save")).to_contain_text(
        f"of {total:,} mistakes; the run’s predictions.jsonl lists all"
    )
    rows = rows_of(saved(page, page.get_by_role("button", name="Download the mistakes as CSV"))[1])
    expect(page.locator("#mistakes .save")).to_contain_text(f"{len(rows):,} of")
    assert len(rows) < total


def test_names_stay_names_in_csv_and_none_becomes_a_formula(tmp_path: Path, hostile: Path, visit: Visit) -> None:
    run = json.loads((hostile.parent.parent / "run.json").read_text())
    shutil.copytree(hostile.parent.parent, tmp_path / "run")
    formulas = ["=1+1", "+1", "-1", "@SUM(A1)", 'a,"b"', "a=1"]
    for entry, name in zip(run["classes"], formulas, strict=False):
        entry["name"] = name
    (tmp_path / "run" / "run.json").write_text(json.dumps(run))
    page = visit(html_of(tmp_path / "run")).page
    rows = rows_of(saved(page, page.get_by_role("button", name="Download the mistakes as CSV"))[1])
    names = {int(row["label"]): row["name"] for row in rows}
    assert [names[index] for index in range(6)] == ["'=1+1", "'+1", "'-1", "'@SUM(A1)", 'a,"b"', "a=1"]
    assert names[6] == HOSTILE[0]


def test_the_headline_is_copied_with_and_without_the_clipboard_api(few: Path, visit: Visit) -> None:
    page = visit(few).page
    headline = page.locator("#headline").text_content()
    page.evaluate("addEventListener('copy', () => { window.copiedText = String(getSelection()); })")
    page.evaluate("() => { navigator.clipboard.writeText = async (text) => { window.written = text; }; }")
    button = page.get_by_role("button", name="Copy the headline")
    status = page.locator("#headline + .save [aria-live=polite]")
    button.press("Enter")
    expect(status).to_have_text("copied")
    assert page.evaluate("window.written") == headline
    page.evaluate("() => { navigator.clipboard.writeText = async () => { throw new Error('not allowed'); }; }")
    button.click()
    expect(status).to_have_text("copied")
    assert " ".join(page.evaluate("window.copiedText").split()) == " ".join((headline or "").split())
