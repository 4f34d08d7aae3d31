"""Open a competitor in its own process, to measure its memory and start time.

    python -m benchmarks.engine.isolated '{"name": ..., "folder": ..., ...}'

prints one line of JSON; `run_isolated` calls it for run.py. A competitor imports what it needs, so that one without
torch does not pay for it.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGUN = time.perf_counter()  # before the other imports, which count as start time

Json = dict[str, Any]


def run_isolated(task: Mapping[str, Any]) -> Json:
    """Return the result of `competitor` in its own process; raises RuntimeError with the end of its stderr."""
    from benchmarks.common.results import environment

    command = [sys.executable, "-m", "benchmarks.engine.isolated", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode:
        raise RuntimeError(f"failed in its own process: {done.stderr.strip()[-500:]}")
    found: Json = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run the competitor of the argument and print its result."""
    print(json.dumps(competitor(json.loads(sys.argv[1]))))


def competitor(task: Mapping[str, Any]) -> Json:
    """Open a competitor and run it on one image at one scale, plain and mirrored.

    task: name, folder and threads of its `BenchmarkNet`, height, width, scale.
    """
    from benchmarks.engine.competitors import COMPETITORS, BenchmarkNet, NotAvailable
    from prelunet.evaluator.contract import golden_image
    from prelunet.evaluator.protocols import EvaluationProtocol

    protocol = EvaluationProtocol("largest view", "dense", (task["scale"],), mirror=True)
    try:
        opened = COMPETITORS[task["name"]].open(BenchmarkNet(Path(task["folder"]), task["threads"]))
        ready = time.perf_counter() - BEGUN
        opened.answer(golden_image(task["height"], task["width"]), protocol)
    except NotAvailable as error:
        return {"not_available": str(error)}
    return {"load_seconds": round(ready, 2), "peak_memory_mb": _peak_mb()}


def _peak_mb() -> int:
    from benchmarks.common.results import resident_mb

    return round(resident_mb(peak=True))


if __name__ == "__main__":
    main()
