"""The tables of tests/serving/bad-calls.md, whose rows are tests."""

from pathlib import Path

PAGE = (Path(__file__).parents[1] / "serving" / "bad-calls.md").read_text()


def documented(heading: str) -> dict[str, list[str]]:
    """Return the rows of a table of the page: first cell → other cells."""
    (section,) = [part for part in PAGE.split("\n## ") if part.startswith(heading + "\n")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {first: rest for first, *rest in rows[2:]}
