"""Inspects pages in a browser for tests."""

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from types import ModuleType
from typing import Any

from playwright.sync_api import ConsoleMessage, Page, Request

LAPTOP, PHONE = (1280, 800), (390, 844)
HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 1">',
    "' onmouseover='window.hacked = 1",
    "\u202eright to left\u202c \u2067עברית\u2069",
    "very-long-name-" * 40,
    "javascript:window.hacked=1",
]


class MonitoredPage:
    """A page and its problems: console messages, exceptions, requests that go elsewhere.

    address: of the page; calls_may_fail: whether the browser's notes on failed calls, which can come late, are none.
    """

    def __init__(self, page: Page, address: str) -> None:
        self.page, self.address = page, address
        self.wrong: list[str] = []
        self.calls_may_fail = False
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.wrong.append(f"exception: {error}"))
        page.on("request", self._on_request)
        page.on("dialog", lambda dialog: self.wrong.append(f"dialog: {dialog.message}"))

    def _on_console(self, message: ConsoleMessage) -> None:
        if not (self.calls_may_fail and "Failed to load resource" in message.text):
            self.wrong.append(f"{message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self.address, "data:", "about:", "blob:")):
            self.wrong.append(f"request: {request.url}")

    def overflow(self) -> int:
        """Return the horizontal overflow of the page, or of the open panel, in pixels."""
        widths: list[int] = self.page.evaluate(
            "[document.documentElement, document.querySelector('dialog[open]')]"
            ".filter((element) => element).map((element) => element.scrollWidth - element.clientWidth)"
        )
        return max(widths)


AXE = (files("axe_playwright_python") / "axe.min.js").read_text()
AXE_RUN = """async () => (await axe.run(document.querySelector("dialog[open]") ?? document, {
  resultTypes: ["violations"],
  rules: { "label-content-name-mismatch": { enabled: true }, "target-size": { enabled: true } },
})).violations.flatMap(({ id, nodes }) => nodes.map((node) => `${id}: ${node.html.slice(0, 120)}`))"""


def violations(page: Page) -> list[str]:
    """Return what axe-core finds in a page, or in its open panel, in light and in dark mode."""
    panel = page.evaluate("document.querySelector('dialog[open]')?.scrollHeight")
    if panel:  # axe takes links below the fold of a panel for skip links
        page.set_viewport_size({"width": LAPTOP[0], "height": panel})
    page.evaluate(AXE)
    found: list[str] = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        found += [f"{scheme}: {violation}" for violation in page.evaluate(AXE_RUN)]
    return found


def names_of(page: Page) -> list[str]:
    """Return the names in the table rows that match the search and filters, in order."""
    return page.eval_on_selector_all(
        "table.all tbody tr:not([hidden])", "(rows) => rows.map((row) => row.querySelector('.name').textContent)"
    )


def check_sorting(
    page: Page, classes: Sequence[Mapping[str, Any]], keys: Mapping[str, Callable[[Mapping[str, Any]], Any]]
) -> None:
    """Check that the button of each column sorts the table both ways, and that rows without a number stay last.

    Classes without images are shown for it.

    keys: column → what it shows of a class; the column of names, which every table has, is not sorted.
    """
    for switch in page.locator(".switch input").all():
        switch.check()
    columns = page.eval_on_selector_all("th[data-key]", "(heads) => heads.map((head) => head.dataset.key)")
    assert set(columns) == {*keys, "name"}
    for column, key in keys.items():
        head = page.locator(f"th[data-key={column}]")
        seen = set()
        for _ in range(2):
            head.get_by_role("button").click()
            order = head.get_attribute("aria-sort") or ""
            sign = 1 if order == "ascending" else -1
            numbered = [entry for entry in classes if key(entry) is not None]
            expected = sorted(numbered, key=lambda entry: (sign * key(entry), entry["index"]))
            expected += [entry for entry in classes if key(entry) is None]
            assert names_of(page) == [entry["name"] for entry in expected], (column, order)
            seen.add(order)
        assert seen == {"ascending", "descending"}
        assert page.locator("th[aria-sort]").count() == 1


def brightness(page: Page, selector: str) -> int:
    """Return red + green + blue of an element's background."""
    color = page.evaluate("(selector) => getComputedStyle(document.querySelector(selector)).backgroundColor", selector)
    return sum(map(int, re.findall(r"\d+", color)))


def imagenet_shape(per_class: int, classes: int) -> ModuleType:
    """Return the benchmark's writer of runs of `classes` classes with `per_class` images in each."""
    spec = importlib.util.find_spec("benchmarks.reporting.imagenet_shape")
    assert spec is not None
    assert spec.loader is not None
    shape = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shape)
    shape.PER_CLASS, shape.CLASSES = per_class, classes
    return shape
