"""The server beside its own engine, and beside Triton and MLServer on the same model file.

    python -m benchmarks.serving.run --triton-python triton/bin/python --mlserver-python mlserver/bin/python \\
        [--output benchmarks/results/serving.json]      measures what is not in the file yet

How to make the two environments: peers.py. A peer that is not given, or does not start, is told as not
measured. Servers, engine and clients are processes of their own on this machine; whoever is compared takes turns in
rounds, in an order that is shuffled for each. Every answer is compared with the engine's before anything is timed. Each
case is written as soon as it is measured (results.py), the tables go beside it. Alone on two cores all parts take about
13 minutes.

- throughput: images/s of `prelunet serve` with 16 clients beside the engine in process, model A and the demo's
- peers:      images/s, median and 99th percentile of the latency of three servers; 1, 4 and 16 clients that ask again
              when they are answered, and calls at random moments
- overhead:   one call after the other to a model that computes nothing
"""

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from benchmarks.common.photos import load_photos
from benchmarks.common.results import ROOT, Results, header
from benchmarks.common.rig import Rig, digest_of
from benchmarks.serving.bench import Pictures, ServingBench
from benchmarks.serving.cases import overhead, peers, throughput
from benchmarks.serving.peers import STARTERS
from benchmarks.serving.table import goals_of, tables
from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.machine import cores

PACKAGES = ("prelunet", "onnxruntime", "numpy", "pillow", "grpcio", "protobuf")  # that can change a number
MEASURED = ("evaluator", "benchmarks/serving/run.py", "benchmarks/serving/bench.py", "benchmarks/serving/cases.py",
            "benchmarks/serving/engine.py", "benchmarks/serving/load.py", "benchmarks/serving/null.py",
            "benchmarks/serving/peers.py", "benchmarks/serving/peer_classifier.py", "benchmarks/serving/peer_triton.py",
            "benchmarks/serving/peer_mlserver.py")  # fmt: skip
PARTS = {"throughput": throughput, "peers": peers, "overhead": overhead}
OUTPUT = ROOT / "benchmarks" / "results" / "serving.json"
LIMIT = 900  # seconds
QUALITY = 90  # of the pictures as JPEG


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 1 when a case failed, 3 when there was no time for all."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(words)
    begun = time.monotonic()
    now = {
        **header(__file__, _without_places(words), PACKAGES),
        "device": "cpu",
        "tiny": options.tiny,
        "threads": options.threads,
        "source": digest_of(*MEASURED),
        "servers": {},
        "not_measured": {},
    }
    results = Results(options.output, "serving", now, options.limit)
    with tempfile.TemporaryDirectory(prefix="prelunet-serving-") as folder:
        pictures = _pictures(Path(folder) / "pictures", options.data)
        rig = Rig("cpu", options.tiny, Path(folder) / "files")
        pythons = {name: getattr(options, f"{name}_python") for name in STARTERS}
        with ServingBench(rig, Path(folder), pictures, options.threads, pythons, now) as bench:
            for part in options.parts:
                PARTS[part](bench, results)
                bench.stop()
    text = tables(results.data)
    options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return _end(results, time.monotonic() - begun)


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--tiny", action="store_true", help="a small net, few calls, one round: a rehearsal")
    for name in STARTERS:
        parser.add_argument(f"--{name}-python", type=Path, help=f"Python of an environment that has {name}")
    parser.add_argument("--data", type=Path, help="folder of photos, instead of pictures that a formula makes")
    parser.add_argument("--threads", type=int, default=cores(), help="of every engine, and that decode")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which no new case is begun")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args(words)


def _without_places(words: Sequence[str]) -> list[str]:
    """Return the command line as it would be elsewhere: where this machine has its environments helps nobody."""
    told = list(words)
    for option in (f"--{name}-python" for name in STARTERS):
        if option in told:
            told[told.index(option) + 1] = f"{option[2:-7]}/bin/python"
    return told


def _pictures(folder: Path, data: Path | None) -> Pictures:
    """Write the pictures as JPEG: the photos, which are of mixed sizes, and one that is as small as can be."""
    folder.mkdir()
    photos = load_photos(data)
    for number, pixels in enumerate([*(photo.pixels for photo in photos), golden_image(32, 32)]):
        encoded = io.BytesIO()
        Image.fromarray(pixels).save(encoded, "JPEG", quality=QUALITY)
        (folder / f"{number:03}.jpg").write_bytes(encoded.getvalue())
    return Pictures(folder, mixed=tuple(range(len(photos))), equal=(0,), smallest=(len(photos),))


def _end(results: Results, seconds: float) -> int:
    """Tell goals and what is missing."""
    print(f"{results.path}: {len(results.data['cases'])} cases, {seconds:.0f} s")
    for goal in goals_of(results.data):
        print(goal)
    for settings in results.failed:
        print(f"failed: {settings}")
    if results.skipped:
        print(f"no time for {len(results.skipped)} cases: the same command goes on with them")
    return 1 if results.failed else 3 if results.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
