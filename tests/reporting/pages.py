"""Runs, names and images for pages, and a parser of the pages."""

import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from prelunet.evaluator.datasets import open_dataset
from tests.helpers.run_folders import CLASSES, evaluated

WNIDS = [entry["wnid"] for entry in CLASSES]
HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=https:example.org/x onerror=alert(1)>',
    "{{ 7 * 7 }}{% raw %}",
    "<!-- & ' ` עברית 鯛",
]


def many_classes(count: int) -> list[dict[str, str]]:
    return [{"wnid": f"n{index:04}", "name": f"class {index}"} for index in range(count)]


def mistake(file: str, label: int, answer: int, first: float = 0.6, classes: int = 7) -> dict[str, Any]:
    """Return an image that is answered with another class than its own, which is second."""
    return evaluated(file, label, [answer, label], 2, first=first, classes=classes)


def make_images(folder: Path, sizes: Mapping[str, tuple[int, int]]) -> Path:
    """Write one PNG per name, of (width, height); its pixels differ from any other's."""
    for number, (name, (width, height)) in enumerate(sizes.items()):
        path = folder / "val" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


def fingerprint_of(folder: Path) -> str:
    return open_dataset(folder, split="val", wnids=WNIDS).fingerprint


class Elements(HTMLParser):
    """Collects elements with attributes, text, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in {"script", "style"} else ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_self_contained(page: Elements, links: str) -> None:
    """Check that a page allows and contains no address outside itself. links: the allowed ones, besides `data:`."""
    (policy,) = [m["content"] or "" for m in page.named("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "eval" not in policy
    assert not {"iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.elements}
    for tag, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "poster", "background"):
            address = attributes.get(name)
            if address is not None:
                assert re.match(rf"data:|{links}", address), (tag, name, address[:80])
