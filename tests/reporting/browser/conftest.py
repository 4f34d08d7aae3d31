"""Fixtures of the tests in a browser: Debian's Chromium opens pages.

Skipped where there is no Chromium; `make test-browser` fails there instead.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from prelunet.evaluator.reporting.report_page import write_report
from tests.conftest import Shared
from tests.helpers.run_folders import evaluated, refused, write_ensemble, write_run
from tests.reporting.browser.browsing import HOSTILE, LAPTOP, MonitoredPage, imagenet_shape
from tests.reporting.pages import fingerprint_of, make_images

expect.set_options(timeout=20_000)  # milliseconds; 5 s are too few for two busy cores

INSTALL = "install it with: apt-get install --no-install-recommends chromium-headless-shell fonts-dejavu-core"


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Start Chromium once, without a sandbox, which containers do not support."""
    path = shutil.which("chromium-headless-shell") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        missing = f"no Chromium on this machine; {INSTALL}"
        if os.environ.get("NEED_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., MonitoredPage]]:
    """Return a function that opens a report or an address; at the end check that no page had problems."""
    opened: list[MonitoredPage] = []

    def open_page(
        report: Path | str, fragment: str = "", size: tuple[int, int] = LAPTOP, **options: Any
    ) -> MonitoredPage:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        watched = MonitoredPage(context.new_page(), report if isinstance(report, str) else report.as_uri())
        opened.append(watched)
        watched.page.goto(watched.address + fragment)
        return watched

    yield open_page
    for watched in opened:
        assert watched.wrong == []
        watched.page.context.close()


def html_of(run: Path) -> Path:
    return write_report(run).html


def _report_of_shape(shared: Shared, name: str, classes: int, change: Callable[[Path], None]) -> Path:
    """Return the report of a run of five images a class, in the shape that the benchmark defines."""

    def write(folder: Path) -> None:
        imagenet_shape(per_class=5, classes=classes).write(folder, 3, 1)
        change(folder)
        html_of(folder)

    return shared(name, write) / "report" / "report.html"


@pytest.fixture(scope="package")
def thousand(shared: Shared) -> Path:
    """Write the report of a run of 1,000 classes."""
    return _report_of_shape(shared, "thousand", 1000, lambda _: None)


@pytest.fixture(scope="package")
def many(shared: Shared) -> Path:
    """Write the report of a run of 200 classes, of which two share a name and one has a refused image."""

    def change(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
        lines[717] = refused(lines[717]["file"], lines[717]["label"])
        (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        run = json.loads((folder / "run.json").read_text())
        run["classes"][117]["name"] = run["classes"][134]["name"] = "crane"
        (folder / "run.json").write_text(json.dumps(run))

    return _report_of_shape(shared, "many", 200, change)


@pytest.fixture(scope="package")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of a run on real pictures: three classes, twelve images, one of them tiny."""
    folder = tmp_path_factory.mktemp("few")
    lines, sizes = [], {}
    for number in range(12):
        label, wrong = number % 3, number % 4 == 0
        file = f"n0{label + 1}/{number:02}.png"
        sizes[file] = (31, 20) if number == 4 else (130, 90 + number)
        answers = [(label + 1) % 3, label] if wrong else [label, (label + 1) % 3]
        lines.append(evaluated(file, label, answers, 1 + wrong, first=0.5 + number / 30))
    data = make_images(folder / "data", sizes)
    write_run(folder / "run", lines, fingerprint=fingerprint_of(data), data=str(data))
    return html_of(folder / "run")


@pytest.fixture(scope="package")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of an ensemble: no views, two members."""
    lines = [evaluated(f"n0{n % 3}/{n}.png", n % 3, [(n + n % 2) % 3, 5], 1 + 2 * (n % 2)) for n in range(9)]
    return html_of(write_ensemble(tmp_path_factory.mktemp("ensemble"), lines))


@pytest.fixture(scope="package")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of a run with hostile names and reasons."""
    folder = tmp_path_factory.mktemp("hostile")
    classes = [{"wnid": f"{name} {index}", "name": name} for index, name in enumerate(HOSTILE * 3)]
    lines = [
        evaluated(f"{name}{index}x", index, [(index + 6) % 18, (index + 1) % 18, index], 3)
        for index, name in enumerate(HOSTILE * 3)
    ]
    lines.append(refused(f"{HOSTILE[0]}z", 0, HOSTILE[1]))
    lines = [{**line, "file": line["file"].replace("/", "\\")} for line in lines]
    return html_of(write_run(folder, lines, classes=classes))
