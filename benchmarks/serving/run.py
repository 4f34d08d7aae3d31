"""Compare the server with its own engine, and with Triton and MLServer on the same model file.

    python -m benchmarks.serving.run --triton-python triton/bin/python --mlserver-python mlserver/bin/python \\
        [--output benchmarks/results/serving.json]      measure what is not in the file yet

peers.py explains how to create the two environments. A peer without its option, or that does not start, is reported as
not measured. Servers, engine and clients are separate processes on this machine; contenders take turns in rounds, in an
order shuffled for each round. All answers are compared with the engine's before anything is timed. Each case is written
as soon as it is measured (results.py), with the tables beside it. On two otherwise idle cores all parts take about 13
minutes.

- throughput: images/s of `prelunet serve` with 16 clients, compared to the engine in process; model A and the demo net
- peers:      images/s, median and 99th percentile of the latency of three servers; 1, 4 and 16 closed-loop clients, and
              calls at random moments
- overhead:   sequential calls to a model that computes nothing
"""

import argparse
import io
import sys
import tempfile
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
QUALITY = 90  # JPEG quality of the pictures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 0, or 1 if a case failed, or 3 if the time limit left some out."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(words)
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
    return results.finish(goals_of(results.data))


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
                        help=f"parts to measure, of: {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="rehearsal with a small net, few calls and one round")
    for name in STARTERS:
        parser.add_argument(f"--{name}-python", type=Path, help=f"Python of an environment with {name} (peers.py)")
    parser.add_argument("--data", type=Path, help="folder of photos; default: synthetic pictures")
    parser.add_argument("--threads", type=int, default=cores(), help="threads of every engine and of its decoding")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which no new case starts")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON file to write; tables are written beside it")
    return parser.parse_args(words)


def _without_places(words: Sequence[str]) -> list[str]:
    """Return the command line with the paths of the environments replaced by generic ones."""
    generic = list(words)
    for option in (f"--{name}-python" for name in STARTERS):
        if option in generic:
            generic[generic.index(option) + 1] = f"{option[2:-7]}/bin/python"
    return generic


def _pictures(folder: Path, data: Path | None) -> Pictures:
    """Write the pictures as JPEG: the photos of mixed sizes, and a minimal one of 32x32."""
    folder.mkdir()
    photos = load_photos(data)
    for number, pixels in enumerate([*(photo.pixels for photo in photos), golden_image(32, 32)]):
        encoded = io.BytesIO()
        Image.fromarray(pixels).save(encoded, "JPEG", quality=QUALITY)
        (folder / f"{number:03}.jpg").write_bytes(encoded.getvalue())
    return Pictures(folder, mixed=tuple(range(len(photos))), equal=(0,), smallest=(len(photos),))


if __name__ == "__main__":
    sys.exit(main())
