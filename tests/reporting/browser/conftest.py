"""Fixtures of the tests in a browser: Debian's Chromium opens pages and nothing else.

Skipped where there is no Chromium; `make test-browser` fails there instead.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from prelunet.evaluator.datasets import open_dataset
from prelunet.evaluator.reporting.report_page import write_report
from tests.helpers.run_folders import evaluated, refused, write_ensemble, write_run
from tests.reporting.browser.browsing import HOSTILE, LAPTOP, MonitoredPage, imagenet_shape

INSTALL = "install it with: apt-get install --no-install-recommends chromium fonts-dejavu-core"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium once, without a sandbox, which containers do not support."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
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
    """Return a function that opens a report; at the end check that no page had problems."""
    opened: list[MonitoredPage] = []

    def open_page(report: Path, fragment: str = "", size: tuple[int, int] = LAPTOP, **options: Any) -> MonitoredPage:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        watched = MonitoredPage(context.new_page(), report.as_uri())
        opened.append(watched)
        watched.page.goto(watched.address + fragment)
        return watched

    yield open_page
    for watched in opened:
        assert watched.wrong == []
        watched.page.context.close()


def html_of(run: Path) -> Path:
    return write_report(run).html


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of a run of 1,000 classes, five images each, in the shape that the benchmark defines."""
    shape = imagenet_shape(per_class=5)
    folder = tmp_path_factory.mktemp("many")
    shape.write(folder, 3, 1)
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    lines[1717] = refused(lines[1717]["file"], lines[1717]["label"])
    (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = json.loads((folder / "run.json").read_text())
    run["classes"][134]["name"] = run["classes"][517]["name"] = "crane"
    (folder / "run.json").write_text(json.dumps(run))
    return html_of(folder)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of a run on real pictures: three classes, twelve images, one of them tiny."""
    folder = tmp_path_factory.mktemp("few")
    rng = np.random.default_rng(4)
    lines = []
    for number in range(12):
        label = number % 3
        wnid = ("n01", "n02", "n03")[label]
        path = folder / "data" / wnid / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = (20, 31) if number == 4 else (90 + number, 130)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
        wrong = number % 4 == 0
        answers = [(label + 1) % 3, label] if wrong else [label, (label + 1) % 3]
        lines.append(evaluated(f"{wnid}/{path.name}", label, answers, 1 + wrong, first=0.5 + number / 30))
    dataset = open_dataset(folder / "data", split="val", wnids=[f"n0{index}" for index in range(1, 8)])
    write_run(folder / "run", lines, fingerprint=dataset.fingerprint, data=str(folder / "data"))
    return html_of(folder / "run")


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of an ensemble: no views, two members."""
    lines = [evaluated(f"n0{n % 3}/{n}.png", n % 3, [(n + n % 2) % 3, 5], 1 + 2 * (n % 2)) for n in range(9)]
    return html_of(write_ensemble(tmp_path_factory.mktemp("ensemble"), lines))


@pytest.fixture(scope="module")
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
