"""The result file as a table: each claim, whether it held, and the measurements."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.common.results import cell, described_run, latest, markdown

_NOT_NUMBERS = (
    "group", "claim", "held", "broken", "error", "wrong", "failures", "crashes", "log", "left", "ms", "slow", "state",
    "digests",
)  # fmt: skip
_MAX_VALUES = 12  # shown values of a list
BEGIN, END = "<!-- summary: begin -->", "<!-- summary: end -->"  # around the text that `filled` replaces
# Numbers of each group in the summary: label, key in a case's result (nested keys with a dot), aggregation over cases.
_HEADLINE_NUMBERS: Mapping[str, tuple[tuple[str, str, Callable[[list[Any]], Any]], ...]] = {
    "overload": (
        ("refusals", "refused", sum),
        ("slowest refusal, ms", "refusals.max_ms", max),
        ("calls of second clients admitted", "second_client_answered", sum),
    ),
    "deadlines": (("views computed too late", "late_views", sum), ("views dropped", "dropped_views", sum)),
    "shapes": (
        ("smallest mean batch, views", "mean_batch", min),
        ("worst first call, times a later one", "worst_ratio", max),
    ),
    "faults": (
        ("neighbors", "neighbours", sum),
        ("neighbors that failed", "neighbours_failed", sum),
        ("decoders killed", "kills", sum),
    ),
    "drain": (
        ("calls lost", "lost_calls", sum),
        ("calls in lame-duck windows", "calls_in_windows", sum),
        ("refused before the port closed", "refused_after_windows", sum),
        ("SIGKILLs", "kills", sum),
        ("rolling restarts", "restarts", sum),
        ("latest answers after restarts, s", "late_seconds", lambda lists: max(map(max, lists))),
    ),
    "rotation": (
        ("rotations", "rotations", sum),
        ("calls over gRPC", "calls.grpc", sum),
        ("calls over HTTP", "calls.http", sum),
    ),
    "clients": (("good calls meanwhile", "good_calls", sum), ("their largest p99, ms", "meanwhile.p99_ms", max)),
    "memory": (("growth from the middle to the end, MB, each case, the leaking control last", "growth_mb", list),),
    "soak": (("calls", "calls", sum), ("growth, MB", "growth_mb", max)),
    "attacks": (
        ("largest p99 of polite calls with JPEG, ms", "meanwhile.p99_ms", max),
        ("without the attack", "alone.p99_ms", max),
        ("most memory of all processes, MB", "most_mb", max),
    ),
    "fuzz": (("cases", "cases", sum), ("slowest, s", "slowest_seconds", max)),
}


def table(data: Mapping[str, Any], title: str = "Reliability") -> str:
    """Return the cases of a result file as Markdown tables, one for each run with its circumstances."""
    parts = [f"# {title}", ""]
    for number, run in enumerate(data["runs"]):
        cases = [case for case in latest(data) if case["run"] == number]
        if not cases:
            continue
        parts += [described_run(run), "", markdown(("claim", "held", "measured", "seconds"), map(_row, cases)), ""]
    return "\n".join(parts)


def summary(data: Mapping[str, Any], groups: Iterable[str]) -> str:
    """Return a Markdown table with a row for each group of cases: how many held, and the headline numbers."""
    rows = []
    for group in groups:
        cases = [case for case in latest(data) if case["result"].get("group") == group]
        held = sum(bool(case["result"].get("held")) for case in cases)
        seconds = round(sum(case["seconds"] for case in cases))
        rows.append((f"`{group}`", f"{held} of {len(cases)}" if cases else "not tried", _facts(group, cases), seconds))
    runs = [data["runs"][number] for number in sorted({case["run"] for case in latest(data)})]
    table = markdown(("group", "cases that held", "of them", "seconds"), rows)
    return "\n\n".join([*map(described_run, runs), table])


def _facts(group: str, cases: Iterable[Mapping[str, Any]]) -> str:
    facts = []
    for words, path, fold in _HEADLINE_NUMBERS[group]:
        values: list[Any] = [case["result"] for case in cases]
        for name in path.split("."):
            values = [value[name] for value in values if name in value]
        if values:
            one = fold(values)
            facts.append(f"{words} {', '.join(map(cell, one)) if isinstance(one, list) else cell(one)}")
    return "; ".join(facts)


def filled(page: str, text: str) -> str:
    """Return a page with the text between its two marks replaced."""
    before, opened, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (opened and closed):
        raise SystemExit(f"--page has no place for the summary. Add these two lines: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text.strip()}\n{END}{after}"


def _row(case: Mapping[str, Any]) -> tuple[Any, ...]:
    result = case["result"]
    if "claim" not in result:  # it could not be tested
        text = "; ".join(f"{name}: {value}" for name, value in result.items())
        return f"**{case['settings']['case']}**", "not tried", _plain(text), case["seconds"]
    held: Any = result["held"] or f"NO: {', '.join(result.get('broken', ['the control was not caught']))}"
    return f"**{case['settings']['case']}**: {_plain(result['claim'])}", held, _plain(_numbers(result)), case["seconds"]


def _numbers(result: Mapping[str, Any]) -> str:
    """Return the numbers in words; empty values, and texts for debugging, are only in the file."""
    numbers = []
    for name, value in result.items():
        if name in _NOT_NUMBERS or value in ({}, [], None):
            continue
        if isinstance(value, Mapping):
            text = ", ".join(f"{_words(key)} {cell(one)}" for key, one in value.items())
        elif isinstance(value, list):
            shown = value if len(value) <= _MAX_VALUES else value[:: -(-len(value) // _MAX_VALUES)]
            text = ", ".join(map(cell, shown))
        else:
            text = cell(value)
        numbers.append(f"{_words(name)} {text}")
    return "; ".join(numbers)


def _words(name: str) -> str:
    return name.removesuffix("_ms").replace("_", " ") + " ms" * name.endswith("_ms")


def _plain(text: str) -> str:
    """Escape a text for a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def not_held(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the cases that did not hold or could not be tested, and why."""
    found = []
    for case in latest(data):
        result = case["result"]
        if not result.get("held"):
            why = result.get("error") or ", ".join(result.get("broken", ["not the expected result"]))
            found.append((case["settings"]["case"], why))
    return found
