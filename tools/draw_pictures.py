"""Draw the pictures of README and docs from what `make demo-photos` left: `make pictures`.

The report, one of its classes, the comparison and the live page, each light and dark, and the heat map.
Chromium takes the screenshots (apt-get install --no-install-recommends chromium-headless-shell fonts-dejavu-core).
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

PHOTOS, IMAGES = Path("demo/lite0"), Path("docs/images")
WIDTH, COLORS = 1080, 256  # pixels of a page; colors of a picture, which make its file a third as large


def main() -> None:
    """Draw all pictures."""
    shutil.copy(PHOTOS / "heatmap.png", IMAGES)
    report = (PHOTOS / "run" / "report" / "report.html").resolve().as_uri()
    comparison = (PHOTOS / "compared" / "compare.html").resolve().as_uri()
    with server() as address, sync_playwright() as playwright:
        path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for scheme, ending in (("light", ""), ("dark", "-dark")):
            page = chromium.new_context(color_scheme=scheme, viewport={"width": WIDTH, "height": 900}).new_page()
            page.goto(report)
            picture(page, f"report{ending}", 1060)
            page.goto(f"{report}#class-{worst_class(page)}")
            for button in page.locator("#class-view .maps button:first-child").all():
                button.click()
            page.locator("#class-view").evaluate("(panel) => panel.scrollTo(0, 0)")
            page.wait_for_timeout(500)
            picture(page, f"class{ending}", 1060)
            page.goto(comparison)
            picture(page, f"compare{ending}", 900)
            page.goto(address)
            page.set_input_files("#file", PHOTOS / "shelf.png")
            page.wait_for_selector("#classes li")
            page.hover("#classes li")  # shows its heat map
            page.wait_for_timeout(500)
            picture(page, f"live{ending}", 760)
        chromium.close()


def worst_class(page: Page) -> str:
    """Return the index of the class whose row is first among the worst."""
    link = page.locator("a[href^='#class-']").first.get_attribute("href")
    assert link is not None
    return link.removeprefix("#class-")


def picture(page: Page, name: str, height: int) -> None:
    """Take a screenshot of the top of a page."""
    page.set_viewport_size({"width": WIDTH, "height": height})
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path)
    with Image.open(path) as full:
        full.convert("RGB").quantize(COLORS).save(path, optimize=True)


@contextmanager
def server() -> Iterator[str]:
    """Serve the net of the photos with the live page on free ports."""
    command = ["prelunet", "serve", f"{PHOTOS}/lite0.onnx", "--port", "0", "--http-port", "0", "--lame-duck", "0"]
    command += ["--examples", f"{PHOTOS}/photos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            address = re.search(r"http on (\S+)", line)
            assert address, line
            yield address[1].rstrip("/")
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
