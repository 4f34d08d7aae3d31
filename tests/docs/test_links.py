"""Links between pages, and to files of the project, lead somewhere."""

import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.doc_pages import ROOT, name_of

LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
PAGES = [ROOT / name for name in LISTED.split() if not name.startswith("benchmarks/results/")]
assert ROOT / "README.md" in PAGES


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'\bsrc(?:set)?="([^"]+)"', prose)
    for link in links:
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


def test_the_functions_on_the_path_of_an_image_exist() -> None:
    names = re.findall(r"`(prelunet\.[\w.]+)`", (ROOT / "evaluator" / "README.md").read_text(encoding="utf-8"))
    assert len(names) >= 8
    for name in names:
        assert callable(pkgutil.resolve_name(name)), name
