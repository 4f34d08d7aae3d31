"""Test the promises of the server: overload, deadlines, shapes, memory, drain, bad clients, faults, fuzz and others.

    python -m benchmarks.reliability.run [--only NAME ...] [--tiny] [--seed N] [--soak-seconds S]
                                         [--output FILE] [--page benchmarks/reliability/README.md]

Each case is a claim. Its verdict and numbers are written as soon as they are known. A case that the file already holds
for the same sources, versions, seed and settings is not run again. A table is written beside the file, and a summary
into --page. The server is a `prelunet serve` process of this checkout that serves the demo net with random weights.
Cases that need a fault or a delay inject it into the session (fault_injection.py). On two otherwise idle cores all
cases take about 45 minutes.

Exit codes: 0 every claim held, 1 a claim failed or could not be tested, 3 the time limit left some cases out.
"""

import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.common.results import RESULTS, circumstances, digest_of
from benchmarks.common.runner import Case, Runner, command_line
from benchmarks.reliability import (
    attacks,
    bad_clients,
    deadlines,
    draining,
    faults,
    memory,
    overload,
    rotation,
    shapes,
    soak,
)
from benchmarks.reliability.cases import ServerTestBed
from benchmarks.reliability.fuzz import fuzzing
from benchmarks.reliability.table import filled, not_held, summary, table

PACKAGES = (  # that can change a result
    "prelunet", "onnxruntime", "openvino", "numpy", "pillow", "grpcio", "protobuf",
    "uvicorn", "starlette", "h11", "msgspec",
)  # fmt: skip
MEASURED = (
    "evaluator", "benchmarks/reliability", "benchmarks/serving", "benchmarks/common/server_process.py",
    "tests/serving/api/raw_http2.py",
)  # fmt: skip
LIMIT = 3200  # seconds
SOAK = 60.0  # seconds
GROUPS: dict[str, Callable[[ServerTestBed], Iterable[Case]]] = {
    "overload": overload.cases,
    "deadlines": deadlines.cases,
    "shapes": shapes.cases,
    "faults": faults.cases,
    "drain": draining.cases,
    "rotation": rotation.cases,
    "clients": bad_clients.cases,
    "attacks": attacks.cases,
    "memory": memory.cases,
    "soak": soak.cases,
    "fuzz": fuzzing.cases,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that are not in the file yet."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, output=RESULTS / "reliability.json", limit=LIMIT)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=1, help="random seed of all cases")
    parser.add_argument("--soak-seconds", type=float, default=SOAK, help="duration of the soak case; hours are fine")
    parser.add_argument("--page", type=Path, help="Markdown page whose summary of the results is replaced")
    options = parser.parse_args(words)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:  # by nohup or the shell; the servers would ignore them too
            signal.signal(number, signal.SIG_DFL)
    limit = options.limit + max(0.0, options.soak_seconds - SOAK)
    facts = {"device": "cpu", "tiny": options.tiny, "source": digest_of(*MEASURED), "seed": options.seed}
    now = {**circumstances(__file__, options, PACKAGES, words), **facts}
    runner = Runner(options.output, "reliability", now, limit)
    with ServerTestBed(options.seed, tiny=options.tiny, soak_seconds=options.soak_seconds) as bed:
        for group in options.only:
            runner.run(replace(case, work=partial(_of_group, group, case)) for case in GROUPS[group](bed))
    if options.page is not None:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(filled(page, summary(runner.data, GROUPS)), encoding="utf-8")
    broken = not_held(runner.data)
    code = runner.finish(table(runner.data), (f"NOT held: {name}: {why}" for name, why in broken))
    return 1 if broken else code


def _of_group(group: str, case: Case) -> dict[str, object]:
    return {"group": group, **case.work()}


if __name__ == "__main__":
    sys.exit(main())
