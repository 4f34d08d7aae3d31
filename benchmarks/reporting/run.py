"""Measure report, compare and ensemble on runs of ImageNet's shape (50,000 x 1000): time, memory, page size.

    python -m benchmarks.reporting.run --output benchmarks/results/reporting-imagenet-shape.json

Generates three runs (imagenet_shape.py), then runs each verb `--repeats` times in turn in its own process, and writes
medians and peaks. The project's limits: 20 s, 1 GB, pages of 8 MB.
"""

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.results import circumstances, cpu, environment, markdown, write_result
from benchmarks.common.runner import command_line
from benchmarks.common.server_process import PRELUNET
from benchmarks.reporting.imagenet_shape import write

PACKAGES = ("prelunet", "numpy", "scipy", "jinja2", "vl-convert-python")
RUNS = 3
LIMITS = {"median": 20, "peak_memory_mb": 1000, "page_mb": 8}


def main() -> None:
    """Measure and write the result; exit 1 if a limit is exceeded."""
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each verb")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        runs = [folder / str(number) for number in range(1, RUNS + 1)]
        for number, run in enumerate(runs, start=1):
            write(run, 0, number)
        compared, ensemble = folder / "compared", folder / "ensemble"
        verbs: dict[str, tuple[list[str | Path], Path | None]] = {
            "report": (["report", runs[0]], runs[0] / "report" / "report.html"),
            "compare": (["compare", *runs[:2], "--out", compared], compared / "compare.html"),
            "ensemble of three": (["ensemble", *runs, "--run", ensemble, "--fresh"], None),
            "report of the ensemble": (["report", ensemble], ensemble / "report" / "report.html"),
        }
        measured: dict[str, list[tuple[float, int]]] = {name: [] for name in verbs}
        for _ in range(options.repeats):
            for name, (arguments, _page) in verbs.items():
                measured[name].append(_measure(arguments))
        rows = [_row(name, measured[name], page) for name, (_arguments, page) in verbs.items()]
    print(f"runs of 50,000 x 1000, {cpu()}\n")
    columns = ("verb", "median", "peak_memory_mb", "page_mb")
    print(markdown(("verb", "median s", "peak MB", "page MB"), ([row[key] for key in columns] for row in rows)))
    result = {**circumstances(__file__, options, PACKAGES), "limits": LIMITS, "results": rows}
    write_result(options.output, result)
    exceeded = [row["verb"] for row in rows if any((row[key] or 0) > limit for key, limit in LIMITS.items())]
    if exceeded:
        raise SystemExit(f"limits exceeded: {', '.join(exceeded)}")


def _measure(arguments: list[str | Path]) -> tuple[float, int]:
    """Run a verb; return its seconds and peak memory in MB."""
    start = time.perf_counter()
    with subprocess.Popen(
        [*PRELUNET, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"prelunet {' '.join(map(str, arguments))}: exit code {process.returncode}")
    return time.perf_counter() - start, usage.ru_maxrss // 1024


def _row(name: str, measured: list[tuple[float, int]], page: Path | None) -> dict[str, Any]:
    return {
        "verb": name,
        "seconds": [round(seconds, 2) for seconds, _ in measured],
        "median": round(statistics.median(seconds for seconds, _ in measured), 2),
        "peak_memory_mb": max(memory for _, memory in measured),
        "page_mb": round(page.stat().st_size / 1e6, 2) if page else None,
    }


if __name__ == "__main__":
    main()
