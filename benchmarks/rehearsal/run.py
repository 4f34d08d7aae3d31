"""Rehearse an evaluation at ImageNet's size: 50,000 images as class folders, tar shards and parquet.

    python -m benchmarks.rehearsal.run [--images N] [--output FILE] [--work DIR] [--page benchmarks/README.md]

An adopted small net evaluates each layout in one process, then as two shards in two processes at the same time, each
killed and resumed three times, merged and reported. Then parts of the layouts take turns, for their speeds. A case that
the file already holds for the same sources is not run again; files that others need are written again, with the same
contents. On two idle cores all of it takes about 30 minutes, and 20 GB in --work, which are deleted at the end.

Exit codes: 0 every claim held, 1 a claim failed or could not be tested.
"""

import math
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.results import RESULTS, circumstances, described_run, digest_of, latest, markdown
from benchmarks.common.runner import Case, Runner, command_line
from benchmarks.rehearsal.cases import LAYOUTS, PAGE_MB, PARTS, SEED, SPEED, Rehearsal
from benchmarks.rehearsal.images import COPIES, PICTURES
from benchmarks.rehearsal.processes import ALLOWANCE, GROWTH
from benchmarks.reliability.table import filled, not_held, table

PACKAGES = ("prelunet", "onnxruntime", "numpy", "pillow", "pyarrow", "torch")  # that can change a result
MEASURED = (
    *("evaluator", "export", "training/importing", "benchmarks/rehearsal"),
    *("benchmarks/common/imagenet_sizes.py", "benchmarks/common/nets.py"),
)
IMAGES, MIN_IMAGES = PICTURES * COPIES, 1000  # the least still has a chunk in each part
DISK = 420_000  # bytes for each image: three copies of the dataset, and the runs
FLAT = f"memory stays within {GROWTH:.2f} times that of the first quarter and {ALLOWANCE:g} MB while images are written"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that are not in the file yet."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, output=RESULTS / "rehearsal.json")
    parser.add_argument("--images", type=int, default=IMAGES, help="size of the dataset, for a trial: 1000 to 50000")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folder for temporary files")
    parser.add_argument("--page", type=Path, help="Markdown page whose summary of the results is replaced")
    options = parser.parse_args(words)
    if not MIN_IMAGES <= options.images <= IMAGES:
        parser.error(f"--images {options.images}: give {MIN_IMAGES} to {IMAGES}")
    if (free := shutil.disk_usage(options.work).free) < (need := options.images * DISK):
        sys.exit(
            f"--work {options.work}: needs {need / 1e9:.1f} GB, has {free / 1e9:.1f}. Free some, or choose another"
        )
    facts = {"tiny": options.images < IMAGES, "source": digest_of(*MEASURED), "seed": SEED}
    runner = Runner(
        options.output, "rehearsal", {**circumstances(__file__, options, PACKAGES, words), **facts}, math.inf
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the files are deleted
    with tempfile.TemporaryDirectory(prefix="prelunet-rehearsal-", dir=options.work) as folder:
        _run(runner, Rehearsal(Path(folder), options.images))
    if options.page is not None:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(filled(page, summary(runner.data)), encoding="utf-8")
    broken = not_held(runner.data)
    runner.finish(table(runner.data, "Rehearsal"), (f"NOT held: {name}: {why}" for name, why in broken))
    return 1 if broken else 0


def _run(runner: Runner, rehearsal: Rehearsal) -> None:
    def measure(name: str, sentence: str, work: Any) -> Mapping[str, Any]:
        case = Case({"case": name, "images": rehearsal.images}, lambda: {"claim": sentence, **work()})
        return runner.measure(case) or {}

    measure("dataset", "the images have ImageNet's mean size", rehearsal.dataset)
    whole = {}
    for layout in LAYOUTS:
        sentence = f"one process evaluates {layout}; {FLAT}; report.html has at most {PAGE_MB} MB"
        result = measure(f"undisturbed, {layout}", sentence, partial(rehearsal.undisturbed, layout))
        if "error" not in result:
            whole[layout] = result
            sentence = f"two shards of {layout}, each killed and resumed three times, merge into the same bytes; {FLAT}"
            measure(f"killed, {layout}", sentence, partial(rehearsal.killed, layout, result))
    measure("layouts", "each image has the same answer in every layout", partial(rehearsal.compared, whole))
    sentence = f"validate from shards and from parquet has at least {SPEED} of the speed from folders"
    measure("speeds", f"{sentence} (median over turns of 1/{PARTS} of the images)", rehearsal.speeds)


def summary(data: Mapping[str, Any]) -> str:
    """Return the newest results as a Markdown table with a row for each layout."""
    results = {case["settings"]["case"]: case["result"] for case in latest(data)}
    rows = []
    for layout in LAYOUTS:
        whole, killed = (results.get(f"{kind}, {layout}", {}) for kind in ("undisturbed", "killed"))
        ratio = results.get("speeds", {}).get(f"{layout}_of_folders", {})
        keys = ("images_per_second", "opening_seconds", "max_mb", "report_seconds", "page_mb")
        rows.append((layout, *map(whole.get, keys), *map(ratio.get, ("median", "min", "max")), killed.get("held")))
    header = ("layout", "images/s", "opened in, s", "memory, MB", "report, s", "page, MB", "speed of folders'", "min",
              "max", "killed, resumed, merged: claims held")  # fmt: skip
    seconds = sum(case["seconds"] for case in latest(data))
    return f"{described_run(data['runs'][-1])} {seconds / 60:.0f} minutes.\n\n{markdown(header, rows)}"


if __name__ == "__main__":
    sys.exit(main())
