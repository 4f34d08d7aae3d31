"""The pages of README and docs/, as the tests of the documentation read them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "_generated")
PAGES = [README, *DOCS]

_FENCE = re.compile(
    r"(?:^<!-- (?P<key>file|not run): (?P<value>[^>]+?) -->\n)?^```(?P<language>[^\n`]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block. file: where the reader is to save it; not_run: why no test runs it."""

    line: int
    language: str
    text: str
    file: str | None
    not_run: str | None


def name_of(page: Path) -> str:
    """Return the path of a page from the root of the project."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["text"],
            found["value"] if found["key"] == "file" else None,
            found["value"] if found["key"] == "not run" else None,
        )
        for found in _FENCE.finditer(text)
    ]


def sentences(page: Path) -> list[str]:
    """Return the sentences of a page's prose: no code blocks, tables, headings, pictures or links' targets."""
    text = re.sub(r"^<!--.*?-->$", "", _FENCE.sub("\n\n", page.read_text()), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(\||#|:::|\$\$).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)  # every item is a paragraph
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        found += re.split(r"(?<=[.!?:])[\"”)*]*\s+(?=[A-Z`*“\"(0-9])", " ".join(paragraph.split()))
    return [sentence for sentence in found if len(sentence.split()) > 1]
