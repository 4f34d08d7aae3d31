"""Compare the server with its own engine, and with Triton and MLServer on the same model file.

    python -m benchmarks.serving.run --triton-python triton/bin/python --mlserver-python mlserver/bin/python \\
        [--output benchmarks/results/serving.json]      measure what is not in the file yet

peers.py explains how to create the two environments. A peer without its option, or that does not start, is reported as
not measured. Servers, engine and clients are separate processes on this machine. All servers are started five times;
after each start all answers are compared with the engine's, then the contenders of a case take one turn each, in
shuffled orders. Each case is written as soon as it is measured (runner.py), and the tables at the end. On two otherwise
idle cores all parts take about 25 minutes, of which model A at `multi-scale` takes ten.

- throughput: images/s of `prelunet serve`, compared to the engine in process; model A and the demo net
- peers:      images/s and latency of three servers, and of ours with several processes; 1, 4 and 16 clients, and 32
              that share a connection; and latencies when calls come at random moments
- apis:       gRPC, HTTP and TLS: the demo net with 1, 4 and 16 clients, and a model that computes nothing with 16,
              there beside the peers and a bare grpc.aio server (echo.py), with the CPU time of each thread of ours
- restarts:   2,000 calls of our client from 16 threads while the server is stopped and started again three times
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from benchmarks.common.photos import load_photos
from benchmarks.common.results import RESULTS, circumstances, digest_of
from benchmarks.common.rig import Rig
from benchmarks.common.runner import Runner, command_line
from benchmarks.serving.bench import Pictures, ServingBench
from benchmarks.serving.cases import CLIENTS, apis, peers, restarts, throughput
from benchmarks.serving.peers import STARTERS
from benchmarks.serving.table import goals_of, tables
from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.machine import cores

PACKAGES = ("prelunet", "onnxruntime", "numpy", "pillow", "grpcio", "protobuf")  # that can change a number
MEASURED = ("evaluator", "benchmarks/serving", "benchmarks/common/server_process.py")
PARTS = {"throughput": throughput, "peers": peers, "apis": apis, "restarts": restarts}
STARTS = 5  # of all servers
LIMIT = 1800  # seconds
QUALITY = 90  # JPEG quality of the pictures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 0, or 1 if a case failed, or 3 if the time limit left some out."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, output=RESULTS / "serving.json", limit=LIMIT)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
                        help=f"parts to measure, of: {', '.join(PARTS)}")  # fmt: skip
    for name in STARTERS:
        parser.add_argument(f"--{name}-python", type=Path, help=f"Python of an environment with {name} (peers.py)")
    parser.add_argument("--data", type=Path, help="folder of photos; default: synthetic pictures")
    parser.add_argument("--threads", type=int, default=cores(), help="threads of every engine and of its decoding")
    parser.add_argument("--processes", type=int, nargs="*", default=[2], help="processes of our servers beside peers")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="clients of a case beside peers")
    parser.add_argument("--starts", type=int, default=STARTS, help="how often all servers are started")
    options = parser.parse_args(words)
    now = {
        **circumstances(__file__, options, PACKAGES, words),
        "device": "cpu",
        "tiny": options.tiny,
        "threads": options.threads,
        "pictures": options.data and options.data.name,
        "source": digest_of(*MEASURED),
        "servers": {},
        "not_measured": {},
    }
    runner = Runner(options.output, "serving", now, options.limit)
    with tempfile.TemporaryDirectory(prefix="prelunet-serving-") as folder:
        pictures = write_pictures(Path(folder) / "pictures", options.data, tiny=options.tiny)
        rig = Rig("cpu", options.tiny, Path(folder) / "files")
        pythons = {name: getattr(options, f"{name}_python") for name in STARTERS}
        own = options.threads, options.processes, options.clients
        with ServingBench(rig, Path(folder), pictures, *own, pythons, now) as bench:
            for start in range(1 if options.tiny else options.starts):
                for part in options.parts:
                    runner.run(PARTS[part](bench, start))
                    bench.stop()
    return runner.finish(tables(runner.data), goals_of(runner.data))


def write_pictures(folder: Path, data: Path | None, *, tiny: bool) -> Pictures:
    """Write the photos of mixed sizes as JPEG, two for a rehearsal, and a minimal one of 32x32 as PNG."""
    folder.mkdir()
    photos = load_photos(data)[: 2 if tiny else None]
    for number, pixels in enumerate([*(photo.pixels for photo in photos), golden_image(32, 32)]):
        file = folder / f"{number:03}.{'jpg' if number < len(photos) else 'png'}"
        Image.fromarray(pixels).save(file, quality=QUALITY)
    return Pictures(folder, mixed=tuple(range(len(photos))), equal=(0,), smallest=(len(photos),))


if __name__ == "__main__":
    sys.exit(main())
