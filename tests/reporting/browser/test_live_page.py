"""The live page in a browser, with a real server: Debian's Chromium and models that see colors."""

import base64
import hashlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import jsonschema
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from benchmarks.reliability.rolling_restart import NGINX_MAIN
from prelunet.evaluator.client import Client
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.serving.access import AccessControl, create_token
from prelunet.evaluator.serving.options import HttpOptions
from tests.helpers.fakes import FakeSession, fake_contract
from tests.reporting.browser.browsing import HOSTILE, LAPTOP, MonitoredPage, brightness, violations
from tests.reporting.pages import Elements
from tests.serving.serving_harness import GatedSession, RunningServer, eventually, png, running_server

pytestmark = pytest.mark.browser

Visit = Callable[..., MonitoredPage]
DEPLOY = Path(__file__).parents[3] / "deploy"
SMALL_PHONE = (360, 740)
COLORS = ("red", "green", "blue", "none")
UNSEEN = [255, 255, 255]
# How a camera that was held like this stores the upright picture, by EXIF orientation.
STORED = {
    1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270,
}  # fmt: skip


def color_contract(names: tuple[str, ...] = COLORS) -> Any:
    """Return a contract at scales that are large for its windows, so that a map shows small things."""
    contract = fake_contract(len(names), default_scales=(112, 140))
    return replace(contract, classes=tuple(ClassEntry(f"n{n}", name) for n, name in enumerate(names)))


def seeing_colors(session: FakeSession) -> FakeSession:
    """Let the first three classes see red, green and blue, and the last one black."""
    session._weights = np.zeros_like(session._weights)
    for channel in range(3):
        session._weights[channel, :, :, channel] = 0.05 / session.contract.crop**2
    return session


def photo(size: tuple[int, int] = (400, 300), orientation: int = 1) -> bytes:
    """Return a black JPEG of (width, height) with a red square at the top right and a green one at the bottom left.

    orientation: of EXIF; the upright picture is always the same.
    """
    picture = Image.new("RGB", size)
    picture.paste((255, 0, 0), (size[0] - 160, 30, size[0] - 40, 150))
    picture.paste((0, 255, 0), (20, size[1] - 110, 110, size[1] - 20))
    transposed = STORED[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    (picture if transposed is None else picture.transpose(transposed)).save(buffer, "JPEG", quality=95, exif=exif)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    """Serve two models without tokens."""
    sessions = {"colors": seeing_colors(FakeSession(color_contract())), "six": FakeSession()}
    with running_server(http=HttpOptions(port=0), **sessions) as server:
        yield server


def page_of(server: RunningServer) -> str:
    return f"http://{server.http}/"


def choose(page: Page, picture: bytes, name: str = "photo.jpg", kind: str = "image/jpeg", field: str = "file") -> None:
    page.set_input_files(f"#{field}", {"name": name, "mimeType": kind, "buffer": picture})


def transfer(page: Page, event: str, picture: bytes) -> None:
    """Drop a picture on the page, or paste it."""
    page.evaluate(
        """([kind, text]) => {
          const transfer = new DataTransfer();
          const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
          transfer.items.add(new File([bytes], "photo.jpg", { type: "image/jpeg" }));
          const options = { bubbles: true, cancelable: true };
          document.body.dispatchEvent(kind === "drop" ? new DragEvent(kind, { ...options, dataTransfer: transfer })
            : new ClipboardEvent(kind, { ...options, clipboardData: transfer }));
        }""",
        [event, base64.b64encode(picture).decode()],
    )


def answered(page: Page, classes: int = 4) -> list[list[str]]:
    """Wait for an answer and return its classes with their scores, as shown."""
    expect(page.locator("#classes button")).to_have_count(classes)
    expect(page.locator("#status")).to_contain_text("Answered in")
    return [row.split("\n") for row in page.locator("#classes button").all_inner_texts()]


def map_pixels(page: Page) -> np.ndarray:
    """Return the drawn map, uint8 (rows, columns, 3)."""
    address = page.locator("#frame canvas").evaluate("(canvas) => canvas.toDataURL()")
    return np.array(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))).convert("RGB"))


def center_of(mask: np.ndarray) -> tuple[float, float]:
    """Return the center of the true pixels as parts of width and height."""
    rows, columns = np.nonzero(mask)
    return float(columns.mean() / mask.shape[1]), float(rows.mean() / mask.shape[0])


def test_the_page_may_run_its_own_script_and_call_its_own_server_only(served: RunningServer) -> None:
    with urlopen(page_of(served)) as answer:
        policy, html = answer.headers["Content-Security-Policy"], answer.read().decode()
    found = Elements(html)
    (script,) = found.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not re.search("unsafe|https?:", policy)
    assert {link["href"] for tag in ("a", "link") for link in found.named(tag)} == {"openapi.json", "data:,"}
    assert not [
        name
        for _, attributes in found.elements
        for name in attributes
        if name in {"src", "style"} or name.startswith("on")
    ]


def test_the_description_has_all_that_the_page_sends_and_gets(served: RunningServer, visit: Visit) -> None:
    with urlopen(f"{page_of(served)}openapi.json") as answer:
        description = json.load(answer)
    page, seen = visit(page_of(served)).page, []
    page.wait_for_load_state("networkidle")
    page.on("response", lambda response: seen.append(response))  # noqa: PLW0108 - Playwright takes no built-in
    page.reload()
    choose(page, photo())
    answered(page)
    paths = set()
    for response in seen:
        url = urlsplit(response.url)
        path = re.sub("(?<=^/v1/models/).*", "{name}", url.path)
        if path.startswith("/v1/"):
            paths.add(path)
            operation = description["paths"][path][response.request.method.lower()]
            assert parse_qs(url.query).keys() <= {each["name"] for each in operation.get("parameters", ())}
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            jsonschema.validate(response.json(), {**schema, "components": description["components"]})
    assert paths >= {"/v1/models", "/v1/classify"}


@pytest.mark.parametrize("way", ["drop", "paste", "file", "camera"])
def test_a_picture_gets_the_answer_that_a_client_gets(served: RunningServer, visit: Visit, way: str) -> None:
    page = visit(page_of(served), has_touch=way == "camera").page
    if way in {"drop", "paste"}:
        transfer(page, way, photo())
    else:
        choose(page, photo(), field=way)
    with Client(served.address) as client:
        expected = client.classify(photo(), model="colors", apply_exif=True)
    assert answered(page) == [[found.name, f"{100 * found.score:.1f} %"] for found in expected.predictions]
    shares = page.locator("#classes .bar i").evaluate_all("(bars) => bars.map((bar) => parseFloat(bar.style.width))")
    assert shares == pytest.approx([100 * found.score for found in expected.predictions], abs=0.01)


def test_the_chosen_model_and_protocol_are_used(served: RunningServer, visit: Visit) -> None:
    page = visit(page_of(served)).page
    choose(page, photo())
    answered(page)
    page.get_by_label("Model").select_option("six")
    page.get_by_label("Protocol").select_option("ten-crop")
    with Client(served.address) as client:
        expected = client.classify(photo(), model="six", protocol="ten-crop", apply_exif=True)
    expect(page.locator("#seen")).to_contain_text("its corners and center: 10 views")
    assert [name for name, _ in answered(page, 5)] == [found.name for found in expected.predictions]


@pytest.mark.parametrize(("orientation", "applied"), [*((number, True) for number in STORED), (2, False), (6, False)])
def test_the_map_of_a_class_lies_where_the_class_is_on_the_shown_photo(
    served: RunningServer, visit: Visit, orientation: int, applied: bool
) -> None:
    page = visit(page_of(served)).page
    page.get_by_label("Apply EXIF orientation").set_checked(applied)
    choose(page, photo(orientation=orientation))
    answered(page)
    expect(page.locator("#seen")).to_contain_text(f"EXIF orientation {'applied' if applied else 'ignored'}")
    page.mouse.move(0, 0)
    shown = np.array(Image.open(io.BytesIO(page.locator("#frame").screenshot())).convert("RGB")).astype(int)
    if applied:
        assert center_of(shown[:, :, 0] > 200) == pytest.approx((0.75, 0.3), abs=0.02)
    for channel, name in enumerate(("red", "green")):
        page.get_by_role("button", name=name).hover()
        expect(page.locator("#frame canvas")).to_be_visible()
        brightness_of_map = map_pixels(page).astype(int).sum(axis=2)  # rises with the score in this color map
        on_map = center_of(brightness_of_map > 0.9 * brightness_of_map.max())
        # A square's center and that of the best windows differ by less than a window, a fifth of the picture's height.
        assert on_map == pytest.approx(center_of(shown[:, :, channel] > 200), abs=0.1)
    boxes = [page.locator(f"#frame {tag}").bounding_box() for tag in ("img", "canvas")]
    assert boxes[0] == boxes[1]


@pytest.mark.parametrize(
    ("size", "protocol", "text"),
    [((400, 300), "center", "its central crop: 1 view"), ((1800, 300), "multi-scale", "more than 4 times the shorter")],
)
def test_a_map_is_white_where_no_view_shows_the_picture(
    served: RunningServer, visit: Visit, size: tuple[int, int], protocol: str, text: str
) -> None:
    page = visit(page_of(served)).page
    page.get_by_label("Protocol").select_option(protocol)
    choose(page, photo(size))
    answered(page)
    expect(page.locator("#seen")).to_contain_text(text)
    page.get_by_role("button", name="none").hover()
    pixels = map_pixels(page)
    middle = pixels.shape[0] // 2
    assert [pixels[middle, column].tolist() == UNSEEN for column in (2, pixels.shape[1] // 2, -3)] == [
        True,
        False,
        True,
    ]


def test_axe_finds_nothing_to_object_to(served: RunningServer, visit: Visit) -> None:
    page = visit(page_of(served)).page
    expect(page.locator("#options")).to_be_visible()
    assert violations(page) == []
    choose(page, photo())
    answered(page)
    page.locator("#classes button").first.click()
    assert violations(page) == []


def test_of_several_files_the_first_is_shown_and_each_gets_its_class(served: RunningServer, visit: Visit) -> None:
    visited = visit(page_of(served))
    visited.calls_may_fail, page = True, visited.page
    pictures = {"red.png": (255, 0, 0), "blue.png": (0, 0, 255), "green.png": (0, 255, 0)}
    files = [("notes.txt", b"no image"), *((name, filled(color)) for name, color in pictures.items())]
    page.set_input_files("#file", [{"name": name, "mimeType": "", "buffer": data} for name, data in files[::-1]])
    answered(page)
    items = page.locator("#files-list li")
    expect(items).to_have_count(4)
    for item, name in zip(items.all(), ("green", "blue", "red"), strict=False):
        expect(item).to_contain_text(f"{name}, ")
    expect(items.last).to_contain_text("The server cannot classify this file.")
    assert page.locator("#frame img").get_attribute("alt") == "green.png"
    items.nth(1).get_by_role("button").click()
    expect(page.locator("#frame img")).to_have_attribute("alt", "blue.png")
    assert answered(page)[0][0] == "blue"
    page.get_by_label("Model").select_option("six")  # all are classified again
    for item in items.all()[:3]:
        expect(item).not_to_contain_text(re.compile("green|blue|red"))
    assert violations(page) == []


def test_the_examples_of_a_server_are_offered_and_answered(tmp_path: Path, visit: Visit) -> None:
    (tmp_path / "1 red.png").write_bytes(filled((255, 0, 0)))
    (tmp_path / "2 <b>blue.png").write_bytes(filled((0, 0, 255)))
    (tmp_path / "notes.txt").write_text("no image")
    colors = seeing_colors(FakeSession(color_contract()))
    with running_server(http=HttpOptions(port=0, examples=tmp_path), colors=colors) as server:
        page = visit(page_of(server)).page
        buttons = page.locator("#examples-list button")
        expect(buttons).to_have_count(2)
        buttons.last.click()
        assert answered(page)[0][0] == "blue"
        expect(page.locator("#frame img")).to_have_attribute("alt", "2 <b>blue.png")
        assert violations(page) == []


def filled(color: tuple[int, int, int]) -> bytes:
    """Return a PNG file of one color."""
    buffer = io.BytesIO()
    Image.new("RGB", (150, 130), color).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["TIFF", "WEBP"])
def test_a_picture_that_the_browser_shows_otherwise_or_not_at_all_has_its_map_alone(
    served: RunningServer, visit: Visit, kind: str
) -> None:
    page = visit(page_of(served)).page
    buffer, picture = io.BytesIO(), Image.open(io.BytesIO(photo(orientation=3)))
    picture.save(buffer, kind, exif=picture.getexif())  # Chromium ignores it in WebP
    choose(page, buffer.getvalue(), f"photo.{kind}", f"image/{kind.lower()}")
    answered(page)
    expect(page.locator("#seen")).to_contain_text("The map is shown alone")
    expect(page.locator("#frame canvas")).to_be_visible()
    expect(page.locator("#frame img")).to_have_count(0)


def test_keys_show_and_keep_maps_and_the_answer_is_announced(served: RunningServer, visit: Visit) -> None:
    page = visit(page_of(served)).page
    choose(page, photo())
    answered(page)
    assert page.locator("#status[role=status]").text_content().startswith("none ")
    first, second = (page.locator("#classes button").nth(place) for place in (0, 1))
    canvas = page.locator("#frame canvas")
    page.locator("#camera, #file").first.focus()
    page.keyboard.press("Tab")
    expect(first).to_be_focused()
    expect(canvas).to_be_visible()
    expect(canvas).to_have_attribute("aria-label", re.compile(r"Heat map of none, (\d+ – )?\d+ %"))
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(second).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    name = second.locator(".name").inner_text()
    expect(canvas).to_have_attribute("aria-label", re.compile(f"Heat map of {name},"))
    for control in ("#model", "#protocol", "#exif", "#file"):
        assert page.locator(control).evaluate("(input) => input.labels.length") == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, SMALL_PHONE])
def test_the_page_fits_its_window_with_hostile_names(size: tuple[int, int], scheme: str, visit: Visit) -> None:
    session = seeing_colors(FakeSession(color_contract(tuple(HOSTILE))))
    with running_server(http=HttpOptions(port=0), hostile=session) as server:
        phone = size == SMALL_PHONE
        watched = visit(page_of(server), size=size, color_scheme=scheme, has_touch=phone, is_mobile=phone)
        page = watched.page
        assert watched.overflow() == 0
        choose(page, photo(), f"{HOSTILE[4]}.jpg")
        answered(page, 5)
        assert watched.overflow() == 0
        if phone:
            page.locator("#classes button").last.tap()
            expect(page.locator("#frame canvas")).to_be_visible()
            expect(page.locator("#frame canvas")).to_be_in_viewport(ratio=0.9)
        assert (brightness(page, "body") > 384) == (scheme == "light")
        assert page.evaluate("window.hacked") is None
        expect(page.get_by_text("Take a photo", exact=True)).to_have_count(int(phone))


@contextmanager
def guarded(
    folder: Path, scopes: list[str], rate: float | None = None, reports: Path | None = None
) -> Iterator[tuple[RunningServer, str]]:
    """Serve with a token; yields the server and the secret."""
    secret, lines = create_token("alice", scopes, rate=rate)
    (folder / "tokens.toml").write_text(lines)
    access = AccessControl(folder / "tokens.toml")
    http = HttpOptions(port=0, reports=reports)
    with running_server(http=http, access=access, colors=FakeSession(color_contract())) as server:
        yield server, secret


def expected_failures(watched: MonitoredPage) -> None:
    """Forget that the browser noted failed calls, now and later, and nothing else."""
    watched.calls_may_fail = True
    watched.wrong = [each for each in watched.wrong if "Failed to load resource" not in each]


def test_a_token_is_asked_for_once_and_kept_in_memory_only(tmp_path: Path, visit: Visit) -> None:
    with guarded(tmp_path, ["classify"]) as (server, secret):
        watched = visit(page_of(server))
        page, addresses = watched.page, list[str]()
        page.on("request", lambda request: addresses.append(request.url))
        expect(page.get_by_role("alert")).to_contain_text("requires a token")
        expect(page.locator(".alarm")).to_have_count(0)  # nothing is wrong yet
        page.get_by_label("Token", exact=True).fill(f"“{secret}”")  # no header may have these quotes
        page.get_by_role("button", name="Use this token").click()
        assert page.evaluate("document.getElementById('token').validity.patternMismatch")
        expect(page.get_by_role("alert")).to_contain_text("requires a token")
        for text in ("wrong", secret):
            page.get_by_label("Token", exact=True).fill(text)
            page.get_by_role("button", name="Use this token").click()
            if text == "wrong":
                expect(page.locator(".alarm")).to_contain_text("is unknown")
        expect(page.get_by_role("alert")).to_be_hidden()
        for seed in (1, 2):
            choose(page, png(50, 60, seed), "photo.png", "image/png")
            answered(page)
        expect(page.locator("#token-form")).to_be_hidden()
        stored = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
        assert stored == [0, 0, ""]
        assert not any(secret in each for each in (*addresses, page.url, page.inner_text("body")))
        page.reload()
        expect(page.get_by_role("alert")).to_contain_text("requires a token")
        expected_failures(watched)


@pytest.mark.parametrize(
    ("scopes", "rate", "texts"),
    [
        (["evaluate"], None, ["does not allow that", "scope 'classify'"]),
        (["classify"], 1, ["busy", "Try again in 1 s"]),
    ],
)
def test_a_refused_token_is_explained(
    tmp_path: Path, visit: Visit, scopes: list[str], rate: float | None, texts: list[str]
) -> None:
    with guarded(tmp_path, scopes, rate) as (server, secret):
        watched = visit(page_of(server))
        page = watched.page
        page.get_by_label("Token", exact=True).fill(secret)
        page.get_by_role("button", name="Use this token").click()
        if rate is None:
            expect(page.locator("#model option")).to_have_count(1)
            choose(page, photo())
        for text in texts:
            expect(page.get_by_role("alert")).to_contain_text(text)
        if rate is not None:
            page.wait_for_timeout(1000 / rate)
            page.get_by_role("button", name="Try again").click()
            expect(page.get_by_role("alert")).to_be_hidden()
            expect(page.locator("#protocol")).to_have_value("multi-scale")
        expected_failures(watched)


@pytest.mark.parametrize(
    ("content", "limit", "texts"),
    [
        (b"no picture at all", 2**25, ["cannot classify this file", "Not a readable image"]),
        (photo(), 1000, ["The image is too large for this server", "1000"]),
        (b"\0" * (2**26 + 2**20), 2**25, ["too large"]),
    ],
)
def test_a_file_that_is_refused_is_explained_and_the_next_one_answered(
    tmp_path: Path, visit: Visit, content: bytes, limit: int, texts: list[str]
) -> None:
    session = FakeSession(color_contract())
    with running_server(DecodeLimits(max_bytes=limit), http=HttpOptions(port=0), colors=session) as server:
        watched = visit(page_of(server))
        page = watched.page
        (tmp_path / "file.jpg").write_bytes(content)
        page.set_input_files("#file", tmp_path / "file.jpg")
        for text in texts:
            expect(page.get_by_role("alert")).to_contain_text(text)
        expect(page.locator("#classes button")).to_have_count(0)
        small = io.BytesIO()
        Image.new("RGB", (40, 30)).save(small, "PNG")
        choose(page, small.getvalue(), "small.png", "image/png")
        answered(page)
        expect(page.get_by_role("alert")).to_be_hidden()
        expected_failures(watched)


def use_token(page: Page, secret: str) -> None:
    page.get_by_label("Token", exact=True).fill(secret)
    page.get_by_role("button", name="Use this token").click()


@pytest.mark.parametrize("size", [LAPTOP, SMALL_PHONE])
@pytest.mark.parametrize("secured", [False, True])
def test_a_listed_report_opens_with_its_charts_and_downloads_and_can_reach_no_server(
    tmp_path: Path, few: Path, visit: Visit, secured: bool, size: tuple[int, int]
) -> None:
    runs = few.parents[2]
    with (
        guarded(tmp_path, ["evaluate"], reports=runs) as (locked, secret),
        running_server(http=HttpOptions(0, reports=runs), colors=FakeSession(color_contract())) as free,
    ):
        server, addresses = locked if secured else free, list[str]()
        watched = visit(page_of(server), size=size, color_scheme="light")
        page = watched.page
        page.context.on("request", lambda request: addresses.append(request.url))
        if secured:
            use_token(page, secret)
        item = page.locator("#reports li").last
        expect(item).to_contain_text("top-1 error 25.00 %")
        assert watched.overflow() == 0
        with page.expect_popup() as opening:
            item.get_by_role("link").click()
        report = MonitoredPage(opening.value, page_of(server))
        for scheme in ("light", "dark"):
            expect(report.page.locator("#error-chart svg")).to_be_visible()
            with report.page.expect_download() as saving:
                report.page.locator("#mistakes .save button").first.click()
            rows = Path(saving.value.path()).read_text().splitlines()
            assert [row.split(",")[0] for row in rows] == ['"file"', '"n01/00.png"', '"n02/04.png"', '"n03/08.png"']
            report.page.locator("#mistakes a, .worst a").first.click()
            expect(report.page.locator("#class-view")).to_be_visible()
            report.page.keyboard.press("Escape")
            expect(report.page.locator("#class-view")).to_be_hidden()
            assert report.overflow() == 0
            assert (brightness(report.page, "body") > 384) == (scheme == "light")
            assert report.wrong == []
            report.page.emulate_media(color_scheme="dark")
            report.page.reload()
        reached = report.page.evaluate(
            "Promise.all(['/v1/models', 'https://example.org'].map((url) => fetch(url).then(() => true, () => false)))"
        )
        assert reached == [False, False]
        assert report.page.evaluate("[self.origin, opener === null]") == ["null", not secured]
        own = (page_of(server), "blob:", "data:")
        assert not [each for each in addresses if secret in each or not each.startswith(own)]
        expected_failures(watched)


@pytest.mark.parametrize("secured", [False, True])
def test_the_listed_table_of_runs_sorts_and_without_a_token_leads_to_each_report(
    tmp_path: Path, few: Path, visit: Visit, secured: bool
) -> None:
    runs = few.parents[2]
    with (
        guarded(tmp_path, ["evaluate"], reports=runs) as (locked, secret),
        running_server(http=HttpOptions(0, reports=runs), colors=FakeSession(color_contract())) as free,
    ):
        server = locked if secured else free
        watched = visit(page_of(server))
        page = watched.page
        if secured:
            use_token(page, secret)
        with page.expect_popup() as opening:
            page.get_by_role("link", name="Table of runs").click()
        table = MonitoredPage(opening.value, page_of(server))
        expect(table.page.locator("table.runs tbody tr")).to_contain_text("25.00")
        table.page.get_by_role("button", name="Images/s").click()
        expect(table.page.locator("th[aria-sort]")).to_have_text("Images/s")
        links = table.page.locator("table.runs tbody a")
        if secured:
            expect(links).to_have_count(0)
        else:
            links.click()
            expect(table.page.locator("#error-chart svg")).to_be_visible()
        assert table.wrong == []
        expected_failures(watched)


def test_new_reports_appear_and_problems_with_them_are_explained(tmp_path: Path, few: Path, visit: Visit) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with guarded(tmp_path, ["classify"], reports=runs) as (server, secret):
        watched = visit(page_of(server))
        use_token(watched.page, secret)
        expect(watched.page.locator("#reports-note")).to_contain_text("scope 'evaluate'")
        expect(watched.page.get_by_role("alert")).to_be_hidden()
        watched.page.get_by_role("button", name="Use another token").click()
        use_token(watched.page, secret)
        expect(watched.page.locator("#token-form")).to_be_hidden()
        expect(watched.page.locator("#reports-note")).to_contain_text("scope 'evaluate'")
        expected_failures(watched)
    with guarded(tmp_path, ["evaluate"], reports=runs) as (server, secret):
        watched = visit(page_of(server))
        page = watched.page
        use_token(page, secret)
        expect(page.locator("#reports-note")).to_contain_text("no report yet")
        run = runs / HOSTILE[1].replace("/", "\\")
        run.mkdir()
        (run / "report.html").write_bytes(few.read_bytes())
        page.get_by_role("button", name="Look again").click()
        link = page.locator("#reports").get_by_role("link")
        with page.expect_popup() as opening:
            link.click()
        expect(opening.value.locator("h1")).to_contain_text("val")
        (run / "report.html").unlink()
        with page.expect_popup() as opening:
            link.click()
        expect(page.locator("#reports-note")).to_contain_text("GET /reports lists all")
        if not opening.value.is_closed():
            opening.value.wait_for_event("close")
        assert page.evaluate("window.hacked") is None
        expected_failures(watched)


@contextmanager
def nginx_with_prefix(folder: Path, server: RunningServer) -> Iterator[str]:
    """Run nginx with the committed file and the prefix that it shows; yield its address."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is missing; on Debian: apt-get install --no-install-recommends nginx-light")
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as unused:
        port, other = free.getsockname()[1], unused.getsockname()[1]
    text = (DEPLOY / "nginx" / "prelunet.conf").read_text(encoding="utf-8")
    text = re.sub(r"10\.0\.0\.1\d:8080", str(server.http), text).replace("listen 50050", f"listen 127.0.0.1:{other}")
    text = re.sub(r"# Under a prefix.*?: (location .*)", r"\1", text).replace("listen 8000", f"listen 127.0.0.1:{port}")
    (folder / "prelunet.conf").write_text(text, encoding="utf-8")
    (folder / "nginx.conf").write_text(NGINX_MAIN, encoding="utf-8")
    process = subprocess.Popen([program, "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        eventually(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        yield f"http://127.0.0.1:{port}/flowers/"
    finally:
        process.terminate()
        process.wait(20)


def test_the_page_works_behind_a_proxy_that_strips_a_prefix(tmp_path: Path, few: Path, visit: Visit) -> None:
    """`visit` fails for each request outside the prefix."""
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "report.html").write_bytes(few.read_bytes())
    with (
        guarded(tmp_path, ["classify", "evaluate"], reports=tmp_path / "runs") as (server, secret),
        nginx_with_prefix(tmp_path, server) as address,
    ):
        watched = visit(address)
        page = watched.page
        use_token(page, secret)
        choose(page, photo())
        assert answered(page)[0][0] == "red"
        expect(page.locator("#curl")).to_contain_text(f"{address}v1/classify?")
        with page.expect_popup() as opening:
            page.locator("#reports").get_by_role("link").click()
        expect(opening.value.locator("h1")).to_contain_text("val")
        assert opening.value.url.startswith(f"{address}report-viewer?")
        link = page.get_by_role("link", name="OpenAPI description").first
        assert page.request.get(str(link.evaluate("(a) => a.href"))).json()["openapi"]
        expected_failures(watched)


def test_a_server_that_is_gone_is_reported(visit: Visit) -> None:
    with running_server(http=HttpOptions(port=0), colors=FakeSession(color_contract())) as server:
        watched = visit(page_of(server))
        expect(watched.page.locator("#model option")).to_have_count(1)
    choose(watched.page, photo())
    expect(watched.page.get_by_role("alert")).to_contain_text("cannot be reached")
    expected_failures(watched)


def test_a_late_description_of_a_model_does_not_replace_that_of_the_chosen_one(
    served: RunningServer, visit: Visit
) -> None:
    page = visit(page_of(served)).page
    expect(page.locator("#served em")).to_have_text("colors")
    held: list[Any] = []
    page.route("**/v1/models/six", lambda route: held.append(route))  # noqa: PLW0108 - it sets an attribute
    with page.expect_request("**/v1/models/six"):
        page.select_option("#model", "six")
    page.select_option("#model", "colors")
    with page.expect_response("**/v1/models/six") as response:
        held[0].continue_()
    response.value.finished()
    page.evaluate("() => new Promise((resolve) => setTimeout(resolve, 100))")
    assert page.locator("#served em").text_content() == page.locator("#model").input_value() == "colors"


def test_a_second_picture_cancels_the_call_for_the_first(visit: Visit) -> None:
    session = GatedSession(color_contract())
    seeing_colors(session)
    with running_server(http=HttpOptions(port=0), colors=session) as server:
        page = visit(page_of(server)).page
        choose(page, png(50, 60))
        assert session.entered.wait(30)
        choose(page, photo(), "second.jpg")
        cancelled = {"method": "prelunet.v1.PreluNetService/Classify", "status": "CANCELLED"}
        eventually(lambda: server.metric("prelunet_calls_total", **cancelled) == 1)
        session.gate.set()
        with Client(server.address) as client:
            expected = client.classify(photo(), apply_exif=True)
        assert answered(page)[0] == ["none", f"{100 * expected.predictions[0].score:.1f} %"]
        expect(page.locator("#frame img")).to_have_attribute("alt", "second.jpg")


@pytest.mark.parametrize("secured", [False, True])
def test_the_copied_commands_print_the_answer(
    tmp_path: Path, visit: Visit, served: RunningServer, secured: bool
) -> None:
    name = """it's a "photo" $HOME.jpg"""
    (tmp_path / name).write_bytes(photo())
    with guarded(tmp_path, ["classify"]) as (guarded_server, secret):
        server = guarded_server if secured else served
        watched = visit(page_of(server), permissions=["clipboard-read", "clipboard-write"])
        page = watched.page
        if secured:
            page.get_by_label("Token", exact=True).fill(secret)
            page.get_by_role("button", name="Use this token").click()
        choose(page, photo(), name)
        names = [row[0] for row in answered(page)]
        copied = {}
        for kind in ("curl", "Python"):
            page.get_by_role("button", name=f"Copy as {kind}").click()
            expect(page.locator("#copied")).to_contain_text("Copied")
            copied[kind] = page.evaluate("navigator.clipboard.readText()")
        (tmp_path / "token").write_text(f"{secret}\n")
        environment = {**os.environ, "PRELUNET_TOKEN_FILE": str(tmp_path / "token")}

        def output(*command: str) -> str:
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
            return done.stdout

        printed = json.loads(output("bash", "-c", copied["curl"]))
        assert [found["name"] for found in printed["predictions"]] == names
        assert [line.split()[1] for line in output(sys.executable, "-c", copied["Python"]).splitlines()] == names
        expected_failures(watched)
