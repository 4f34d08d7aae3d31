"""Test the front door: what HTTP and TLS cost, and that the rotation of certificates and tokens disturbs no call.

    python -m benchmarks.front_door.run [--part speed rotation] [--tiny] [--output benchmarks/results/front-door.json]

Each case is written as soon as it is measured (runner.py), with the tables beside it. On two otherwise idle cores both
parts take about 7 minutes. Bad credentials and bad calls are rows of tests/serving/bad-calls.md. These are tests:
they either pass or fail, and numbers would add nothing.

- speed:    calls/s of `POST /v1/classify` and of Classify, each with and without TLS; 1, 4 and 16 clients, which
            call again after each answer, of the demo net, and 16 of one that computes nothing
- rotation: 16 clients over both ports while certificate, key and tokens are replaced

Exit codes: 0 all cases measured and the rotation disturbed no call, 1 a case failed, 3 the time limit left some out.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.results import RESULTS, circumstances, digest_of
from benchmarks.common.rig import Rig
from benchmarks.common.runner import Runner, command_line
from benchmarks.front_door import rotation, speed
from benchmarks.front_door.table import goals_of, tables
from benchmarks.reliability.cases import ServerTestBed
from benchmarks.serving.bench import ServingBench
from benchmarks.serving.run import MEASURED, write_pictures
from benchmarks.serving.run import PACKAGES as SERVING_PACKAGES
from prelunet.evaluator.machine import cores

PACKAGES = (*SERVING_PACKAGES, "uvicorn", "starlette", "h11", "msgspec")  # that can change a number
PARTS = ("speed", "rotation")
LIMIT = 480  # seconds
SEED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not in the file yet."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, output=RESULTS / "front-door.json", limit=LIMIT)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    options = parser.parse_args(words)
    now = {
        **circumstances(__file__, options, PACKAGES, words),
        "device": "cpu",
        "tiny": options.tiny,
        "threads": cores(),
        "source": digest_of(*MEASURED, "benchmarks/front_door"),
        "servers": {},
        "not_measured": {},
    }
    runner = Runner(options.output, "front door", now, options.limit)
    if "rotation" in options.part:
        with ServerTestBed(SEED, tiny=options.tiny) as bed:
            runner.run(rotation.cases(bed))
    if "speed" in options.part:
        with tempfile.TemporaryDirectory(prefix="prelunet-front-door-") as folder:
            pictures = write_pictures(Path(folder) / "pictures", None, tiny=options.tiny)
            rig = Rig("cpu", options.tiny, Path(folder) / "files")
            with ServingBench(rig, Path(folder), pictures, cores(), {}, now) as bench:
                runner.run(speed.cases(bench))
    code = runner.finish(tables(runner.data), goals_of(runner.data))
    return code or int(any(case["result"].get("held") is False for case in runner.data["cases"]))


if __name__ == "__main__":
    sys.exit(main())
