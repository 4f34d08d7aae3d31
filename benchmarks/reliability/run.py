"""Test the server's promises: overload, deadlines, mixed shapes, memory, drain, bad clients, faults, fuzz, soak.

    python -m benchmarks.reliability.run [--only NAME ...] [--tiny] [--seed N] [--soak-seconds S]
                                         [--output FILE] [--page docs/reliability.md]

Each case is a claim. Its verdict and numbers are written as soon as they are known. A case that the file already holds
for the same sources, versions, seed and settings is not run again. A table is written beside the file, and a summary
into --page. The server is a `prelunet serve` process of this checkout that serves the demo net with random weights.
Cases that need a fault or a delay inject it into the session (fault_injection.py). On two otherwise idle cores all
cases take 15 to 20 minutes.

Exit codes: 0 every claim held, 1 a claim failed or could not be tested, 3 the time limit left some cases out.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.common.results import ROOT, Results, digest_of, header
from benchmarks.reliability import bad_clients, deadlines, draining, faults, memory, overload, shapes, soak
from benchmarks.reliability.cases import Case, ServerTestBed
from benchmarks.reliability.fuzz import fuzzing
from benchmarks.reliability.table import filled, not_held, summary, table

PACKAGES = ("prelunet", "onnxruntime", "openvino", "numpy", "pillow", "grpcio", "protobuf")  # that can change a result
MEASURED = (
    "evaluator", "benchmarks/reliability", "benchmarks/common/server_process.py", "tests/serving/api/raw_http2.py",
)  # fmt: skip
OUTPUT = ROOT / "benchmarks" / "results" / "reliability.json"
LIMIT = 1600  # seconds
SOAK = 60.0  # seconds
GROUPS: dict[str, Callable[[ServerTestBed], Iterable[Case]]] = {
    "overload": overload.cases,
    "deadlines": deadlines.cases,
    "shapes": shapes.cases,
    "faults": faults.cases,
    "drain": draining.cases,
    "clients": bad_clients.cases,
    "memory": memory.cases,
    "soak": soak.cases,
    "fuzz": fuzzing.cases,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that are not in the file yet."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(words)
    now = {
        **header(__file__, _without_paths(words), PACKAGES),
        "device": "cpu",
        "tiny": options.tiny,
        "source": digest_of(*MEASURED),
    }
    results = Results(options.output, "reliability", now, options.limit)
    with ServerTestBed(options.seed, tiny=options.tiny, soak_seconds=options.soak_seconds) as bed:
        for group in options.only:
            for case in GROUPS[group](bed):
                settings = {"case": case.name, **case.settings}
                results.measure(settings, lambda group=group, case=case: _run_case(group, case), case.seconds)
    text = table(results.data)
    options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    if options.page is not None:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(filled(page, summary(results.data, GROUPS)), encoding="utf-8")
    print(text)
    broken = not_held(results.data)
    code = results.finish(f"NOT held: {name}: {why}" for name, why in broken)
    return 1 if broken else code


def _options(words: Sequence[str]) -> argparse.Namespace:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind, allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), metavar="NAME")
    parser.add_argument("--tiny", action="store_true", help="rehearsal with few repeats")
    parser.add_argument("--seed", type=int, default=1, help="random seed of all cases")
    parser.add_argument("--soak-seconds", type=float, default=SOAK, help="duration of the soak case; hours are fine")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which no new case starts")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON file to write; a table is written beside it")
    parser.add_argument("--page", type=Path, help="Markdown page whose summary of the results is replaced")
    options = parser.parse_args(words)
    options.limit = max(options.limit, options.limit + options.soak_seconds - SOAK)
    return options


def _without_paths(words: Sequence[str]) -> list[str]:
    """Return the command line without output paths, which do not change any number."""
    paths = ("--output", "--page")
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if before not in paths and word.partition("=")[0] not in paths
    ]


def _run_case(group: str, case: Case) -> dict[str, object]:
    return {"group": group, "claim": case.claim, **case.work()}


if __name__ == "__main__":
    sys.exit(main())
