"""The table of runs in a browser: Debian's Chromium opens it and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from prelunet.evaluator.cli import run
from tests.helpers.run_folders import evaluated, write_run
from tests.reporting.browser.browsing import HOSTILE, LAPTOP, PHONE, MonitoredPage, brightness, violations

pytestmark = pytest.mark.browser

SPEEDS = [12.5, 400, None, 64, 9, 1250, 88, 301, 140, 182]  # images/s
WRONG = [9, 3, 7, 1, 0, 11, 8, 5, 4, 10]  # of 12 images
UNFINISHED = 4


def write_ten(folder: Path, names: list[str]) -> Path:
    """Write ten runs, the last five of another dataset, and the table; one run is unfinished, one is damaged."""
    for number, (name, speed, wrong) in enumerate(zip(names, SPEEDS, WRONG, strict=True)):
        lines = [evaluated(f"{n:02}.png", 0, [int(n < wrong), 2], 1 + 2 * (n < wrong)) for n in range(12)]
        place = write_run(folder / f"run-{number}", lines, images=20 if number == UNFINISHED else None)
        info = json.loads((place / "run.json").read_text())
        info["model"] |= {"file": name, "architecture": name}
        if number > 4:
            info["dataset"] |= {"name": "street", "fingerprint": "cd" * 32}
        (place / "run.json").write_text(json.dumps(info))
        if speed is not None:
            chunk = {"event": "chunk", "date": f"2026-11-{20 - number}T10:00:00+01:00", "images": 12}
            (place / "log.jsonl").write_text(json.dumps({**chunk, "seconds": 12 / speed}))
    (folder / "torn").mkdir()
    (folder / "torn" / "run.json").write_text(names[0])
    assert run(["runs", str(folder), "--html", str(folder / "runs.html")]) == 0
    return folder / "runs.html"


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ten(tmp_path_factory.mktemp("ten"), [f"net-{number}.onnx" for number in range(10)])


def shown(page: Page) -> list[int]:
    """Return the numbers of the runs in the order of the table."""
    found: list[str] = page.eval_on_selector_all(
        "table.runs tbody tr", "(rows) => rows.map((row) => row.querySelector('.file').textContent)"
    )
    return [int(name.removeprefix("run-")) for name in found]


def ordered(numbers: list[int], key: Callable[[int], Any], sign: int = 1) -> list[int]:
    """Return the runs by a value; those without one are last, and ties stay as they are."""
    return sorted(numbers, key=lambda number: (key(number) is None, sign * (key(number) or 0)))


def error(number: int) -> int | None:
    return None if number == UNFINISHED else WRONG[number]


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_axe_finds_nothing_to_object_to(ten: Path, visit: Callable[..., MonitoredPage], size: tuple[int, int]) -> None:
    assert violations(visit(ten, size=size).page) == []


def test_a_heading_sorts_both_ways_by_click_and_by_keyboard_and_the_dataset_restores_the_order(
    ten: Path, visit: Callable[..., MonitoredPage]
) -> None:
    page = visit(ten).page
    first = [*ordered([5, 6, 7, 8, 9], error), *ordered([0, 1, 2, 3, 4], error)]
    assert shown(page) == first
    heads = page.locator("th[aria-sort]")
    for heading, key, sign in (
        ("Images/s", lambda number: SPEEDS[number], -1),
        ("Top-1 error", error, 1),
        ("Date (UTC)", lambda number: None if SPEEDS[number] is None else 20 - number, -1),
        ("Model", lambda number: number, 1),
    ):
        button = page.get_by_role("button", name=heading)
        for press, factor in ((button.click, sign), (lambda: page.keyboard.press("Enter"), -sign)):
            press()
            assert shown(page) == ordered(first, key, factor), (heading, factor)
            expect(heads).to_have_count(1)
            expect(heads).to_have_text(heading)
            expect(heads).to_have_attribute("aria-sort", "ascending" if factor == 1 else "descending")
    page.get_by_role("button", name="Dataset").click()
    assert shown(page) == first


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_the_table_fits_with_names_of_any_kind_in_both_color_schemes(
    tmp_path: Path, visit: Callable[..., MonitoredPage], scheme: str, size: tuple[int, int]
) -> None:
    names = [(HOSTILE * 2)[number].replace("/", "\\")[:200] for number in range(10)]
    watched = visit(write_ten(tmp_path, names), size=size, color_scheme=scheme)
    page = watched.page
    assert watched.overflow() == 0
    assert (brightness(page, "body") > 384) == (scheme == "light")
    assert page.evaluate("window.hacked") is None
    expect(page.locator("table.runs")).to_contain_text("unfinished: 12 of 20 images are done")
    expect(page.locator("#damaged")).to_contain_text("torn/run.json: damaged")
    page.get_by_role("button", name="Top-5 error").click()
    expect(page.locator("th[aria-sort]")).to_have_text("Top-5 error")


def test_without_javascript_the_table_shows_every_run(ten: Path, visit: Callable[..., MonitoredPage]) -> None:
    page = visit(ten, java_script_enabled=False).page
    expect(page.locator("table.runs tbody tr")).to_have_count(10)
