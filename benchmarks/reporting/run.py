"""Measure report, compare and ensemble on runs of ImageNet's shape (50,000 x 1000): time, memory, page size.

    python -m benchmarks.reporting.run --output benchmarks/results/reporting-imagenet-shape.json

Generates three runs (imagenet_shape.py), then runs each verb `--repeats` times in turn in its own process, and writes
medians and peaks. The project's limits: 20 s, 1 GB, pages of 8 MB.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common.results import cpu, environment, machine
from benchmarks.reporting.imagenet_shape import write

PACKAGES = ("prelunet", "numpy", "scipy", "jinja2", "vl-convert-python")
RUNS = 3
LIMITS = {"seconds": 20, "memory_mb": 1000, "page_mb": 8}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each verb")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        runs = [folder / str(number) for number in range(1, RUNS + 1)]
        for number, run in enumerate(runs, start=1):
            write(run, 0, number)
        verbs: dict[str, tuple[list[str], Path | None]] = {
            "report": (["report", str(runs[0])], runs[0] / "report" / "report.html"),
            "compare": (
                ["compare", str(runs[0]), str(runs[1]), "--out", str(folder / "compared")],
                folder / "compared" / "compare.html",
            ),
            "ensemble of three": (
                ["ensemble", *map(str, runs), "--run", str(folder / "ensemble"), "--fresh"],
                None,
            ),
            "report of the ensemble": (
                ["report", str(folder / "ensemble")],
                folder / "ensemble" / "report" / "report.html",
            ),
        }
        measured: dict[str, list[tuple[float, int]]] = {name: [] for name in verbs}
        for _ in range(options.repeats):
            for name, (arguments, _page) in verbs.items():
                measured[name].append(_measure(arguments))
        rows = [_row(name, measured[name], page) for name, (_arguments, page) in verbs.items()]
    _report(rows, options.output)


def _measure(arguments: list[str]) -> tuple[float, int]:
    """Run a verb; return its seconds and peak memory in MB."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", "from prelunet.evaluator.cli import main; main()", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"prelunet {' '.join(arguments)}: exit code {process.returncode}")
    return time.perf_counter() - start, usage.ru_maxrss // 1024


def _row(name: str, measured: list[tuple[float, int]], page: Path | None) -> dict[str, Any]:
    return {
        "verb": name,
        "seconds": [round(seconds, 2) for seconds, _ in measured],
        "median": round(statistics.median(seconds for seconds, _ in measured), 2),
        "peak_memory_mb": max(memory for _, memory in measured),
        "page_mb": round(page.stat().st_size / 1e6, 2) if page else None,
    }


def _report(rows: list[dict[str, Any]], output: Path | None) -> None:
    """Print the table and write the JSON file; exit 1 if a limit is exceeded."""
    print(f"runs of 50,000 x 1000, {cpu()}")
    print(f"{'':24}{'median s':>10}{'peak MB':>10}{'page MB':>10}")
    for row in rows:
        print(f"{row['verb']:24}{row['median']:10.2f}{row['peak_memory_mb']:10}{row['page_mb'] or '':>10}")
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python -m benchmarks.reporting.run " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "limits": LIMITS,
        "results": rows,
    }
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written: {output}")
    exceeded = [
        row["verb"]
        for row in rows
        if row["median"] > LIMITS["seconds"]
        or row["peak_memory_mb"] > LIMITS["memory_mb"]
        or (row["page_mb"] or 0) > LIMITS["page_mb"]
    ]
    if exceeded:
        raise SystemExit(f"limits exceeded: {', '.join(exceeded)}")


if __name__ == "__main__":
    main()
