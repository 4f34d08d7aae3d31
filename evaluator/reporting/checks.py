"""Whether B is worse than A by more than a number of points, as builds read it: exit codes, Markdown, JUnit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from ..errors import CannotTell, CheckFailed
from ..files import write_atomically
from .compare import METRICS, Comparison, judgment
from .html import signed

_RESULTS = {"not worse": "holds", "worse": "does not hold", "cannot tell": "cannot tell"}


@dataclass(frozen=True)
class Check:
    """The verdict on one error of B. points: limit of what it may exceed A's by; text: the figures, as a clause."""

    metric: str
    points: float
    verdict: Literal["not worse", "worse", "cannot tell"]
    text: str

    @property
    def title(self) -> str:
        return f"top-{METRICS[self.metric]} error of B at most {self.points:g} points above A's"


def check_comparison(comparison: Comparison, points: float, metrics: Sequence[str]) -> list[Check]:
    """Check for each metric whether B's error exceeds A's by more than `points`.

    Worse: the difference of compare.json does, over the images that both evaluated, or over all that A evaluated, with
    those that B refused counted as wrong; otherwise B could pass by refusing images. Not worse: its 95 % interval ends
    below, or no image changed.
    """
    if not comparison["evaluated"]:
        return [Check(key, points, "cannot tell", "no image was evaluated in both runs") for key in metrics]
    found = []
    for key in metrics:
        metric, title = comparison[key], f"top-{METRICS[key]} error"
        errors = [comparison[side][f"{key}_error"] for side in ("b", "a")]
        text = f"{title} {errors[0]:.2f} % against {errors[1]:.2f} %, {signed(metric['difference'], minus='-')} points"
        changed = metric["only_a_wrong"] + metric["only_b_wrong"]
        # Moved by what refusals add, if they count as wrong.
        refusals = max(0.0, metric["difference_with_refusals"] - metric["difference"])
        high = metric["interval"][1] + refusals
        verdict: Literal["not worse", "worse", "cannot tell"] = "not worse"
        if metric["difference"] > points:
            verdict = "worse"
        elif metric["difference_with_refusals"] > points:
            verdict = "worse"
            text = (
                f"{title} {metric['difference_with_refusals']:+g} points, counting the images that only B refused "
                f"({comparison['refused_by_b_only']:,}) as wrong in B; {metric['difference']:+g} without them"
            )
        elif (changed or refusals) and high > points:
            verdict = "cannot tell"
            text += f", but up to {signed(high, minus='-')} with 95 % confidence"
        found.append(Check(key, points, verdict, text))
    return found


def raise_unless_passed(checks: Sequence[Check]) -> None:
    """Raise CheckFailed if B is worse in any check, else CannotTell if any is undecided."""
    for verdict, error, words in (
        ("worse", CheckFailed, "B is worse than A by more than {:g} points: {}"),
        ("cannot tell", CannotTell, "cannot tell if B is worse than A by more than {:g} points: {}. Use more images"),
    ):
        if of_kind := [check for check in checks if check.verdict == verdict]:
            raise error(words.format(of_kind[0].points, "; ".join(check.text for check in of_kind)))


def write_markdown(path: Path, text: str, summary: Path | None = None) -> None:
    """Write a summary, and append it to the file that the build system names for the summary of a build, if it does."""
    if summary is not None:
        with summary.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
    if summary is None or not (path.exists() and path.samefile(summary)):
        write_atomically(path, f"{text}\n".encode())


def comparison_rows(comparison: Comparison) -> list[list[str]]:
    """Return the rows of the table in Markdown, one for each metric."""
    rows = []
    for key, k in METRICS.items():
        errors = [f"{comparison[side][f'{key}_error']:.2f} %" for side in ("a", "b") if comparison["evaluated"]]
        rows.append(
            [f"top-{k}", *(errors or ["–", "–"]), *difference_cells(comparison[key]), judgment(comparison[key])]
        )
    return rows


def difference_cells(metric: Mapping[str, Any]) -> list[str]:
    """Return a difference and its interval as cells."""
    if metric["difference"] is None:
        return ["–", "–"]
    low, high = metric["interval"]
    return [signed(metric["difference"]), f"{signed(low)} to {signed(high)}"]


def markdown_of(titles: Mapping[str, str], rows: Sequence[Sequence[str]], checks: Sequence[Check]) -> str:
    """Return a comparison as Markdown. titles: of A and B; rows: see `comparison_rows`."""
    header = ("error", "A", "B", "B − A, points", "95 % interval", "result")
    a, b = (titles[side].replace("`", "'") for side in ("a", "b"))
    lines = [f"### B `{b}` compared with A `{a}`", "", *(_row(row) for row in (header, ["---"] * len(header), *rows))]
    results = (f"- {check.title}: **{_RESULTS[check.verdict]}** ({check.text})" for check in checks)
    return "\n".join([*lines, "", *results])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def write_junit(path: Path, titles: Mapping[str, str], checks: Sequence[Check]) -> None:
    """Write the checks as test cases in JUnit's XML: a failure where B is worse, skipped where nobody can tell."""
    failures, skipped = (sum(check.verdict == verdict for check in checks) for verdict in ("worse", "cannot tell"))
    counts = {"tests": len(checks), "failures": failures, "errors": 0, "skipped": skipped}
    suites = Element("testsuites")
    attributes = {"name": "prelunet compare", **{key: str(count) for key, count in counts.items()}}
    suite = SubElement(suites, "testsuite", attributes)
    for check in checks:
        name = f"{titles['b']} against {titles['a']}"
        case = SubElement(suite, "testcase", classname=name, name=check.title, time="0")
        if check.verdict != "not worse":
            SubElement(case, "failure" if check.verdict == "worse" else "skipped", message=check.text)
    indent(suites)
    write_atomically(path, tostring(suites, encoding="utf-8", xml_declaration=True) + b"\n")
